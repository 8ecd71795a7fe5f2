"""What `rft run` shows while it works: live bars in a terminal, one plain line per step when piped."""

from __future__ import annotations

import re
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from data_contracts.ledger import BASELINE, EXPERTS
from data_contracts.refs import MAIN

# What a stage is called: its phase where there are several, its step, and its round where that is not the first.
SLOT = re.compile(r"((?P<phase>[a-z][a-z0-9_-]*)/)?(?P<name>[a-z-]+)-(?P<step>[0-9]{5,})(-(?P<round>[0-9]+))?")
Summary = dict[str, str | int | float]

# Which numbers of each stage's summary make it into the line of a step.
STEP_LINE = {
    "rewards": ("reward", "unscored"),
    "rollouts": ("tokens", "truncated", "errors"),
    "advantages": ("zero_variance", "stale"),
    "update": ("loss", "grad norm", "kl", "entropy", "effective sample size", "skipped"),
}


class LiveWatcher:
    """Bars for the run and its current stage; above them a line per finished step and evaluation."""

    def __init__(self, run: str, steps: dict[str, int], quietly: bool = False) -> None:
        """`steps` are those of each phase."""
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quietly)
        self.steps = steps
        # By phase and step: with rollout.ahead those of later ones come early.
        self._lines: dict[tuple[str, int], list[str]] = {}
        self._step_began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._run_bar = self._progress.add_task(f"run {run}", total=sum(steps.values()), note="")
        self._stage_bar: TaskID | None = None

    def __enter__(self) -> LiveWatcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, stage: str) -> None:
        self._drop_stage_bar()
        self._stage_bar = self._progress.add_task(stage, total=None, note="")

    def advanced(self, stage: str, done: int, total: int, note: str) -> None:
        if self._stage_bar is not None:
            self._progress.update(self._stage_bar, description=stage, completed=done, total=total, note=note)

    def finished(self, stage: str, summary: Summary) -> None:
        self._drop_stage_bar()
        slot = SLOT.fullmatch(stage)
        if slot is None:  # no stage of a step
            return
        name, step, round_ = slot["name"], int(slot["step"]), int(slot["round"] or 0)
        phase = slot["phase"] or MAIN
        prefix = "" if phase == MAIN else f"{phase}  "
        if name == "data":
            title = "experts  " if round_ == EXPERTS else "data  "
            self.console.print(prefix + title + _words(summary, tuple(summary)))
        elif name == "evaluation":
            self.console.print(f"{prefix}evaluation after step {step}  " + _words(summary, tuple(summary)))
            self._step_began = time.monotonic()
        elif name in STEP_LINE:
            if words := _words(summary, STEP_LINE[name]):
                of_round = {0: words, BASELINE: f"greedy {words}", EXPERTS: f"expert {words}"}
                words = of_round.get(round_, f"round {round_} {words}")
                self._lines.setdefault((phase, step), []).append(words)
            if name == "update":
                self._end_step(phase, step, prefix, "reused" in summary)

    def noted(self, line: str) -> None:
        self.console.print(line)

    def _end_step(self, phase: str, step: int, prefix: str, reused: bool) -> None:
        seconds = time.monotonic() - self._step_began
        ending = "reused" if reused else f"{seconds:.1f} s"
        words = "  ".join(self._lines.pop((phase, step), []))
        self.console.print(f"{prefix}step {step}/{self.steps[phase]}  {words}  {ending}")
        self._step_began = time.monotonic()
        before = sum(list(self.steps.values())[: list(self.steps).index(phase)])
        self._progress.update(self._run_bar, completed=before + step)

    def _drop_stage_bar(self) -> None:
        if self._stage_bar is not None:
            self._progress.remove_task(self._stage_bar)
            self._stage_bar = None


def _words(summary: Summary, names: tuple[str, ...]) -> str:
    shown = [(name, summary[name]) for name in names if name in summary and name != "reused"]
    return "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown)
