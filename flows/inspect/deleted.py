"""What retention deleted of a run, in sentences: what, when, by which rule, and how to get it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from data_contracts.errors import DeletedTable
from data_contracts.refs import MAIN
from data_contracts.retention import PRUNED_STAGES
from data_contracts.tombstones import Tombstone
from flows.inspect.run import RunView


@dataclass(frozen=True)
class Deletion:
    """The tables of a stage, or the checkpoints, that one rule deleted on one day. `tombstone` is the last one's."""

    what: str
    steps: list[int]
    tombstone: Tombstone
    phase: str = MAIN

    @property
    def sentence(self) -> str:
        of_phase = "" if self.phase == MAIN else f" of phase {self.phase}"
        what = f"{self.what} of step{'s' * (len(self.steps) > 1)} {spans(self.steps)}{of_phase}"
        return self.tombstone.sentence(what, "were")

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "phase": self.phase,
            "steps": self.steps,
            **self.tombstone.to_json(),
            "sentence": self.sentence,
        }


def deletions_of(view: RunView, stages: Iterable[str] = (*PRUNED_STAGES, "checkpoints")) -> list[Deletion]:
    """What was deleted of these stages, in their order."""
    if view.phase is None:
        return [deletion for part in view.by_phase() for deletion in deletions_of(part, stages)]
    found = []
    for stage in stages:
        dead = sorted(_dead(view, stage), key=lambda pair: (_occasion(pair[1]), pair[0]))
        for _, pairs in groupby(dead, key=lambda pair: _occasion(pair[1])):
            steps, tombstones = zip(*pairs, strict=True)
            last = max(tombstones, key=lambda tombstone: tombstone.at)
            found.append(Deletion(stage, sorted(set(steps)), last, view.phase))
    return found


def refuse_deleted(view: RunView, stage: str, steps: Iterable[int]) -> None:
    """Raise DeletedTable when tables of the stage are needed that were deleted."""
    wanted = set(steps)
    for deletion in deletions_of(view, [stage]):
        missing = sorted(wanted & set(deletion.steps))
        if missing:
            found = replace(deletion, steps=missing)
            raise DeletedTable(f"{found.sentence}; to make them again: {found.tombstone.mend(view.root)}")


def spans(steps: Iterable[int]) -> str:
    """
    >>> spans([1, 2, 3, 7])
    '1-3, 7'
    """
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _dead(view: RunView, stage: str) -> list[tuple[int, Tombstone]]:
    if stage == "checkpoints":
        return [(saved.step, saved.tombstone) for saved in view.checkpoints() if saved.tombstone]
    record = stage.removeprefix("evaluation-").replace("-", "_")
    records = ("prompts", "examples") if stage == "prompts" else (record,)
    return [(entry.step, tombstone) for record in records for entry, tombstone in view.deleted(stage, record)]


def _occasion(tombstone: Tombstone) -> tuple[str, str, str]:
    return tombstone.at[:10], tombstone.rule, tombstone.run
