"""`token_logprob` as two Triton kernels: logits are read once in each pass and written once, as their gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # of the vocabulary at once
LOWEST = tl.constexpr(-1e30)  # finite stand-in for log 0: 0 * -inf would be NaN


def forward(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and logsumexp of each token, float32."""
    made = [logits_TV.new_empty(len(targets_T), dtype=torch.float32) for _ in range(3)]
    if len(targets_T):
        _forward[(len(targets_T),)](logits_TV, targets_T, *made, 1 / temperature, *_form(logits_TV), BLOCK=BLOCK)
    return made[0], made[1], made[2]


def backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    logsumexp_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """The gradient of the logits, in their type."""
    grad_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    given = [logsumexp_T, entropy_T, grad_logprob_T.contiguous()]
    given.append(entropy_T if grad_entropy_T is None else grad_entropy_T.contiguous())
    if len(targets_T):
        _backward[(len(targets_T),)](
            logits_TV,
            targets_T,
            *given,
            grad_TV,
            1 / temperature,
            *_form(logits_TV),
            HAS_ENTROPY=grad_entropy_T is not None,
            BLOCK=BLOCK,
        )
    return grad_TV


def _form(logits_TV: Tensor) -> tuple[Any, ...]:
    return logits_TV.shape[1], logits_TV.stride(0), logits_TV.stride(1)


@triton.jit
def _load(logits, row, columns, factor, vocabulary, row_stride, column_stride):
    where = logits + row * row_stride + columns.to(tl.int64) * column_stride
    x = tl.load(where, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    return x * factor


@triton.jit
def _forward(
    logits,
    targets,
    logprobs,
    entropies,
    logsumexps,
    factor,
    vocabulary,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    top, total, mean, chosen = float("-inf"), 0.0, 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(logits, row, columns, factor, vocabulary, row_stride, column_stride)
        chosen += tl.sum(tl.where(columns == target, x, 0.0))
        raised = tl.maximum(top, tl.max(x))
        # Nothing but -inf so far: any finite reference does.
        held = tl.where(raised == float("-inf"), 0.0, raised)
        fade = tl.where(total > 0, tl.exp(top - held), 0.0)
        shift = tl.where(total > 0, held - top, 0.0)
        p = tl.exp(x - held)
        mean = fade * (mean - shift * total) + tl.sum(p * tl.maximum(x - held, LOWEST))
        total = fade * total + tl.sum(p)
        top = raised
    logsumexp = top + tl.log(total)
    tl.store(logsumexps + row, logsumexp)
    tl.store(logprobs + row, chosen - logsumexp)
    tl.store(entropies + row, tl.log(total) - mean / total)


@triton.jit
def _backward(
    logits,
    targets,
    logsumexps,
    entropies,
    grad_logprobs,
    grad_entropies,
    grads,
    factor,
    vocabulary,
    row_stride,
    column_stride,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logsumexp, grad_logprob = tl.load(logsumexps + row), tl.load(grad_logprobs + row)
    entropy, grad_entropy = tl.load(entropies + row), tl.load(grad_entropies + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log_p = _load(logits, row, columns, factor, vocabulary, row_stride, column_stride) - logsumexp
        p = tl.exp(log_p)
        gradient = tl.where(columns == target, grad_logprob, 0.0) - p * grad_logprob
        if HAS_ENTROPY:
            gradient -= p * (tl.maximum(log_p, LOWEST) + entropy) * grad_entropy
        gradient = (gradient * factor).to(grads.dtype.element_ty)
        tl.store(grads + row * vocabulary + columns, gradient, mask=columns < vocabulary)
