"""The adaptive coefficient of the KL term. Pure; no torch."""

from __future__ import annotations

import math

MAX_ERROR = 0.2  # a single update never moves the coefficient by more than this x rollouts / horizon


def adapted_coefficient(coefficient: float, kl: float | None, num_rollouts: int, target: float, horizon: int) -> float:
    """c (1 + clip(kl / target - 1, -.2, .2) n / horizon) (arXiv 1909.08593, section 2.2).

    `kl` is the mean over the update's rollouts of their token mean, in nats; null or not finite leaves c as it is.

    >>> adapted_coefficient(0.2, 0.2, num_rollouts=10, target=0.1, horizon=100)
    0.20400000000000001
    """
    if kl is None or not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * num_rollouts / horizon)
