"""The loss of a critic on a micro-batch, and the sums behind its metrics.

Shapes: T completion tokens, flat. Denominators are of the whole optimizer step, so the split changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_core.losses import Denominators, LossParts
from rft_core.terms import ValueTerm

FLAT = 1e-12  # a variance below this share of the mean square is rounding


@dataclass(frozen=True)
class ValueBatch:
    """One micro-batch; entries where mask_T is False may be anything, NaN too."""

    values_T: Tensor  # float32, carries the gradient
    returns_T: Tensor  # float32
    mask_T: Tensor  # bool: trained tokens
    weight_T: Tensor  # float32: `weight` of each token's row
    old_T: Tensor | None = None  # values before the update; None: of now


def value_loss(term: ValueTerm, batch: ValueBatch, denominators: Denominators) -> LossParts:
    """coefficient x token mean of 1/2 max((V - return)^2, (clip(V, old - c, old + c) - return)^2): the clip of PPO's
    baselines (github.com/openai/baselines, ppo2), which no paper states."""
    mask_T, zeros_T = batch.mask_T, torch.zeros_like(batch.values_T, dtype=torch.float64)
    values_T = torch.where(mask_T, batch.values_T.double(), zeros_T)
    returns_T = torch.where(mask_T, batch.returns_T.double(), zeros_T)
    error_T = (values_T - returns_T).square()
    is_clipped_T = torch.zeros_like(mask_T)
    if term.clip is not None and batch.old_T is not None:
        old_T = torch.where(mask_T, batch.old_T.double(), zeros_T)
        clipped_T = (values_T.clamp(old_T - term.clip, old_T + term.clip) - returns_T).square()
        is_clipped_T = clipped_T > error_T
        # A choice and not a maximum, which would share the gradient out between equal errors.
        error_T = torch.where(is_clipped_T, clipped_T, error_T)
    loss = term.coefficient * (error_T * batch.weight_T).sum() / 2 / max(denominators.tokens, 1.0)
    kept_values, kept_returns = values_T.detach()[mask_T], returns_T[mask_T]
    gaps = kept_returns - kept_values
    sums = {
        "loss": loss.detach(),
        "value_loss": loss.detach() / term.coefficient,
        "value_tokens": mask_T.sum(),
        "value_clipped": is_clipped_T.sum(),
        "value_gap": gaps.sum(),
        "value_gap_square": gaps.square().sum(),
        "value_return": kept_returns.sum(),
        "value_return_square": kept_returns.square().sum(),
    }
    stacked = torch.stack([torch.as_tensor(value).double() for value in sums.values()])
    return LossParts(loss, dict(zip(sums, stacked.tolist(), strict=True)))


def value_metrics(sums: Mapping[str, float]) -> dict[str, float | None]:
    """The columns of record `updates` on a critic; null where there was none."""
    count = sums.get("value_tokens")
    if not count:
        return {"value_loss": None, "value_clip_ratio": None, "explained_variance": None}

    def variance(name: str) -> float:
        mean, square = sums[name] / count, sums[f"{name}_square"] / count
        spread = square - mean**2
        return spread if spread > FLAT * square else 0.0

    of_returns = variance("value_return")
    return {
        "value_loss": sums["value_loss"],
        "value_clip_ratio": sums["value_clipped"] / count,
        "explained_variance": 1 - variance("value_gap") / of_returns if of_returns else None,
    }
