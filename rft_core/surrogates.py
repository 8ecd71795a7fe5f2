"""Surrogates: the policy loss of a token, to be minimised. Pure torch functions, and the table that names them.

Shapes: T completion tokens of a micro-batch. All share one signature; `term` is the Term whose bounds apply. Two kinds:
through the ratio (the gradient of rho is rho times that of lp), and through the likelihood alone, with a weight that
carries no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rft_core.terms import Term


class Tokens(NamedTuple):
    """What a surrogate or a gate may read; all float32[T], finite, masked positions included."""

    logprobs_T: Tensor
    anchor_T: Tensor
    ratio_T: Tensor  # at the term's level
    advantages_T: Tensor
    behaviour_T: Tensor  # old where it is not known


# Ratio kind.


def clipped(tokens: Tokens, term: Term) -> Tensor:
    """max(-A rho, -A clip(rho)) (PPO, arXiv 1707.06347, eq. 7); with `dual_clip`, at most -A dual_clip for A < 0
    (arXiv 1912.09729, eq. 5)."""
    clipped_ratio_T = tokens.ratio_T.clamp(1 - term.clip_low, 1 + term.clip_high)
    loss_T = torch.maximum(-tokens.advantages_T * tokens.ratio_T, -tokens.advantages_T * clipped_ratio_T)
    if term.dual_clip is None:
        return loss_T
    bounded_T = torch.minimum(loss_T, -tokens.advantages_T * term.dual_clip)
    return torch.where(tokens.advantages_T < 0, bounded_T, loss_T)


def unclipped(tokens: Tokens, term: Term) -> Tensor:
    return -tokens.advantages_T * tokens.ratio_T


def soft_gate(tokens: Tokens, term: Term) -> Tensor:
    """-A f(rho), f = 4 / tau sigmoid(tau (rho - 1)), tau by the sign of A (SAPO, arXiv 2511.20347).

    The gradient's weight f'(rho) rho is 1 at rho = 1 and falls to 0 far away. To detach f and multiply lp by it would
    weigh by f itself: 2 at rho = 1, and growing.
    """
    steepness_T = torch.where(tokens.advantages_T > 0, term.soft_gate_positive, term.soft_gate_negative)
    return -tokens.advantages_T * torch.sigmoid(steepness_T * (tokens.ratio_T - 1)) * 4 / steepness_T


# Likelihood kind: -A sg(w) lp.


def logprob(tokens: Tokens, term: Term) -> Tensor:
    """-A lp (REINFORCE): its gradient is right on-policy only, so it takes one optimizer step per batch."""
    return -tokens.advantages_T * tokens.logprobs_T


def probability_weighted(tokens: Tokens, term: Term) -> Tensor:
    """-A sg(p) lp (DFT, arXiv 2508.05629, eq. 9): undoes the 1 / p in the gradient of the likelihood."""
    return -tokens.advantages_T * tokens.logprobs_T.detach().exp() * tokens.logprobs_T


def uncertainty_weighted(tokens: Tokens, term: Term) -> Tensor:
    """-A sg(p (1 - p)) lp (CHORD, arXiv 2508.11408): no pull where a token is certain, or certainly not chosen."""
    probability_T = tokens.logprobs_T.detach().exp()
    return -tokens.advantages_T * probability_T * (1 - probability_T) * tokens.logprobs_T


def logistic(tokens: Tokens, term: Term) -> Tensor:
    """-logsig(A score): cross-entropy of a score, which stands where a logprob does, against 1 (good) or -1 (bad)."""
    return -torch.nn.functional.logsigmoid(tokens.advantages_T * tokens.logprobs_T)


def log_ratio(tokens: Tokens, term: Term) -> Tensor:
    """-A (lp - anchor): the gradient of `logprob`, with a value that starts at 0."""
    return -tokens.advantages_T * (tokens.logprobs_T - tokens.anchor_T)


def ratio_logprob(tokens: Tokens, term: Term) -> Tensor:
    """w = rho: the gradient of `unclipped`, with another value (REC with importance weights, arXiv 2509.24203)."""
    return _weighted_logprob(tokens.ratio_T, tokens)


def capped(tokens: Tokens, term: Term) -> Tensor:
    """w = clip(rho, weight_floor, weight_cap), absolute bounds; no token loses its gradient (CISPO, arXiv 2506.13585,
    section 3.1)."""
    return _weighted_logprob(tokens.ratio_T.clamp(term.weight_floor, term.weight_cap), tokens)


def tapered(tokens: Tokens, term: Term) -> Tensor:
    """w = 1 where A > taper_threshold, else min(1, rho): bad completions that have become unlikely are left in peace
    (TOPR, arXiv 2503.14286)."""
    ones_T = torch.ones_like(tokens.ratio_T)
    weight_T = torch.where(tokens.advantages_T > term.taper_threshold, ones_T, tokens.ratio_T.clamp(max=1.0))
    return _weighted_logprob(weight_T, tokens)


def exp_advantage(tokens: Tokens, term: Term) -> Tensor:
    """w = exp(A / advantage_temperature) (REC with advantage weights, arXiv 2509.24203)."""
    return _weighted_logprob((tokens.advantages_T / term.advantage_temperature).exp(), tokens)


def gamma(tokens: Tokens, term: Term) -> Tensor:
    """w = rho^k exp(lambda (1 - rho)), k and lambda by the sign of A; 1 at rho = 1 (VESPO, arXiv 2602.10693)."""
    is_positive_T = tokens.advantages_T >= 0
    shape_T = torch.where(is_positive_T, term.gamma_shape_positive, term.gamma_shape_negative).double()
    rate_T = torch.where(is_positive_T, term.gamma_rate_positive, term.gamma_rate_negative).double()
    # float64: an exponent of some tens would lose the last digits of float32.
    ratio_T = tokens.ratio_T.detach().double()
    return _weighted_logprob((shape_T * ratio_T.log() + rate_T * (1 - ratio_T)).exp(), tokens)


def _weighted_logprob(weight_T: Tensor, tokens: Tokens) -> Tensor:
    return -tokens.advantages_T * weight_T.detach() * tokens.logprobs_T


# Regularizers: added to a token's loss, whatever its advantage and gate.


def no_regularizer(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.logprobs_T)


def log_likelihood(tokens: Tokens) -> Tensor:
    """-lp: towards the sampled tokens, the gradient of KL(behaviour | policy) (REC, arXiv 2509.24203)."""
    return -tokens.logprobs_T


def squared_log_ratio(tokens: Tokens) -> Tensor:
    """(lp - anchor)^2 (REC, arXiv 2509.24203)."""
    return (tokens.logprobs_T - tokens.anchor_T).square()


def absolute_log_ratio(tokens: Tokens) -> Tensor:
    """|lp - anchor|: a constant pull back to the anchor (KL-Cov, arXiv 2505.22617, as its authors' code has it)."""
    return (tokens.logprobs_T - tokens.anchor_T).abs()


SURROGATES = {
    "clipped": clipped,
    "unclipped": unclipped,
    "soft_gate": soft_gate,
    "logprob": logprob,
    "probability_weighted": probability_weighted,
    "uncertainty_weighted": uncertainty_weighted,
    "logistic": logistic,
    "log_ratio": log_ratio,
    "ratio_logprob": ratio_logprob,
    "capped": capped,
    "tapered": tapered,
    "exp_advantage": exp_advantage,
    "gamma": gamma,
}

# Their gradient holds no ratio to the anchor, so an off-policy weight starts from the current policy, not from old.
LIKELIHOOD_SURROGATES = frozenset(SURROGATES) - {"clipped", "unclipped", "soft_gate"}

REGULARIZERS = {
    "none": no_regularizer,
    "log_likelihood": log_likelihood,
    "squared_log_ratio": squared_log_ratio,
    "absolute_log_ratio": absolute_log_ratio,
}
