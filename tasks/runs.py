"""Open a run: take its lease, hold the recipe against what the run began with, and gather what tasks share."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_contracts.errors import DamagedTable
from data_contracts.files import LocalFiles, read_json
from data_contracts.ledger import Lease, Ledger
from data_contracts.refs import digest_of
from data_contracts.replies import Replies
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.critic_settings import CriticSettings, check_critic
from rft_core.errors import ContentChanged, SettingsError
from rft_core.hardware import (
    default_threads,
    has_compiler,
    keep_freed_memory,
    resolve_device,
    resolve_dtype,
    use_threads,
)
from rft_core.model_folder import model_digest, resolve_model_path
from rft_core.recipe_paths import refuse_relative_paths
from rft_core.recipes import Change, difference, recipe_of, resolved_yaml
from rft_core.rewards.scoring_models import resolve_scoring_models
from rft_core.yaml_text import parse_yaml
from tasks.context import RunContext, register, run_folder, unregister
from tasks.progress import LogWatcher, Watcher
from tasks.provenance import fingerprint, versions
from tasks.semantics import SEMANTICS
from tasks.sources import dataset_digest

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

# The earliest stage whose work a change invalidates: what `rft rerun --from` should name.
STAGE_OF_SETTING = {
    "seed": "data",
    "model": "data",
    "data": "data",
    "rollout": "rollouts",
    "reward": "rewards",
    "algorithm": "advantages",
    "critic": "advantages",
    "training": "update",
    "evaluation": "update",
    "steps": "update",
}
STAGE_OF_IDENTITY = {
    "source": "data",
    "tokenizer": "data",
    "model": "data",
    "script": "rollouts",
    "grader": "rewards",
    "algorithm": "advantages",
    "critic": "advantages",
}
# Settings that a recipe may leave to the machine: chosen once, at the start of a run.
CHOICES = (
    ("model", "device"),
    ("model", "dtype"),
    ("training", "checkpoint_every"),
    ("training", "compile"),
    ("execution", "threads"),
)
# Compiling costs as much as it saves in about so many updates of a small model, and its cache is warm afterwards.
COMPILED_FROM_STEPS = 50
STAGE_ORDER = ("data", "rollouts", "rewards", "advantages", "update")


def open_run(
    root: Path,
    name: str,
    recipe: Recipe,
    *,
    accept_new_code: bool = False,
    remake: bool = False,
    parent: dict[str, Any] | None = None,
    pinned_identity: dict[str, str] | None = None,
    on_orphan: Callable[[dict[str, Any]], object] | None = None,
    watcher: Watcher | None = None,
) -> RunContext:
    """Start a run or resume it where it stopped.

    `remake` makes again what retention deleted of the run's past.
    `pinned_identity` is what must be as in the run whose tables are taken over; its source is not read again.

    Raises RunBusy when another process writes it, ContentChanged when recipe, data, model, grader or code differ from
    what it began with, SettingsError for a relative path.
    """
    from rft_core.rewards import build_grader

    check_run_name(name)
    watcher = watcher or LogWatcher()
    refuse_relative_paths(recipe)
    model_folder = resolve_model_path(recipe.model.path, root)
    folder = run_folder(root, name)
    began_with = read_recipe(folder) if read_run(folder) is not None else None
    recipe = resolved(recipe, model_folder, began_with)
    reward = resolve_scoring_models(recipe.reward, root, began_with.reward if began_with else None)
    recipe = recipe.model_copy(update={"reward": reward, "critic": _resolved_critic(recipe.critic, root)})
    use_threads(recipe.execution.threads)
    keep_freed_memory()
    grader = build_grader(recipe.reward, replies=Replies(str(root)))
    lease = None
    try:
        identity = identify(recipe, model_folder, pinned_identity or {}, grader.digest)
        lease = Lease.acquire(folder, on_orphan)
        _accept(folder, name, recipe, identity, accept_new_code, parent, watcher)
        context = RunContext(
            root=root,
            name=name,
            recipe=recipe,
            store=Store(str(root)),
            ledger=Ledger(folder, lease),
            identity=identity,
            model_folder=model_folder,
            provenance={"versions": versions(), "fingerprint": fingerprint(recipe)},
            watcher=watcher,
            should_remake=remake,
            built_grader=grader,
        )
    except BaseException:
        grader.close()
        if lease is not None:
            lease.release()
        raise
    register(context)
    return context


def check_run_name(name: str) -> None:
    """Raise SettingsError for a name that cannot be a run's: it is a folder's and part of ids."""
    if not RUN_NAME.fullmatch(name):
        raise SettingsError(f"a run's name must match {RUN_NAME.pattern}, got {name!r}")


def close_run(context: RunContext) -> None:
    """End the grader's threads and processes, and give the lease back."""
    unregister(context.name)
    if context.built_grader is not None:
        if context.beside is not None:
            context.beside.close(context.built_grader.close)
        context.built_grader.close()
    if context.ledger.lease is not None:
        context.ledger.lease.release()


