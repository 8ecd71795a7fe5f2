"""`linear_logprob` whose pointwise work is two Triton kernels: each piece of logits is read once a pass.

Matrix products stay with the library of the device, which nothing written here would beat; see linear_logprob.py for
the loop over pieces, the maths and the reference.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rft_core.kernels.linear_logprob import Piece, Running, Slopes

BLOCK = 1024  # of the vocabulary at once
LOWEST = tl.constexpr(-1e30)  # finite stand-in for log 0: 0 * -inf would be NaN


class TritonPointwise:
    def accumulate(self, piece: Piece, running: Running) -> None:
        state = [x_T[piece.rows] for x_T in (running.top_T, running.total_T, running.mean_T, running.chosen_T)]
        _accumulate[(len(piece.logits_TC),)](*_shared(piece), *state, **_options(piece))

    def differentiate(self, piece: Piece, slopes: Slopes) -> Tensor:
        has_entropy = slopes.grad_entropy_T is not None
        given = [slopes.logsumexp_T, slopes.entropy_T, slopes.grad_logprob_T.contiguous()]
        given.append(slopes.grad_entropy_T.contiguous() if has_entropy else slopes.entropy_T)
        _differentiate[(len(piece.logits_TC),)](*_shared(piece), *given, HAS_ENTROPY=has_entropy, **_options(piece))
        return piece.logits_TC


def _shared(piece: Piece) -> list[Any]:
    bias = piece.logits_TC if piece.bias_C is None else piece.bias_C
    return [piece.logits_TC, bias, piece.place_T, piece.logits_TC.shape[1], piece.softcap, piece.factor]


def _options(piece: Piece) -> dict[str, Any]:
    return {"HAS_BIAS": piece.bias_C is not None, "HAS_CAP": piece.softcap != 0, "BLOCK": BLOCK}


@triton.jit
def _x(logits, bias, row, columns, width, softcap, factor, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Capped logits, and logits / temperature, in float32; -inf beyond the piece."""
    is_inside = columns < width
    z = tl.load(logits + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_CAP:
        z = softcap * (2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0)
    return z, tl.where(is_inside, z * factor, float("-inf"))


@triton.jit
def _accumulate(
    logits,
    bias,
    places,
    width,
    softcap,
    factor,
    tops,
    totals,
    means,
    chosen,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    top, total, mean = tl.load(tops + row), tl.load(totals + row), tl.load(means + row)
    at_target = tl.load(chosen + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        _, x = _x(logits, bias, row, columns, width, softcap, factor, HAS_BIAS, HAS_CAP)
        at_target += tl.sum(tl.where((columns == place) & (columns < width), x, 0.0))
        raised = tl.maximum(top, tl.max(x))
        fade = tl.exp(top - raised)
        shift = tl.where(total > 0, raised - top, 0.0)
        p = tl.exp(x - raised)
        mean = fade * (mean - shift * total) + tl.sum(p * tl.maximum(x - raised, LOWEST))
        total = fade * total + tl.sum(p)
        top = raised
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(means + row, mean)
    tl.store(chosen + row, at_target)


@triton.jit
def _differentiate(
    logits,
    bias,
    places,
    width,
    softcap,
    factor,
    logsumexps,
    entropies,
    grad_logprobs,
    grad_entropies,
    HAS_ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradient where the logits were."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    logsumexp, grad_logprob = tl.load(logsumexps + row), tl.load(grad_logprobs + row)
    entropy, grad_entropy = tl.load(entropies + row), tl.load(grad_entropies + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_inside = columns < width
        z, x = _x(logits, bias, row, columns, width, softcap, factor, HAS_BIAS, HAS_CAP)
        log_p = x - logsumexp
        p = tl.exp(log_p)
        gradient = tl.where(columns == place, grad_logprob, 0.0) - p * grad_logprob
        if HAS_ENTROPY:
            gradient -= p * (tl.maximum(log_p, LOWEST) + entropy) * grad_entropy
        gradient *= factor
        if HAS_CAP:
            gradient *= 1.0 - (z / softcap) * (z / softcap)
        tl.store(logits + row * width + columns, gradient.to(logits.dtype.element_ty), mask=is_inside)
