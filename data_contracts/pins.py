"""What a user pinned: a run, or a run at a step, of which nothing is deleted.

runs/<name>/pins/run.json, step-00012.json    one file per pin, so that a run that is being written can be pinned
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from data_contracts.files import LocalFiles

FOLDER, WHOLE_RUN, AT_STEP = "pins", "run", "step-"


@dataclass(frozen=True)
class Pins:
    """The pins of one run."""

    is_whole_run: bool = False
    steps: frozenset[int] = frozenset()

    def names(self) -> list[str]:
        return ["the whole run"] * self.is_whole_run + [f"step {step}" for step in sorted(self.steps)]


def read_pins(run_folder: Path) -> Pins:
    names = {path.stem for path in (run_folder / FOLDER).glob("[!.]*.json")}
    steps = [name.removeprefix(AT_STEP) for name in names if name.startswith(AT_STEP)]
    return Pins(WHOLE_RUN in names, frozenset(int(step) for step in steps if step.isdecimal()))


def pin(run_folder: Path, step: int | None = None) -> None:
    """Pin the whole run, or one of its steps. Pinning again changes nothing."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    LocalFiles(run_folder).write(_name(step), json.dumps({"at": at}).encode())


def unpin(run_folder: Path, step: int | None = None) -> bool:
    """Take a pin off; False when there was none."""
    was_there = (run_folder / _name(step)).is_file()
    LocalFiles(run_folder).remove(_name(step))
    return was_there


def _name(step: int | None) -> str:
    return f"{FOLDER}/{WHOLE_RUN if step is None else f'{AT_STEP}{step:05d}'}.json"