def resolved(recipe: Recipe, model_folder: Path, began_with: Recipe | None = None) -> Recipe:
    """The recipe with everything that is measured or chosen once filled in; written into the run as content.

    A resumed run keeps what it began with where the recipe leaves the choice.
    """
    if began_with is not None:
        recipe = _with_choices_of(began_with, recipe)
    device = resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)
    model = recipe.model.model_copy(update={"device": device, "dtype": dtype, "path": str(model_folder)})
    training = recipe.training
    if training.checkpoint_every is None:
        # Replay is exact on a CPU, where full checkpoints are large beside the work; elsewhere each step is kept.
        every = 10 if device == "cpu" and model.lora_rank == 0 else 1
        training = training.model_copy(update={"checkpoint_every": every})
    if training.compile == "auto":
        pays = device == "cpu" and recipe.steps >= COMPILED_FROM_STEPS and has_compiler(device)
        training = training.model_copy(update={"compile": pays})
    elif training.compile and not has_compiler(device):
        raise SettingsError("training.compile true needs a C++ compiler on a CPU (g++), Triton on CUDA; found none")
    execution = recipe.execution
    if execution.threads is None:
        execution = execution.model_copy(update={"threads": default_threads()})
    return recipe.model_copy(update={"model": model, "training": training, "execution": execution})


def _with_choices_of(began_with: Recipe, recipe: Recipe) -> Recipe:
    changes: dict[str, Any] = {}
    for section, name in CHOICES:
        settings = changes.get(section, getattr(recipe, section))
        if getattr(settings, name) in ("auto", None):
            changes[section] = settings.model_copy(update={name: getattr(getattr(began_with, section), name)})
    return recipe.model_copy(update=changes)


def identify(recipe: Recipe, model_folder: Path, pinned: dict[str, str], grader_digest: str) -> dict[str, str]:
    """Digests of what the run is made from, by content. Raises SettingsError when one differs from a pinned one."""
    from rft_core.data.prompts import load_tokenizer, tokenizer_digest

    model = model_digest(model_folder)
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
    }
    if recipe.algorithm.paths():
        from rft_core.resolve import check, resolve_algorithm
        from rft_core.user_algorithm import algorithm_code

        check(resolve_algorithm(recipe.algorithm), recipe.training)  # other algorithms were checked with the recipe
        identity["algorithm"] = digest_of(algorithm_code(recipe.algorithm))
    identity |= _critic_identity(recipe, model, settings)
    if recipe.rollout.script is not None:
        script = Path(recipe.rollout.script)
        if not script.is_file():
            raise SettingsError(f"rollout.script must be a file, found nothing at {script}")
        identity["script"] = digest_of(script.read_text())
    for what, digest in pinned.items():
        if identity.get(what) != digest:
            kept = "critic.* and the algorithm's advantage" if what == "critic" else "model.* and the seed"
            raise SettingsError(
                f"the {what} must be that of the run whose tables are taken over ({_short(digest)}), found "
                f"{_short(identity.get(what))}: leave {kept} as they were, or re-run from data without --at"
            )
    return identity


def _resolved_critic(critic: CriticSettings, root: Path) -> CriticSettings:
    if critic.path is None:
        return critic
    return critic.model_copy(update={"path": str(resolve_model_path(critic.path, root, "critic.path"))})


def _critic_identity(recipe: Recipe, model: str, adapters: dict[str, Any]) -> dict[str, str]:
    """What a critic starts from, nothing where the algorithm has none. Raises SettingsError as `check_critic` does."""
    from rft_core.resolve import resolve_algorithm

    algorithm = resolve_algorithm(recipe.algorithm)
    check_critic(recipe.critic, algorithm, recipe.steps)
    if not algorithm.needs_critic:
        return {}
    start = model_digest(Path(recipe.critic.path)) if recipe.critic.path else model
    return {"critic": digest_of({"model": start, "shared_trunk": recipe.critic.shared_trunk, **adapters})}


