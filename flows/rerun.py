"""The rerun flow: a new run that takes every stage before STAGE from an old run's tables.

From rewards, advantages or update it is offline: its step s trains on the old run's rollouts of step s, nothing is
generated, and rows of another policy are handled as off-policy. With `at` it branches from the old run's policy
before that step and goes on online.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from data_contracts.ledger import EXPERTS, Entry, Ledger
from data_contracts.refs import MAIN
from data_contracts.retention import saved_checkpoints
from flows.inspect.deleted import refuse_deleted
from flows.inspect.run import RunView, open_run
from flows.root import flow_root
from flows.train import opened_run, train_phases
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.phases import SECTIONS, phase_recipes, with_recipes
from rft_core.recipes import difference, with_overrides
from tasks.context import RunContext, run_folder
from tasks.resuming import identities_of, read_recipe, read_run

Stage = Literal["data", "rollouts", "rewards", "advantages", "update"]

# What a rerun from each stage takes over from every step of the old run.
PINNED: dict[str, tuple[str, ...]] = {
    "data": (),
    "rollouts": ("data",),
    "rewards": ("data", "prompts", "rollouts"),
    "advantages": ("data", "prompts", "rollouts", "rewards"),
    "update": ("data", "prompts", "rollouts", "rewards", "advantages"),
}
EVERY_STAGE = (
    *PINNED["update"],
    "token-scores",
    "update",
    "checkpoint",
    "evaluation-rollouts",
    "evaluation-rewards",
    "evaluation",
)
OFFLINE = ("rewards", "advantages", "update")

# Whose tables an offline rerun reads; those of update are also what a replay reads.
READ_FIRST: dict[str, tuple[str, ...]] = {
    "rewards": ("prompts", "rollouts"),
    "advantages": ("rollouts", "rewards"),
    "update": ("rollouts", "advantages"),
}

# Settings that no stage after the named one reads: a rerun that takes that stage over cannot change them. The longest
# name that fits counts. Prompts are chosen anew wherever rollouts are.
LAST_READ_BY: dict[Stage, tuple[str, ...]] = {
    "data": ("data", "experts"),
    "rollouts": (
        *(f"rollout.{name}" for name in ("prompts_per_step", "group_size", "temperature", "top_p", "top_k", "ahead")),
        *(f"data.{name}" for name in ("order", "difficulty_field", "target_pass_rate", "stats_decay")),
        *(f"experts.{name}" for name in ("order", "difficulty_field", "per_step")),
    ),
    "rewards": ("reward",),
    "advantages": (
        "algorithm.advantage",
        "algorithm.advantage_path",
        "algorithm.std_scope",
        "algorithm.std_ddof",
        "algorithm.std_epsilon",
        "algorithm.spread_floor",
        "algorithm.whiten_ddof",
        "algorithm.gamma",
        "algorithm.gae_lambda",
        "algorithm.bootstrap_truncated",
        "critic.value_lambda",
        "algorithm.pass_at_k_over_std",
        "algorithm.baseline",
        "algorithm.baseline_shift",
        "algorithm.drop",
        "algorithm.truncated",
        "algorithm.min_group_size",
        "algorithm.reward_clip_low",
        "algorithm.reward_clip_high",
        "algorithm.overlong_buffer_tokens",
        "algorithm.max_staleness",
        "algorithm.select",
        "algorithm.pass_threshold",
        "algorithm.duplicate_to_fill",
        "experts.source_weights",
        "algorithm.distillation.teacher_gap",
    ),
}


@flow(name="rerun", flow_run_name="{new}", persist_result=False)
def rerun(
    run: str,
    stage: Stage,
    new: str,
    overrides: list[str] | None = None,
    at: int | None = None,
    root: str | None = None,
    accept_new_code: bool = False,
    phase: str | None = None,
) -> dict[str, Any]:
    """Start the run `new` from the tables of `run`; calling it again resumes `new`. Of a run with phases, stage, step
    and overrides are those of `phase`, or of the newest that began.
    """
    if new == run:
        raise SettingsError(f"a rerun needs a name of its own, got that of the run it stands on: {run!r}")
    folder = flow_root(root)
    source = Ledger(run_folder(folder, run))
    recipe = rerun_recipe(folder, run, stage, overrides or [], at, phase)
    view = open_run(str(folder), run).of_phase(phase)
    first = view.phase or MAIN
    own, identities = phase_recipes(recipe)[first], identities_of(read_run(run_folder(folder, run)))
    known = {name: digest for name, digest in identities[first].items() if name != "experts" or own.experts is not None}
    refuse_deleted_inputs(view, Ledger(run_folder(folder, new)), own, stage, at)
    options: dict[str, Any] = {
        "accept_new_code": accept_new_code,
        "parent": {"run": run, "phase": first, "stage": stage, "at": at, "overrides": overrides or []},
        "pinned_identity": {name: known[name] for name in _pinned_identity(stage, at) if name in known},
        "taken": {name: identities[name] for name in earlier_phases(recipe, first)},
        "past": source,
    }
    with opened_run(folder, new, recipe, **options) as context:
        take_over(context, source, run, list(options["taken"]))
        pin(context, source, run, first, own, stage, at)
        return train_phases(context)


def rerun_recipe(
    root: Path, run: str, stage: Stage, overrides: list[str], at: int | None, phase: str | None = None
) -> Recipe:
    """The old run's recipe with overrides. An offline rerun neither generates nor, unless asked for, evaluates."""
    folder = run_folder(root, run)
    if read_run(folder) is None:
        known = sorted(path.parent.name for path in (root / "runs").glob("*/run.json"))
        raise SettingsError(f"no run {run!r} under {root}; there are: {', '.join(known) or 'none'}")
    whole, view = read_recipe(folder), open_run(str(root), run).of_phase(phase)
    first = view.phase or MAIN
    changed = with_overrides(whole, of_phase(whole, first, overrides))
    before, after = phase_recipes(whole), phase_recipes(changed)
    _refuse_taken(whole, changed, first)
    _refuse_without_effect(before[first], after[first], run, stage, at)
    own = after[first]
    if stage not in OFFLINE or at is not None:
        _check_branch(own, view, at)
        return changed
    return with_recipes(changed, {**after, first: _offline(view, before[first], own, stage, overrides)})


