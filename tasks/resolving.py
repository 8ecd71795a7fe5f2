"""What a recipe leaves to the machine: chosen or measured once, at the start of a run, and written into its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_core.config import Recipe
from rft_core.engines.batch_budget import batch_token_budget
from rft_core.errors import SettingsError
from rft_core.hardware import default_threads, has_compiler, has_matrix_unit, resolve_device, resolve_dtype
from rft_core.phases import phase_recipes, phases_named, with_recipes
from rft_core.rewards.scoring_models import resolve_scoring_models
from tasks.model_paths import with_folders

# Settings that may be left to it.
CHOICES = (
    ("model", "device"),
    ("model", "dtype"),
    ("rollout", "batch_tokens"),
    ("teacher", "dtype"),
    ("training", "checkpoint_every"),
    ("training", "compile"),
    ("execution", "threads"),
)
# Compiling costs as much as it saves in about so many updates of a small model, and its cache is warm afterwards.
COMPILED_FROM_STEPS = 50


def resolved(recipe: Recipe, root: Path, began_with: Recipe | None = None) -> Recipe:
    """The recipe with everything that is measured or chosen once filled in; written into the run as content.

    A resumed run keeps what it began with where the recipe leaves the choice.
    """
    before = phase_recipes(began_with) if began_with is not None else {}
    own: dict[str, Recipe] = {}
    folders: dict[str, Path] = {}  # of the model behind each phase's, which has its architecture
    for phase, part in phase_recipes(recipe).items():
        behind = folders.get(phases_named(part).get("model.path", ""))
        own[phase] = _resolved(part, root, before.get(phase), behind)
        folders[phase] = behind or Path(own[phase].model.path)
    return with_recipes(recipe, own)


def _resolved(recipe: Recipe, root: Path, began_with: Recipe | None, behind: Path | None) -> Recipe:
    reward = resolve_scoring_models(recipe.reward, root, began_with.reward if began_with else None)
    if began_with is not None:
        recipe = _with_choices_of(began_with, recipe)
    recipe = with_folders(recipe, root)
    device = resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)
    model, teacher = recipe.model.model_copy(update={"device": device, "dtype": dtype}), recipe.teacher
    if teacher.path is not None and teacher.dtype == "auto":  # one of equal weights then agrees to the bit
        teacher = teacher.model_copy(update={"dtype": dtype})
    rollout = recipe.rollout
    if rollout.batch_tokens is None:
        budget = batch_token_budget(behind or Path(model.path), device, dtype)
        rollout = rollout.model_copy(update={"batch_tokens": budget})
    training = recipe.training
    if training.checkpoint_every is None:
        # Replay is exact on a CPU, where full checkpoints are large beside the work; elsewhere each step is kept.
        every = 10 if device == "cpu" and model.lora_rank == 0 else 1
        training = training.model_copy(update={"checkpoint_every": every})
    if training.compile == "auto":
        pays = device == "cpu" and has_matrix_unit() and recipe.steps >= COMPILED_FROM_STEPS and has_compiler(device)
        training = training.model_copy(update={"compile": pays})
    elif training.compile and not has_compiler(device):
        raise SettingsError("training.compile true needs a C++ compiler on a CPU (g++), Triton on CUDA; found none")
    execution = recipe.execution
    if execution.threads is None:
        execution = execution.model_copy(update={"threads": default_threads()})
    sections = {"model": model, "rollout": rollout, "reward": reward, "teacher": teacher, "training": training}
    return recipe.model_copy(update={**sections, "execution": execution})


def _with_choices_of(began_with: Recipe, recipe: Recipe) -> Recipe:
    changes: dict[str, Any] = {}
    for section, name in CHOICES:
        settings = changes.get(section, getattr(recipe, section))
        if getattr(settings, name) in ("auto", None):
            changes[section] = settings.model_copy(update={name: getattr(getattr(began_with, section), name)})
    return recipe.model_copy(update=changes)
