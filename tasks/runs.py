"""Open a run: take its lease, hold the recipe against what the run began with, and gather what tasks share."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_contracts.files import LocalFiles
from data_contracts.ledger import Lease, Ledger
from data_contracts.refs import digest_of
from data_contracts.replies import Replies
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.critic_settings import check_critic
from rft_core.errors import ContentChanged, SettingsError
from rft_core.hardware import keep_freed_memory, use_threads
from rft_core.mixtures import refuse_experts
from rft_core.model_folder import model_digest
from rft_core.phases import phase_recipes, phases_named
from rft_core.recipe_paths import refuse_relative_paths
from rft_core.recipes import difference, resolved_yaml
from rft_core.resolve import check, resolve_algorithm
from tasks.context import RunContext, register, run_folder, unregister
from tasks.phases import PhaseModels, phase_at
from tasks.progress import LogWatcher, Watcher
from tasks.provenance import fingerprint, versions
from tasks.resolving import resolved
from tasks.resuming import identities_of, read_recipe, read_run, refuse_changed_content, short
from tasks.semantics import SEMANTICS
from tasks.sources import dataset_digest
from tasks.teacher import teacher_digest

if TYPE_CHECKING:
    from rft_core.rewards import Grader

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class _Run:
    """A run about to be opened: what its phases share. `taken` holds the identities of phases that a rerun takes over
    whole, `pinned` what must be as in the run whose tables it takes over.
    """

    root: Path
    name: str
    recipe: Recipe  # resolved, with all phases
    models: PhaseModels
    watcher: Watcher
    should_remake: bool
    pinned: dict[str, str]


@dataclass(frozen=True)
class _Phase:
    """A phase that can begin or go on: its recipe has the folders of all models."""

    name: str
    recipe: Recipe
    grader: Grader
    identity: dict[str, str]


def open_run(
    root: Path,
    name: str,
    recipe: Recipe,
    *,
    accept_new_code: bool = False,
    remake: bool = False,
    parent: dict[str, Any] | None = None,
    pinned_identity: dict[str, str] | None = None,
    taken: dict[str, dict[str, str]] | None = None,
    past: Ledger | None = None,
    on_orphan: Callable[[dict[str, Any]], object] | None = None,
    watcher: Watcher | None = None,
) -> RunContext:
    """Start a run or resume it where it stopped, at the first phase that is not finished.

    `remake` makes again what retention deleted of the run's past.
    `pinned_identity` is what must be as in the run whose tables are taken over; its source is not read again.
    `taken` are the identities of phases that are taken over whole, from the run with the ledger `past`.

    Raises RunBusy when another process writes it, ContentChanged when recipe, data, model, grader or code differ from
    what it began with, SettingsError for a relative path.
    """
    from rft_core.engines import check_engine

    check_run_name(name)
    watcher = watcher or LogWatcher()
    refuse_relative_paths(recipe)
    for own in phase_recipes(recipe).values():
        check_engine(own.rollout)
    folder, taken = run_folder(root, name), taken or {}
    present = read_run(folder)
    recipe = resolved(recipe, root, read_recipe(folder) if present is not None else None)
    recipes = phase_recipes(recipe)
    use_threads(recipe.execution.threads)
    keep_freed_memory()
    models = PhaseModels(root, name, recipes, Ledger(folder), {**taken, **identities_of(present)}, past, watcher)
    run = _Run(root, name, recipe, models, watcher, remake, pinned_identity or {})
    at = phase_at(models.ledger, recipes, taken)
    if remake:
        at = next(phase for phase in recipes if phase not in taken)
    lease = None
    phase = _prepared(run, at, run.pinned)
    try:
        _check_later(run, at)
        lease = Lease.acquire(folder, on_orphan)
        _accept(folder, name, recipe, phase, taken, accept_new_code, parent, watcher)
        models.ledger.lease = lease
        models.ledger.refresh()
        return _opened(run, phase)
    except BaseException:
        phase.grader.close()
        if lease is not None:
            lease.release()
        raise


def _prepared(run: _Run, phase: str, pinned: dict[str, str]) -> _Phase:
    from rft_core.rewards import build_grader

    recipe = run.models.recipe(phase)
    grader = build_grader(recipe.reward, replies=Replies(str(run.root)))
    try:
        return _Phase(phase, recipe, grader, identify(recipe, pinned, grader.digest, run.models.origins(phase)))
    except BaseException:
        grader.close()
        raise


def _opened(run: _Run, phase: _Phase) -> RunContext:
    context = RunContext(
        root=run.root,
        name=run.name,
        recipe=phase.recipe,
        store=Store(str(run.root)),
        ledger=run.models.ledger,
        identity=phase.identity,
        model_folder=Path(phase.recipe.model.path),
        provenance={"versions": versions(), "fingerprint": fingerprint(phase.recipe)},
        watcher=run.watcher,
        should_remake=run.should_remake,
        built_grader=phase.grader,
        phase=phase.name,
    )
    names = list(run.models.recipes)
    after = names[names.index(phase.name) + 1 :]
    if after:

        def open_next() -> RunContext:
            _end_phase(context)
            context.policies.release()
            identities = identities_of(read_run(context.folder))
            shared = replace(run, models=replace(run.models, identities=identities))
            following = _prepared(shared, after[0], {})
            try:
                _begin(context.folder, following)
                return _opened(shared, following)
            except BaseException:
                following.grader.close()
                raise

        context.next_phase = open_next
    register(context)
    return context


def _check_later(run: _Run, at: str) -> None:
    """Raise now for what would stop a later phase: its source, its rewards, its algorithm's code."""
    from rft_core.rewards import build_grader

    names = list(run.models.recipes)
    for phase in names[names.index(at) + 1 :]:
        recipe = run.models.recipes[phase]
        dataset_digest(recipe.data)
        if recipe.experts is not None:
            dataset_digest(recipe.experts)
        check(resolve_algorithm(recipe.algorithm), recipe.training)
        if not any(path.startswith("reward.") for path in phases_named(recipe)):
            build_grader(recipe.reward).close()


