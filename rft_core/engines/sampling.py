"""Drawing one token per row by inverting the distribution function, and the logprob of what was drawn.

R rows, V vocabulary, K blocks of B weights, N candidates.

`torch.multinomial` costs more than a small model's forward pass at V = 50k on a CPU, and draws from one generator for
the whole batch. Here each row brings its own uniform, and the search has two levels: the sums of blocks of the
vocabulary, then the block that was hit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rft_core.engines import Sampling

BLOCK = 256  # near sqrt(V): the block sums and the block that was hit are then both short
NUCLEUS_CANDIDATES = 1024  # top_p rarely needs more; rows that do are sorted whole


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """(token_R int64, logprob_R float32, is_finite_R bool); `uniform_R` is float64 in [0, 1).

    logprob_R is of the distribution really drawn from; see Sampling for greedy. Logits of -inf have probability 0. A
    row with a NaN, a +inf or nothing but -inf is not finite: its token and logprob mean nothing.
    """
    top_R = logits_RV.amax(dim=-1).float()  # NaN when a row holds one
    is_finite_R = torch.isfinite(top_R)
    if not bool(is_finite_R.all()):
        logits_RV = torch.where(is_finite_R[:, None], logits_RV, 0.0)
        top_R = torch.where(is_finite_R, top_R, 0.0)
    if sampling.is_greedy:
        token_R = logits_RV.argmax(dim=-1)
        total_R = _weights(logits_RV, top_R, 1.0).sum(dim=-1, dtype=torch.float64)
        return token_R, -total_R.log().float(), is_finite_R
    if sampling.is_truncated:
        token_R, logprob_R = _draw_truncated(logits_RV, top_R, uniform_R, sampling)
        return token_R, logprob_R, is_finite_R
    token_R, total_R = invert(_weights(logits_RV, top_R, sampling.temperature), uniform_R)
    chosen_R = logits_RV.gather(1, token_R[:, None])[:, 0].float()
    logprob_R = ((chosen_R - top_R).double() / sampling.temperature - total_R.log()).float()
    return token_R, logprob_R, is_finite_R


def invert(weights_RN: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """(index_R, total_R float64): the first index whose cumulated weight exceeds uniform * total.

    Weights are not negative and need not sum to 1; an index of weight 0 is never returned, whatever the rounding.
    """
    num_rows, num_weights = weights_RN.shape
    if num_weights % BLOCK:
        weights_RN = pad(weights_RN, (0, BLOCK - num_weights % BLOCK))
    blocks_RKB = weights_RN.view(num_rows, -1, BLOCK)
    sum_RK = blocks_RKB.sum(dim=-1).double()
    cumulated_RK = sum_RK.cumsum(dim=-1)
    total_R = cumulated_RK[:, -1]
    target_R = uniform_R * total_R
    block_R = _first_above(cumulated_RK, target_R)
    before_R = pad(cumulated_RK, (1, 0)).gather(1, block_R[:, None])[:, 0]
    inside_RB = blocks_RKB[torch.arange(num_rows, device=block_R.device), block_R].double().cumsum(dim=-1)
    return block_R * BLOCK + _first_above(inside_RB, target_R - before_R), total_R


def _first_above(cumulated_RN: Tensor, target_R: Tensor) -> Tensor:
    """First index above the target; rounding can put the target at the end, then the last index that adds weight."""
    first_R = (cumulated_RN <= target_R[:, None]).sum(dim=-1)
    last_R = (cumulated_RN < cumulated_RN[:, -1:]).sum(dim=-1)
    return torch.minimum(first_R, last_R)


def _weights(logits_RN: Tensor, top_R: Tensor, temperature: float) -> Tensor:
    """In float32, as `top_R` is; the logits may be bfloat16 and are not copied for it."""
    weights_RN = logits_RN - top_R[:, None]
    if temperature != 1.0:
        weights_RN.div_(temperature)
    return weights_RN.exp_()


def _draw_truncated(logits_RV: Tensor, top_R: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """top_k keeps exactly k tokens; top_p the shortest prefix, by falling probability, that reaches top_p."""
    size = logits_RV.shape[1]
    num_candidates = min(sampling.top_k or NUCLEUS_CANDIDATES, size)
    logits_RN, token_RN = logits_RV.topk(num_candidates, dim=-1)
    weights_RN = _weights(logits_RN, top_R, sampling.temperature).double()
    if sampling.top_k:
        mass_R = weights_RN.sum(dim=-1)
    else:
        mass_R = _weights(logits_RV, top_R, sampling.temperature).sum(dim=-1, dtype=torch.float64)
    token_R, logprob_R = _draw_nucleus(weights_RN, token_RN, sampling.top_p * mass_R, uniform_R)
    if sampling.top_k or num_candidates == size:
        return token_R, logprob_R
    # A row is sorted whole or not by its own logits only, so that the rows beside it change nothing.
    for row in (weights_RN.sum(dim=-1) < sampling.top_p * mass_R).nonzero()[:, 0].tolist():
        one = slice(row, row + 1)
        logits_1V, token_1V = logits_RV[one].sort(dim=-1, descending=True, stable=True)
        weights_1V = _weights(logits_1V, top_R[one], sampling.temperature).double()
        token_R[one], logprob_R[one] = _draw_nucleus(weights_1V, token_1V, sampling.top_p * mass_R[one], uniform_R[one])
    return token_R, logprob_R


def _draw_nucleus(weights_RN: Tensor, token_RN: Tensor, mass_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Weights fall along N. A candidate is kept while those before it hold less than `mass_R`; the first always is."""
    before_RN = weights_RN.cumsum(dim=-1) - weights_RN
    kept_RN = torch.where(before_RN < mass_R[:, None], weights_RN, 0.0)
    index_R, total_R = invert(kept_RN, uniform_R)
    chosen_R = kept_RN.gather(1, index_R[:, None])[:, 0]
    return token_RN.gather(1, index_R[:, None])[:, 0], (chosen_R / total_R).log().float()
