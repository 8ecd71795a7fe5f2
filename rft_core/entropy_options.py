"""The adaptive coefficient of the entropy bonus: what a recipe says of it, and how it moves. Pure; no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rft_core.errors import SettingsError
from rft_core.terms import AdaptiveEntropy, Algorithm

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings


def resolve_adaptive_entropy(row: Algorithm, settings: AlgorithmSettings) -> AdaptiveEntropy | None:
    """Null where the coefficient is fixed. Raises SettingsError for settings that nothing would read."""
    given = {"delta": settings.entropy_delta, "largest": settings.entropy_coefficient_max}
    fields = type(settings).model_fields
    names = {"delta": "entropy_delta", "largest": "entropy_coefficient_max"}
    changed = {key: value for key, value in given.items() if value != fields[names[key]].default}
    adaptive = row.adaptive_entropy
    if settings.entropy_target is not None:
        adaptive = AdaptiveEntropy(settings.entropy_target) if adaptive is None else adaptive
        adaptive = replace(adaptive, target=settings.entropy_target)
    if adaptive is None:
        for key in changed:
            raise SettingsError(f"algorithm.{names[key]} has no effect: entropy_target is null")
        return None
    adaptive = replace(adaptive, **changed)
    if row.head != "causal":
        raise SettingsError(f"algorithm.entropy_target must be null for {row.name}: scores have no entropy")
    start = settings.entropy_coefficient or row.entropy_coefficient
    if start > adaptive.largest:
        raise SettingsError(
            "algorithm.entropy_coefficient, where it starts, must be at most entropy_coefficient_max, got "
            f"{start:g} and {adaptive.largest:g}"
        )
    return adaptive


def adapted_entropy_coefficient(coefficient: float, entropy: float | None, adaptive: AdaptiveEntropy) -> float:
    """c + delta below the target, c - delta above it, within 0 .. largest (Skywork-OR1, arXiv 2505.22312, section 4).

    `entropy` is the token mean of the update, in nats; null or not finite leaves c as it is.

    >>> adapted_entropy_coefficient(0.005, 0.1, AdaptiveEntropy(target=0.2))
    0.01
    """
    if entropy is None or not math.isfinite(entropy) or entropy == adaptive.target:
        return coefficient
    step = adaptive.delta if entropy < adaptive.target else -adaptive.delta
    return min(max(coefficient + step, 0.0), adaptive.largest)