def check_run_name(name: str) -> None:
    """Raise SettingsError for a name that cannot be a run's: it is a folder's and part of ids."""
    if not RUN_NAME.fullmatch(name):
        raise SettingsError(f"a run's name must match {RUN_NAME.pattern}, got {name!r}")


def close_run(context: RunContext) -> None:
    """End the engine's server, the grader's threads and processes, and give the lease back."""
    unregister(context.name)
    _end_phase(context)
    if context.ledger.lease is not None:
        context.ledger.lease.release()


def _end_phase(context: RunContext) -> None:
    for engine in context.workplace.kept:
        engine.close()
    if context.built_grader is None:
        return
    if context.beside is not None:
        context.beside.close(context.built_grader.close)
    context.built_grader.close()
    context.built_grader = None


def identify(
    recipe: Recipe, pinned: dict[str, str], grader_digest: str, origins: dict[str, str] | None = None
) -> dict[str, str]:
    """Digests of what a phase is made from, by content. Raises SettingsError when one differs from a pinned one.

    `origins` name the policies of earlier phases by the setting that takes them: such a model is identified by what
    made it, so that lineage leads on from there.
    """
    from rft_core.data.prompts import load_tokenizer, tokenizer_digest

    origins, model_folder = origins or {}, Path(recipe.model.path)
    model = origins.get("model.path") or model_digest(model_folder)
    settings = {"lora_rank": recipe.model.lora_rank}
    if recipe.model.lora_rank:
        settings |= {name: getattr(recipe.model, name) for name in ("lora_alpha", "lora_targets")}
        settings |= {"seed": recipe.seed}
    identity = {
        "source": pinned.get("source") or dataset_digest(recipe.data),
        "tokenizer": tokenizer_digest(load_tokenizer(model_folder, recipe.model.chat_template)),
        "model": model,
        "policy": digest_of({"model": model, **settings}),
        "grader": grader_digest,
        **teacher_digest(recipe, model_folder),
        **origins,
    }
    if recipe.experts is not None:
        identity["experts"] = pinned.get("experts") or dataset_digest(recipe.experts)
    if recipe.evaluation.reference is not None:
        identity["reference"] = model_digest(Path(recipe.evaluation.reference))
    if recipe.algorithm.paths():
        from rft_core.distillation_options import refuse_teacher
        from rft_core.user_algorithm import algorithm_code

        algorithm = resolve_algorithm(recipe.algorithm)  # other algorithms were checked with the recipe
        check(algorithm, recipe.training)
        refuse_experts(algorithm, recipe.experts, recipe.rollout.temperature)
        refuse_teacher(algorithm, recipe.teacher)
        identity["algorithm"] = digest_of(algorithm_code(recipe.algorithm))
    identity |= _critic_identity(recipe, model, origins.get("critic.path"), settings)
    if recipe.rollout.script is not None:
        script = Path(recipe.rollout.script)
        if not script.is_file():
            raise SettingsError(f"rollout.script must be a file, found nothing at {script}")
        identity["script"] = digest_of(script.read_text())
    for what, digest in pinned.items():
        if identity.get(what) != digest:
            kept = "critic.* and the algorithm's advantage" if what == "critic" else "model.* and the seed"
            raise SettingsError(
                f"the {what} must be that of the run whose tables are taken over ({short(digest)}), found "
                f"{short(identity.get(what))}: leave {kept} as they were, or re-run from data without --at"
            )
    return identity


