"""Gates: which tokens keep their policy loss. A gated token stays in the denominators.

Shapes: T completion tokens; of a micro-batch for GATES, of the whole optimizer step for STEP_GATES. The latter compare
tokens of all rows, so they are decided once per optimizer step from a pass without gradients, and never depend on the
split into micro-batches. Functions of a table share one signature; `term` is the Term whose bounds apply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rft_core.losses import Rows
from rft_core.surrogates import Tokens

if TYPE_CHECKING:
    from rft_core.terms import Term

# A probability next to 1 makes log(1 - p) infinite; float32 cannot tell it from 1 within this.
MIN_COMPLEMENT = 1e-7


def no_gate(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    return torch.ones_like(tokens.ratio_T, dtype=torch.bool)


def one_side(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """Keeps a token unless the update would push its ratio further out (REC, arXiv 2509.24203)."""
    below = (tokens.advantages_T >= 0) & (tokens.ratio_T <= 1 + term.gate_high)
    above = (tokens.advantages_T <= 0) & (tokens.ratio_T >= 1 - term.gate_low)
    return below | above


def two_side(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """Keeps ratios within 1 - gate_low .. 1 + gate_high, whatever the advantage."""
    return (tokens.ratio_T >= 1 - term.gate_low) & (tokens.ratio_T <= 1 + term.gate_high)


def ring(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """two_side, and far-off tokens that the update pulls back (REC-Ring, arXiv 2509.24203)."""
    pulled_up = (tokens.advantages_T >= 0) & (tokens.ratio_T <= 1 - term.gate_low_outer)
    pulled_down = (tokens.advantages_T <= 0) & (tokens.ratio_T >= 1 + term.gate_high_outer)
    return two_side(tokens, rows, term) | pulled_up | pulled_down


def off_policy_sequence(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """Drops rows of A < 0 whose tokens have become unlikely: mean(behaviour - lp) > off_policy_limit (DeepSeek-V3.2,
    arXiv 2512.02556). Tokens of unknown behaviour count as old."""
    gap_R = rows.mean_R(tokens.behaviour_T - tokens.logprobs_T.detach())
    return (tokens.advantages_T >= 0) | (gap_R[rows.row_T] <= term.off_policy_limit)


def binary_tv(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """Drops a token that the update pushes away and whose probability is off by more than divergence_limit: the total
    variation of token against not-token (DPPO-Binary-TV, arXiv 2602.04879)."""
    change_T = tokens.logprobs_T.detach().exp() - tokens.anchor_T.exp()
    return ~(_is_pushed_away(change_T, tokens) & (change_T.abs() > term.divergence_limit))


def binary_kl(tokens: Tokens, rows: Rows, term: Term) -> Tensor:
    """The same with KL(anchor | policy) of token against not-token (DPPO-Binary-KL, arXiv 2602.04879)."""
    policy_T, anchor_T = tokens.logprobs_T.detach().double(), tokens.anchor_T.double()
    p_T, q_T = policy_T.exp(), anchor_T.exp()
    others_T = torch.log1p(-q_T.clamp(max=1 - MIN_COMPLEMENT)) - torch.log1p(-p_T.clamp(max=1 - MIN_COMPLEMENT))
    divergence_T = q_T * (anchor_T - policy_T) + (1 - q_T) * others_T
    return ~(_is_pushed_away(p_T - q_T, tokens) & (divergence_T > term.divergence_limit))


def _is_pushed_away(change_T: Tensor, tokens: Tokens) -> Tensor:
    return _has_sign_of(change_T, tokens.advantages_T)


def _has_sign_of(change_T: Tensor, advantages_T: Tensor) -> Tensor:
    return ((advantages_T > 0) & (change_T > 0)) | ((advantages_T < 0) & (change_T < 0))


class StepTokens(NamedTuple):
    """All tokens of an optimizer step that are run, flat; masked positions may hold anything finite."""

    log_ratio_T: Tensor  # float32: to the term's anchor, token by token
    logprobs_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor
    mask_T: Tensor  # bool: trained, of the term's rows
    draw_T: Tensor  # float64 in [0, 1): a seeded number of each token


def second_moment(tokens: StepTokens, term: Term) -> Tensor:
    """Keeps as many tokens that the update pushes away as bring the mean of their squared log ratios to at most
    second_moment_limit, the nearest first; others always (M2PO, arXiv 2510.01161). Equal ones stay or go together."""
    is_candidate_T = tokens.mask_T & _has_sign_of(tokens.log_ratio_T, tokens.advantages_T)
    square_T = tokens.log_ratio_T.double().square()
    ordered, _ = square_T[is_candidate_T].sort()
    if not len(ordered):
        return torch.ones_like(tokens.mask_T)
    # The squares ascend, so their running mean does too: what is within the limit is a prefix.
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    num_kept = int((means <= term.second_moment_limit).sum())
    if num_kept == len(ordered):
        return torch.ones_like(tokens.mask_T)
    return ~is_candidate_T | (square_T < ordered[num_kept])


def entropy_quantile(tokens: StepTokens, term: Term) -> Tensor:
    """Keeps tokens whose entropy is at least the quantile over the step's trained tokens (arXiv 2506.01939)."""
    entropies = tokens.entropy_T[tokens.mask_T].double()
    if not len(entropies):
        return torch.zeros_like(tokens.mask_T)
    ordered, _ = entropies.sort()  # torch.quantile takes at most 16 million values
    place = round(term.entropy_quantile * (len(ordered) - 1), 9)  # .7 x 10 is 7, not a little more
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[below], ordered[above], place - below)
    return tokens.entropy_T.double() >= threshold