def of_phase(recipe: Recipe, phase: str, overrides: list[str]) -> list[str]:
    """Overrides that say what of a phase they mean, in the whole recipe; those of what phases share stay.

    `training.epochs=2` for the second phase becomes `phases.1.training.epochs=2`.
    """
    if not recipe.phases:
        return overrides
    index = [settings.name for settings in recipe.phases].index(phase)
    own = ("steps", *SECTIONS)
    return [f"phases.{index}.{text}" if re.split("[.=]", text)[0].strip() in own else text for text in overrides]


def earlier_phases(recipe: Recipe, phase: str) -> list[str]:
    names = list(phase_recipes(recipe))
    return names[: names.index(phase)]


def _refuse_taken(old: Recipe, new: Recipe, phase: str) -> None:
    """Phases before the one that is run again are taken over as they are."""
    num_taken = len(earlier_phases(old, phase))
    for change in difference(old, new):
        is_taken = change.path.startswith("phases.") and int(change.path.split(".")[1]) < num_taken
        if is_taken or (num_taken and change.path == "seed"):
            raise SettingsError(
                f"{change.path} has no effect: what lies before phase {phase} is taken over; --phase names the first "
                "phase that is run again"
            )


def _offline(view: RunView, old: Recipe, recipe: Recipe, stage: Stage, overrides: list[str]) -> Recipe:
    run, kept = view.name, PINNED[stage][-1]
    available = max((entry.step for entry in view.entries(kept)), default=0)
    if available == 0:
        raise SettingsError(f"run {run!r} must have {kept} to re-run from {stage}, found none")
    if recipe.steps != old.steps and recipe.steps > available:
        raise SettingsError(f"steps must be at most {available}, the steps of run {run!r} with {kept}: it is offline")
    touched = {override.split("=")[0].split(".")[0] for override in overrides}
    changes: dict[str, Any] = {"steps": min(recipe.steps, available)}
    if "evaluation" not in touched:
        changes["rollout"] = recipe.rollout.model_copy(update={"engine": "none"})
        changes["evaluation"] = recipe.evaluation.model_copy(update={"every": 0})
    return recipe.model_copy(update=changes)