def _critic_identity(recipe: Recipe, model: str, origin: str | None, adapters: dict[str, Any]) -> dict[str, str]:
    """What a critic starts from, nothing where the algorithm has none. Raises SettingsError as `check_critic` does."""
    algorithm = resolve_algorithm(recipe.algorithm)
    check_critic(recipe.critic, algorithm, recipe.steps)
    if not algorithm.needs_critic:
        return {}
    start = origin or (model_digest(Path(recipe.critic.path)) if recipe.critic.path else model)
    return {"critic": digest_of({"model": start, "shared_trunk": recipe.critic.shared_trunk, **adapters})}


def _accept(
    folder: Path,
    name: str,
    recipe: Recipe,
    phase: _Phase,
    taken: dict[str, dict[str, str]],
    accept_new_code: bool,
    parent: dict[str, Any] | None,
    watcher: Watcher,
) -> None:
    """Begin run.json and recipe.yaml, or compare with them."""
    present = read_run(folder)
    if present is None:
        description = {
            "run": name,
            "created_at": _now(),
            "identity": phase.identity,
            "semantics": SEMANTICS,
            "fingerprint": fingerprint(phase.recipe),
            "parent": parent,
            "resumed": [],
            **({"phases": {**taken, phase.name: phase.identity}} if recipe.phases else {}),
        }
        LocalFiles(folder).write("recipe.yaml", resolved_yaml(recipe).encode())
        LocalFiles(folder).write("run.json", json.dumps(description, indent=1).encode())
        return
    changes = difference(read_recipe(folder), recipe)
    begun = identities_of(present)
    refuse_changed_content(name, changes, recipe, begun, phase.name, phase.identity)
    if present["semantics"] != SEMANTICS and not accept_new_code:
        stages = sorted(stage for stage in SEMANTICS if present["semantics"].get(stage) != SEMANTICS[stage])
        raise ContentChanged(
            f"run {name} was begun by code whose {', '.join(stages)} gives other results: continue with "
            "--accept-new-code (it is recorded), or start a new run"
        )
    now = fingerprint(phase.recipe)
    if present["fingerprint"] != now:
        watcher.noted(
            f"run {name} goes on under another fingerprint: bits may differ from an uninterrupted run "
            f"({_fingerprint_change(present['fingerprint'], now)})"
        )
    for change in changes:
        watcher.noted(f"changed on resume: {change.sentence}")
    resumed = {"at": _now(), "changes": [change.sentence for change in changes], "fingerprint": now}
    if present["semantics"] != SEMANTICS:
        resumed["accepted_semantics"] = SEMANTICS
    description = {**present, "semantics": SEMANTICS, "resumed": [*present["resumed"], resumed]}
    LocalFiles(folder).write("recipe.yaml", resolved_yaml(recipe).encode())
    LocalFiles(folder).write("run.json", json.dumps(description, indent=1).encode())
    if recipe.phases:
        _begin(folder, phase)


def _begin(folder: Path, phase: _Phase) -> None:
    """Write down what a phase is made from, the first time that it is opened."""
    present = read_run(folder)
    assert present is not None, "the run began before its phases"
    if phase.name not in present["phases"]:
        phases = {**present["phases"], phase.name: phase.identity}
        LocalFiles(folder).write("run.json", json.dumps({**present, "phases": phases}, indent=1).encode())


def _fingerprint_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
