"""A case run for its seeds, with its control, through the command line; what is held against the margins."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.inspect.run import open_run
from flows.inspect.status import status_of
from tests.faults.harness import Runs
from tests.learning.cases import CONTROL_SHARE, LEAST_ERRORS, Case

WIDTH_OF_INTERVAL = 2 * 1.96  # standard errors in a 95 % interval


@dataclass(frozen=True)
class Outcome:
    """One run: a metric at its first and last evaluation, with standard errors over the held-out prompts."""

    seed: int
    before: float
    after: float
    before_error: float
    after_error: float
    first_loss: float
    steps: int

    @property
    def error(self) -> float:
        """Of the change, as if the two were of different prompts: they are of the same, so it is at most this."""
        return math.hypot(self.before_error, self.after_error)

    def gain(self, case: Case) -> float:
        if case.falls:
            return self.before - self.after
        return self.after - (self.before if case.chance is None else max(self.before, case.chance))


@dataclass(frozen=True)
class Gain:
    """The mean change for the better over the seeds, and its standard error.

    Seeds meet the same held-out prompts: what differs between seeds averages out over them, what differs between
    prompts does not.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, outcomes: list[Outcome], case: Case) -> Gain:
        changes = [outcome.gain(case) for outcome in outcomes]
        between = statistics.variance(changes) / len(changes) if len(changes) > 1 else 0.0
        within = statistics.mean(o.error**2 for o in outcomes)
        return cls(statistics.mean(changes), math.sqrt(between + within))


@dataclass(frozen=True)
class Verdict:
    """What a case came to. `faults` says in words what does not hold; empty is well."""

    case: Case
    outcomes: list[Outcome]
    control: list[Outcome]
    gain: Gain
    control_gain: Gain | None
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_case(runs: Runs, case: Case, seeds: tuple[int, ...], task: Path, root: Path, with_control: bool) -> Verdict:
    outcomes = [_run(runs, case, f"{case.name}-{seed}", seed, case.sets, task, root) for seed in seeds]
    control = [
        _run(runs, case, f"{case.name}-control-{seed}", seed, (*case.sets, *case.control), task, root)
        for seed in seeds
        if with_control
    ]
    return judge(case, outcomes, control)


def judge(case: Case, outcomes: list[Outcome], control: list[Outcome]) -> Verdict:
    gain = Gain.of(outcomes, case)
    control_gain = Gain.of(control, case) if control else None
    faults = [
        f"seed {o.seed} {what} {found:.6g}, must be {wanted:.6g}"
        for o in outcomes
        for what, found, wanted in (
            ("starts at", o.before, case.start),
            ("has first loss", o.first_loss, case.first_loss),
        )
        if wanted is not None and abs(found - wanted) > 1e-9 * max(1.0, abs(wanted))
    ]
    faults += [
        f"seed {o.seed} ends at {o.after:.4g}, must reach {case.least:g}"
        for o in outcomes
        if case.least is not None and o.after < case.least
    ]
    if not gain.mean >= case.margin:
        faults.append(f"mean gain {gain.mean:.4g}, must reach {case.margin:g}")
    if not gain.mean > LEAST_ERRORS * gain.error:
        faults.append(f"mean gain {gain.mean:.4g}, must exceed {LEAST_ERRORS:g} standard errors of {gain.error:.4g}")
    if control_gain is not None:
        faults += _learned(control_gain, gain)
    return Verdict(case, outcomes, control, gain, control_gain, faults)


def _learned(control: Gain, gain: Gain) -> list[str]:
    """How a control shows that it learned what it could not know."""
    faults = []
    if control.mean > LEAST_ERRORS * control.error:
        faults.append(
            f"control gains {control.mean:.4g}, more than {LEAST_ERRORS:g} standard errors of {control.error:.4g}"
        )
    if control.mean > CONTROL_SHARE * gain.mean:
        faults.append(f"control gains {control.mean:.4g}, more than a third of {gain.mean:.4g}")
    return faults


def _run(runs: Runs, case: Case, name: str, seed: int, sets: tuple[str, ...], task: Path, root: Path) -> Outcome:
    arguments = [part for value in (f"seed={seed}", *sets) for part in ("--set", value.format(task=task))]
    runs.finish("run", task / f"{case.recipe}.yaml", "--name", name, *arguments, root=root)
    return outcome_of(root, name, seed, case.metric)


def outcome_of(root: Path, name: str, seed: int, metric: str) -> Outcome:
    found = [row for row in status_of(str(root), name)["evaluations"] if row["metric"] == metric]
    first, last = found[0], found[-1]
    updates = open_run(str(root), name).table("update", "updates", ["optimizer_step", "loss"]).to_pylist()
    loss = min(updates, key=lambda row: (row["at_step"], row["optimizer_step"]))["loss"]
    errors = [(row["high"] - row["low"]) / WIDTH_OF_INTERVAL for row in (first, last)]
    return Outcome(seed, first["value"], last["value"], *errors, first_loss=loss, steps=last["step"])