def _accept(
    folder: Path,
    name: str,
    recipe: Recipe,
    identity: dict[str, str],
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
            "identity": identity,
            "semantics": SEMANTICS,
            "fingerprint": fingerprint(recipe),
            "parent": parent,
            "resumed": [],
        }
        LocalFiles(folder).write("recipe.yaml", resolved_yaml(recipe).encode())
        LocalFiles(folder).write("run.json", json.dumps(description, indent=1).encode())
        return
    changes = difference(read_recipe(folder), recipe)
    _refuse_changed_content(name, changes, identity, present["identity"], recipe)
    if present["semantics"] != SEMANTICS and not accept_new_code:
        stages = sorted(stage for stage in SEMANTICS if present["semantics"].get(stage) != SEMANTICS[stage])
        raise ContentChanged(
            f"run {name} was begun by code whose {', '.join(stages)} gives other results: continue with "
            "--accept-new-code (it is recorded), or start a new run"
        )
    if present["fingerprint"] != fingerprint(recipe):
        watcher.noted(
            f"run {name} goes on under another fingerprint: bits may differ from an uninterrupted run "
            f"({_fingerprint_change(present['fingerprint'], fingerprint(recipe))})"
        )
    for change in changes:
        watcher.noted(f"changed on resume: {change.sentence}")
    resumed = {"at": _now(), "changes": [change.sentence for change in changes], "fingerprint": fingerprint(recipe)}
    if present["semantics"] != SEMANTICS:
        resumed["accepted_semantics"] = SEMANTICS
    description = {**present, "semantics": SEMANTICS, "resumed": [*present["resumed"], resumed]}
    LocalFiles(folder).write("recipe.yaml", resolved_yaml(recipe).encode())
    LocalFiles(folder).write("run.json", json.dumps(description, indent=1).encode())


def _refuse_changed_content(
    name: str, changes: list[Change], identity: dict[str, str], began_with: dict[str, str], recipe: Recipe
) -> None:
    refused = [change for change in changes if change.is_content and not _is_harmless(change, recipe)]
    sentences = [change.sentence for change in refused]
    stages = [STAGE_OF_SETTING[change.path.split(".")[0]] for change in refused]
    for what, stage in STAGE_OF_IDENTITY.items():
        if began_with.get(what) != identity.get(what) and not any(s == stage for s in stages):
            sentences.append(f"content of the {what}: {_short(began_with.get(what))} -> {_short(identity.get(what))}")
            stages.append(stage)
    if not sentences:
        return
    stage = min(stages, key=STAGE_ORDER.index)
    settings = " ".join(f"--set {change.path}={_shell(change.new)}" for change in refused)
    raise ContentChanged(
        f"run {name} must go on with what it began with, found other content:\n  "
        + "\n  ".join(sentences)
        + f"\nStart another run from its tables: rft rerun {name} --from {stage} {settings}".rstrip()
    )


def _is_harmless(change: Change, recipe: Recipe) -> bool:
    """More steps continue the run, unless the learning rate's schedule depends on their number."""
    return change.path == "steps" and change.new > change.old and recipe.training.schedule == "constant"


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json; None when there is no such run."""
    needs = ("identity", "semantics", "fingerprint", "resumed")
    return read_json(folder / "run.json", needs, "delete it and run the same command again, which writes it anew")


def read_recipe(folder: Path) -> Recipe:
    """The resolved recipe that a run was begun with. Raises DamagedTable."""
    path = folder / "recipe.yaml"
    try:
        return recipe_of(parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}, str(path))
    except (FileNotFoundError, UnicodeDecodeError, SettingsError) as error:
        raise DamagedTable(
            f"{path} must be the recipe that the run began with: {error}\nDelete it and run.json beside it, and run "
            "the same command again, which writes both anew"
        ) from error


def _fingerprint_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name])


def _short(digest: str | None) -> str:
    return (digest or "none")[:12]


def _shell(value: Any) -> str:
    text = json.dumps(value)
    return text if re.fullmatch(r"[\w.\"+-]+", text) else f"'{text}'"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
