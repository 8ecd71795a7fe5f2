"""Gates that look at all trained tokens of an optimizer step: which of them they drop. Imports nothing of ours."""

from __future__ import annotations

import math

import numpy as np


def _second_moment(tokens, spec):
    """Sorts the candidates and takes them one by one, as long as the mean stays within the limit."""
    candidates = [
        number
        for number, token in enumerate(tokens)
        if (token.advantage > 0 and token.log_ratio > 0) or (token.advantage < 0 and token.log_ratio < 0)
    ]
    candidates.sort(key=lambda number: abs(tokens[number].log_ratio))
    kept, total = 0, 0.0
    for number in candidates:
        total += tokens[number].log_ratio ** 2
        if total / (kept + 1) > spec["second_moment_limit"]:
            break
        kept += 1
    return candidates[kept:]


def _entropy_quantile(tokens, spec):
    entropies = np.array([token.entropy.item() for token in tokens])
    threshold = np.quantile(entropies, spec["entropy_quantile"])
    return np.flatnonzero(entropies < threshold).tolist()


def _covariance_band(tokens, spec):
    mean_advantage = np.mean([token.advantage for token in tokens])
    mean_logprob = np.mean([token.logprob for token in tokens])
    candidates = []
    for number, token in enumerate(tokens):
        covariance = (token.advantage - mean_advantage) * (token.logprob - mean_logprob)
        ratio = math.exp(min(token.log_ratio, 700.0))
        is_clipped = (token.advantage > 0 and ratio > 1 + spec["clip_high"]) or (
            token.advantage < 0 and ratio < 1 - spec["clip_low"]
        )
        if spec["covariance_low"] < covariance < spec["covariance_high"] and not is_clipped:
            candidates.append(number)
    candidates.sort(key=lambda number: tokens[number].draw)
    return candidates[: max(1, math.floor(spec["covariance_share"] * len(tokens)))]


def _covariance_top(tokens, spec):
    """Which of them the regularizer holds."""
    mean_advantage = np.mean([token.advantage for token in tokens])
    mean_logprob = np.mean([token.logprob for token in tokens])
    values = [(token.advantage - mean_advantage) * (token.logprob - mean_logprob) for token in tokens]
    order = sorted(range(len(tokens)), key=lambda number: (-values[number], tokens[number].draw))
    return order[: max(1, math.floor(spec["covariance_top_share"] * len(tokens)))]


REGULARIZER_GATES = {"covariance_top": _covariance_top}

STEP_GATES = {
    "second_moment": _second_moment,
    "entropy_quantile": _entropy_quantile,
    "covariance_band": _covariance_band,
}