def refuse_deleted_inputs(view: RunView, new: Ledger, recipe: Recipe, stage: Stage, at: int | None) -> None:
    """Raise DeletedTable when what the new run still has to read of the old one's phase was deleted."""
    phase = view.phase or MAIN
    done = max((entry.step for entry in new.entries("update", phase)), default=0)
    for read in READ_FIRST.get(stage, ()):
        refuse_deleted(view, read, range(done + 1, recipe.steps + 1) if at is None else {at} - {done})
    if at is None or done >= at:
        return
    saved = saved_checkpoints(Path(view.root), view.ledger, phase)
    for version in range(max(0, at - 1 - recipe.rollout.ahead), at):
        start = max((other for other in saved if other <= version), default=0)
        for read in READ_FIRST["update"]:
            refuse_deleted(view, read, range(start + 1, version + 1))


def _refuse_without_effect(old: Recipe, new: Recipe, run: str, stage: Stage, at: int | None) -> None:
    """An override that only stages read which are taken over would be recorded and change nothing."""
    stages = list(PINNED)
    # A branch makes later steps anew from their rollouts on; the data of every step is the old run's.
    taken = {"data"} if at is not None else set(stages[: stages.index(stage)])
    if new.evaluation != old.evaluation:
        taken.discard("rewards")  # evaluations are scored anew
    for change in difference(old, new):
        readers = [
            (len(name), last)
            for last, names in LAST_READ_BY.items()
            for name in names
            if f"{change.path}.".startswith(f"{name}.")
        ]
        last = max(readers)[1] if readers else None
        if change.path == "experts":  # a run without them becomes a mixture, or the other way round: nothing is sampled
            last = "advantages"
            taken |= {last} & set(PINNED[stage])
        if last in taken:
            mend = f"use --from {last}" + (" without --at" if at is not None else "")
            raise SettingsError(f"{change.path} has no effect: the {last} are those of run {run!r}; {mend}")


def _pinned_identity(stage: Stage, at: int | None) -> tuple[str, ...]:
    """What must be that of the old run: prompts were tokenised with its tokenizer, a branch stands on its model."""
    of_data = ("source", "experts", "tokenizer") if stage != "data" or at is not None else ()
    return (*of_data, "policy", "critic") if at is not None and at > 1 else of_data


def _check_branch(recipe: Recipe, view: RunView, at: int | None) -> None:
    if at is None:
        return
    updates = view.last_step
    if not 1 <= at <= updates + 1:
        raise SettingsError(f"--at must be a step from 1 to {updates + 1} of run {view.name!r}, got {at}")
    if recipe.steps < at:
        raise SettingsError(f"steps ({recipe.steps}) must be at least --at ({at}): --set steps={at} or more")


def take_over(context: RunContext, source: Ledger, run: str, phases: list[str]) -> None:
    """Whole phases of the old run, by ref."""
    for phase in phases:
        for entry in source.entries(phase=phase):
            _pin(context, entry, run)


def pin(context: RunContext, source: Ledger, run: str, phase: str, own: Recipe, stage: Stage, at: int | None) -> None:
    """Take the old run's entries of a phase over into the new ledger, by ref; `own` is the phase's new recipe."""
    for entry in source.entries(phase=phase):
        is_read = entry.round != EXPERTS or own.experts is not None
        if is_read and entry.step <= own.steps and _is_pinned(entry.stage, entry.step, stage, at):
            _pin(context, entry, run)


def _pin(context: RunContext, entry: Entry, run: str) -> None:
    if context.ledger.get(entry.phase, entry.step, entry.stage, entry.round) is None:
        context.ledger.commit(replace(entry, pinned_from=entry.pinned_from or run, reused=True))


def _is_pinned(stage: str, step: int, first: Stage, at: int | None) -> bool:
    if at is not None and step != at:
        return step < at and stage in EVERY_STAGE
    return stage in PINNED[first]