def covariance_band(tokens: StepTokens, term: Term) -> Tensor:
    """Drops a few tokens, drawn among those whose (A - mean A) (lp - mean lp) lies within covariance_low ..
    covariance_high: covariance_share of the trained ones, at least one (Clip-Cov, arXiv 2505.22617).

    Tokens that the clip holds anyway are no candidates.
    """
    mask_T = tokens.mask_T
    num_trained = int(mask_T.sum())
    if not num_trained:
        return torch.ones_like(mask_T)
    advantages_T = tokens.advantages_T.double()
    covariance_T = _covariance(tokens)
    ratio_T = tokens.log_ratio_T.double().exp()
    is_clipped_T = (advantages_T > 0) & (ratio_T > 1 + term.clip_high)
    is_clipped_T = is_clipped_T | ((advantages_T < 0) & (ratio_T < 1 - term.clip_low))
    is_inside_T = (covariance_T > term.covariance_low) & (covariance_T < term.covariance_high)
    candidates = torch.nonzero(mask_T & is_inside_T & ~is_clipped_T).flatten()
    num_dropped = max(int(term.covariance_share * num_trained), 1)
    drawn = candidates[tokens.draw_T[candidates].argsort()[:num_dropped]]
    kept_T = torch.ones_like(mask_T)
    kept_T[drawn] = False
    return kept_T


def covariance_top(tokens: StepTokens, term: Term) -> Tensor:
    """The covariance_top_share of the trained tokens, at least one, with the largest (A - mean A) (lp - mean lp): what
    KL-Cov holds to the anchor (arXiv 2505.22617). Of equal ones the earlier drawn."""
    mask_T = tokens.mask_T
    num_trained = int(mask_T.sum())
    chosen_T = torch.zeros_like(mask_T)
    if num_trained:
        places = torch.nonzero(mask_T).flatten()
        covariance = _covariance(tokens)[places]
        by_draw = tokens.draw_T[places].argsort()
        order = by_draw[covariance[by_draw].argsort(descending=True, stable=True)]
        chosen_T[places[order[: max(int(term.covariance_top_share * num_trained), 1)]]] = True
    return chosen_T


def _covariance(tokens: StepTokens) -> Tensor:
    """float64[T] (A - mean A) (lp - mean lp), the means over the trained tokens of the step."""
    advantages_T, logprobs_T = tokens.advantages_T.double(), tokens.logprobs_T.double()
    mask_T = tokens.mask_T
    return (advantages_T - advantages_T[mask_T].mean()) * (logprobs_T - logprobs_T[mask_T].mean())


GATES = {
    "none": no_gate,
    "one_side": one_side,
    "two_side": two_side,
    "ring": ring,
    "off_policy_sequence": off_policy_sequence,
    "binary_tv": binary_tv,
    "binary_kl": binary_kl,
}

STEP_GATES = {
    "second_moment": second_moment,
    "entropy_quantile": entropy_quantile,
    "covariance_band": covariance_band,
}

# Of the regularizer: True where it is added.
REGULARIZER_GATES = {"covariance_top": covariance_top}
