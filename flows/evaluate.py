"""Evaluate a policy: a run of zero steps whose model is the policy's folder."""

from __future__ import annotations

import re
from pathlib import Path

from data_contracts.checkpoints import checkpoint_manifest
from data_contracts.refs import digest_of
from data_contracts.tombstones import Tombstone
from flows.root import artifact_root
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.model_folder import model_digest, resolve_model_path
from rft_core.phases import NAMES_PHASE, phase_recipes, phases_named
from rft_core.recipes import absolute_overrides, recipe_digest, with_overrides
from rft_core.resolve import resolve_algorithm
from tasks.context import run_folder
from tasks.phases import models_of
from tasks.resuming import read_run


def evaluation_recipe(
    root: Path, what: str, recipe: Recipe | None, overrides: list[str], phase: str | None = None, ema: bool = False
) -> tuple[Recipe, str]:
    """The recipe that evaluates a run's last policy, its `phase`'s, a moving average or a model folder, and the name of
    the new run.

    Data, rewards and evaluation settings come from `recipe`, of whose phases the last counts, else from the run. The
    margin of a run on preferences is measured against the model that it started with, as in the run itself.
    """
    if recipe is not None:
        recipe = _last_phase(recipe)
    folder = run_folder(root, what)
    if read_run(folder) is not None:
        from flows.export import export_run, phase_with_checkpoint

        phase = phase_with_checkpoint(root, what, phase)
        trained = models_of(root, what).recipe(phase)
        base = _with_reference(recipe or trained, trained.model.path)
        model = export_run(root, what, phase=phase, ema=ema)
    elif ema:
        raise SettingsError(f"--ema needs a run, which keeps an average of its weights, {what!r} is none")
    elif _is_model_folder(Path(what)):
        if recipe is None:
            raise SettingsError(f"{what} is a model folder: name the recipe whose held-out data it meets, --recipe R")
        base, model = recipe, Path(what).resolve()
    else:
        raise SettingsError(f"no run and no model folder {what!r} (runs lie under {artifact_root(str(root)) / 'runs'})")
    chosen = with_overrides(base, absolute_overrides(overrides, Path.cwd()))
    engine = "transformers" if chosen.rollout.engine == "none" else chosen.rollout.engine
    evaluated = chosen.model_copy(
        update={
            "steps": 0,
            "model": chosen.model.model_copy(update={"path": str(model), "lora_rank": 0}),
            "rollout": chosen.rollout.model_copy(update={"engine": engine}),
            "evaluation": chosen.evaluation.model_copy(update={"every": chosen.evaluation.every or 1}),
        }
    )
    return evaluated, _name(root, what, evaluated, model)


def _with_reference(recipe: Recipe, model: str) -> Recipe:
    """The recipe with a reference, where it measures margins and names none itself."""
    if recipe.evaluation.reference is not None or not resolve_algorithm(recipe.algorithm).is_measured_by_margin:
        return recipe
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"reference": model})})


def _last_phase(recipe: Recipe) -> Recipe:
    """Raises SettingsError where what it evaluates with is itself trained by an earlier phase."""
    name, last = list(phase_recipes(recipe).items())[-1]
    needed = [f"{path} ({NAMES_PHASE}{phase})" for path, phase in phases_named(last).items() if path != "model.path"]
    if needed:
        raise SettingsError(
            f"phase {name} of the recipe must stand alone to evaluate with it, found {', '.join(needed)}: name a run "
            "that has trained it, or a model folder in its place"
        )
    return last


def _is_model_folder(folder: Path) -> bool:
    """Raises SettingsError for a checkpoint whose data were deleted."""
    tombstone = Tombstone.of(checkpoint_manifest(folder) or {})
    if tombstone is not None:
        raise SettingsError(
            f"{tombstone.sentence(f'the checkpoint {folder}')}; to make it again: pin its step, and "
            f"{tombstone.mend(str(folder.resolve().parent.parent))}"
        )
    return (folder / "config.json").is_file()


def _name(root: Path, what: str, recipe: Recipe, model: Path) -> str:
    """Other weights, settings or reference are another evaluation; the same ones resume theirs."""
    reference = recipe.evaluation.reference
    folders = [model] + ([] if reference is None else [resolve_model_path(reference, root, "evaluation.reference")])
    readable = re.sub(r"[^a-z0-9._-]+", "-", Path(what).name.lower())[:40].strip("._-")
    return f"{readable or 'model'}-evaluation-{digest_of([recipe_digest(recipe), *map(model_digest, folders)])[:8]}"
