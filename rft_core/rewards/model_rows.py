"""Rows -> what a model reads of each -> scores. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rft_core.rewards.model_settings import ScoringModelSettings
from rft_core.rewards.rows import RewardRow, Scored

if TYPE_CHECKING:
    from torch import Tensor


TAKEN_APART = "text that spells the model's special tokens was taken apart"


class NotScorable(ValueError):
    """The row has no score by this model; the message says why."""


@dataclass(frozen=True)
class Reading:
    """`places` are the indices into `ids` where logits are wanted; a model that reads a sequence whole takes one.

    `note` says what was done to the text, `cut` how many ids at its beginning were left out.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]
    note: str | None = field(default=None, compare=False)
    cut: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Finding:
    """A row's value and, by a process reward model, its steps'."""

    value: float
    steps: tuple[float, ...] | None = None


def score_rows(
    rows: Sequence[RewardRow],
    settings: ScoringModelSettings,
    reading_of: Callable[[RewardRow], Reading | Scored],
    logits_at: Callable[[list[Reading]], list[Tensor]],
    finding_of: Callable[[Tensor], Finding],
) -> list[Scored]:
    """In order. `reading_of` may give the score at once, or raise NotScorable; `finding_of` takes a row's logits_NC."""
    scores: list[Scored | None] = []
    readings: dict[int, Reading] = {}
    for index, row in enumerate(rows):
        try:
            found = reading_of(row)
        except NotScorable as problem:
            found = Scored(None, str(problem))
        scores.append(found if isinstance(found, Scored) else None)
        if isinstance(found, Reading):
            readings[index] = found
    for (index, reading), logits_NC in zip(readings.items(), logits_at(list(readings.values())), strict=True):
        scores[index] = _scored(finding_of(logits_NC), reading, settings)
    return [scored for scored in scores if scored is not None]


def _scored(finding: Finding, reading: Reading, settings: ScoringModelSettings) -> Scored:
    if not all(map(math.isfinite, (finding.value, *(finding.steps or ())))):
        return Scored(None, f"the model gave what is no finite number: {[finding.value, *(finding.steps or ())]}")
    notes = [reading.note, f"the first {reading.cut} tokens were cut" if reading.cut else None]
    metrics = {"cut_tokens": float(reading.cut)} if settings.too_long == "cut_left" else {}
    return Scored(finding.value, "; ".join(filter(None, notes)) or None, metrics, finding.steps)
