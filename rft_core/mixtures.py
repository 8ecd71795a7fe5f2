"""Mixtures of own and expert completions: how much the latter weigh in each step, and what is refused. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rft_core.errors import SettingsError

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.data.settings import ExpertSettings
    from rft_core.terms import Algorithm

SHARE_SETTINGS = ("expert_coefficient", "expert_peak", "expert_warmup_steps", "expert_decay_steps")


@dataclass(frozen=True)
class ExpertShare:
    """mu, the weight of the loss over expert rows; the loss over own rows has 1 - mu (CHORD, arXiv 2508.11408).

    >>> share = ExpertShare(valley=0.1, peak=0.9, warmup_steps=2, decay_steps=4)
    >>> [round(share.at(step), 3) for step in (1, 2, 3, 4, 6, 7)]
    [0.45, 0.9, 0.783, 0.5, 0.1, 0.1]
    """

    valley: float = 0.1
    peak: float = 0.1
    warmup_steps: int = 0
    decay_steps: int = 0

    def at(self, step: int) -> float:
        """In a training step, from 1: up to the peak in a straight line, down to the valley by half a cosine."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = step - self.warmup_steps
        if done >= self.decay_steps:
            return self.valley
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * done / self.decay_steps)) / 2


def resolved_share(share: ExpertShare | None, settings: AlgorithmSettings) -> ExpertShare | None:
    """The row's share with the recipe's overrides; SettingsError for what nothing would read."""
    given = {name: getattr(settings, name) for name in SHARE_SETTINGS if getattr(settings, name) is not None}
    if share is None:
        for name in given:
            raise SettingsError(f"algorithm.{name} has no effect: {settings.name} weighs no experts against own rows")
        return None
    valley = given.get("expert_coefficient", share.valley)
    found = ExpertShare(
        valley=valley,
        peak=given.get("expert_peak", valley if share.peak == share.valley else share.peak),
        warmup_steps=given.get("expert_warmup_steps", share.warmup_steps),
        decay_steps=given.get("expert_decay_steps", share.decay_steps),
    )
    if found.decay_steps and found.peak == found.valley:
        raise SettingsError(
            f"algorithm.expert_decay_steps has no effect: expert_peak is expert_coefficient ({found.valley:g}) already"
        )
    if "expert_peak" in given and not found.warmup_steps and not found.decay_steps:
        raise SettingsError("algorithm.expert_peak has no effect without expert_warmup_steps or expert_decay_steps")
    return found


def refuse_experts(algorithm: Algorithm, experts: ExpertSettings | None, temperature: float) -> None:
    """SettingsError where the recipe's section `experts` and what the algorithm trains on do not fit."""
    if not algorithm.takes_experts:
        if experts is not None:
            trained = "completions that the policy samples" if algorithm.samples else "those of data"
            raise SettingsError(
                f"experts has no effect: {algorithm.name} trains on {trained} alone; mix and chord take both"
            )
        return
    if experts is None:
        raise SettingsError(
            f"experts must say where the demonstrations are for algorithm {algorithm.name}, which trains on them "
            "beside completions that the policy samples: e.g. experts: {source: FILE.jsonl}"
        )
    if algorithm.needs_critic:
        raise SettingsError(
            f"algorithm.advantage must read no critic for algorithm {algorithm.name}, got {algorithm.advantage}: what "
            "experts wrote has no returns"
        )
    if temperature != 1.0:
        raise SettingsError(
            f"rollout.temperature must be 1 for algorithm {algorithm.name}: expert completions were sampled by no "
            f"policy of ours, and both losses are of one distribution, got {temperature:g}"
        )


def expert_columns(algorithm: Algorithm, step: int, terms: Sequence[str]) -> dict[str, float | int]:
    """What record updates says of the experts in an optimizer step, whose trained rows are of these terms."""
    if not algorithm.takes_experts:
        return {}
    term = next(term for term in algorithm.terms if term.rows == "expert")
    return {"expert_coefficient": algorithm.coefficient_of(term, step), "expert_rows": list(terms).count("expert")}
