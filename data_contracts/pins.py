"""What a user pinned: a run, or a run at a step, of which nothing is deleted.

runs/<name>/pins/run.json, step-00012.json, warm-up.step-00003.json    one file per pin, so that a run that is being
                                                                       written can be pinned; a phase has its own steps
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from data_contracts.files import LocalFiles
from data_contracts.refs import MAIN

FOLDER, WHOLE_RUN, AT_STEP = "pins", "run", "step-"


@dataclass(frozen=True)
class Pins:
    """The pins of one run: on all of it, or on steps of one phase."""

    is_whole_run: bool = False
    steps: frozenset[int] = frozenset()
    phase: str = MAIN

    def names(self) -> list[str]:
        of_phase = "" if self.phase == MAIN else f" of {self.phase}"
        return ["the whole run"] * self.is_whole_run + [f"step {step}{of_phase}" for step in sorted(self.steps)]


def read_pins(run_folder: Path, phase: str = MAIN) -> Pins:
    names = {path.stem for path in (run_folder / FOLDER).glob("[!.]*.json")}
    before = _before(phase)
    steps = [name.removeprefix(before) for name in names if name.startswith(before)]
    return Pins(WHOLE_RUN in names, frozenset(int(step) for step in steps if step.isdecimal()), phase)


def pin(run_folder: Path, step: int | None = None, phase: str = MAIN) -> None:
    """Pin the whole run, or one of its steps. Pinning again changes nothing."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    LocalFiles(run_folder).write(_name(step, phase), json.dumps({"at": at}).encode())


def unpin(run_folder: Path, step: int | None = None, phase: str = MAIN) -> bool:
    """Take a pin off; False when there was none."""
    was_there = (run_folder / _name(step, phase)).is_file()
    LocalFiles(run_folder).remove(_name(step, phase))
    return was_there


def _before(phase: str) -> str:
    return AT_STEP if phase == MAIN else f"{phase}.{AT_STEP}"


def _name(step: int | None, phase: str) -> str:
    return f"{FOLDER}/{WHOLE_RUN if step is None else f'{_before(phase)}{step:05d}'}.json"
