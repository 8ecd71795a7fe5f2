"""Log-probability and entropy of chosen tokens, in float32, without copies of the whole logits.

Shapes: T tokens, V vocabulary. With x = logits / temperature and p = softmax(x):

    logprob = x[target] - logsumexp(x)          d logprob / d x = onehot(target) - p
    entropy = logsumexp(x) - sum(p x)           d entropy / d x = -p (log p + entropy)

PyTorch's log_softmax keeps a second [T, V] for the backward pass and the entropy a third and a fourth; at a vocabulary
of 50,000 or more they outweigh the rest of a small model. Here a few rows at a time go through a buffer that fits the
cache; the backward pass computes p again from logsumexp, and allocates only the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rft_core.kernels.implementation import implementation

BUFFER_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # 16 MiB stays near the caches of a CPU; a GPU wants large launches
LOWEST = -1e30  # finite stand-in for log 0


def token_logprob(
    logits_TV: Tensor, targets_T: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logprob_T, entropy_T) in nats, float32, of softmax(logits / temperature) computed in float32.

    logits_TV may be of any float type; its gradient comes in the same type. The entropy is differentiable only with
    `entropy_gradient`. Logits of -inf stand for tokens that cannot be chosen.
    """
    if logits_TV.ndim != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise ValueError(f"logits [T, V] and targets [T] must fit, got {logits_TV.shape} and {targets_T.shape}")
    return _TokenLogprob.apply(logits_TV, targets_T, float(temperature), entropy_gradient)


def token_logprob_reference(logits_TV: Tensor, targets_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same by torch's own operations, both outputs differentiable: what `token_logprob` must match."""
    log_p_TV = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
    logprob_T = log_p_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    entropy_T = -torch.where(log_p_TV == -torch.inf, 0.0, log_p_TV.exp() * log_p_TV).sum(-1)
    return logprob_T, entropy_T


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        if implementation(logits_TV.device) == "triton":
            from rft_core.kernels.token_logprob_triton import forward

            logprob_T, entropy_T, logsumexp_T = forward(logits_TV, targets_T, temperature)
        else:
            logprob_T, entropy_T, logsumexp_T = _forward(logits_TV, targets_T, temperature)
        ctx.save_for_backward(logits_TV, targets_T, logsumexp_T, entropy_T)
        ctx.temperature = temperature
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.entropy_gradient = entropy_gradient
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, targets_T, logsumexp_T, entropy_T = ctx.saved_tensors
        of_entropy_T = grad_entropy_T if ctx.entropy_gradient else None
        if implementation(logits_TV.device) == "triton":
            from rft_core.kernels.token_logprob_triton import backward
        else:
            backward = _backward
        grad_TV = backward(logits_TV, targets_T, ctx.temperature, logsumexp_T, entropy_T, grad_logprob_T, of_entropy_T)
        return grad_TV, None, None, None


def _forward(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and logsumexp of each token, float32."""
    logprob_T, entropy_T, logsumexp_T = logits_TV.new_empty((3, len(logits_TV)), dtype=torch.float32)
    for rows, x, p in _chunks(logits_TV, temperature):
        chosen = x.gather(-1, targets_T[rows, None]).squeeze(-1)
        top = x.amax(-1)
        x -= top[:, None]
        torch.exp(x, out=p)
        total = p.sum(-1)
        logsumexp_T[rows] = top + total.log()
        logprob_T[rows] = chosen - logsumexp_T[rows]
        # A logit of -inf contributes 0 to the entropy, and 0 * -inf would be NaN.
        entropy_T[rows] = total.log() - p.mul_(x.clamp_min_(LOWEST)).sum(-1) / total
    return logprob_T, entropy_T, logsumexp_T


def _backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    logsumexp_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """The gradient of the logits, in their type."""
    grad_TV = torch.empty_like(logits_TV)
    for rows, x, p in _chunks(logits_TV, temperature):
        x -= logsumexp_T[rows, None]
        torch.exp(x, out=p)
        scale = -grad_logprob_T[rows, None]
        if grad_entropy_T is not None:
            x.clamp_min_(LOWEST).add_(entropy_T[rows, None]).mul_(-grad_entropy_T[rows, None]).add_(scale)
            p *= x
        else:
            p *= scale
        p.scatter_add_(-1, targets_T[rows, None], grad_logprob_T[rows, None].contiguous())
        grad_TV[rows] = p if temperature == 1 else p.div_(temperature)
    return grad_TV


def _chunks(logits_TV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of rows; with each, logits / temperature in float32 and a second [rows, V] to work in. Both are reused."""
    num_tokens, vocabulary = logits_TV.shape
    elements = BUFFER_ELEMENTS.get(logits_TV.device.type, BUFFER_ELEMENTS["cuda"])
    size = max(1, min(num_tokens, elements // max(1, vocabulary)))
    buffers = logits_TV.new_empty((2, size, vocabulary), dtype=torch.float32)
    for start in range(0, num_tokens, size):
        stop = min(start + size, num_tokens)
        x, p = buffers[:, : stop - start]
        x.copy_(logits_TV[start:stop])  # before the division: bfloat16 / float would be rounded to bfloat16
        if temperature != 1:
            x /= temperature
        yield slice(start, stop), x, p
