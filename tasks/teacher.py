"""The teacher of a run: which folder it is, what identifies it, and the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.model_folder import model_digest

if TYPE_CHECKING:
    from rft_core.policy import Policy
    from tasks.context import RunContext


def teacher_digest(recipe: Recipe, model_folder: Path) -> dict[str, str]:
    """Identity of the teacher's content; nothing without one. Raises SettingsError for another vocabulary."""
    from rft_core.vocabulary import refuse_other_vocabulary

    if recipe.teacher.path is None:
        return {}
    folder = Path(recipe.teacher.path)
    refuse_other_vocabulary(model_folder, folder)
    return {"teacher": model_digest(folder)}


def teacher_identity(context: RunContext) -> dict[str, Any]:
    """What an update's settings say of the teacher that its loss reads; nothing where it reads none."""
    if not context.algorithm.distillation.coefficient:
        return {}
    return {"teacher": {"digest": context.identity["teacher"], "dtype": context.recipe.teacher.dtype}}


def load_teacher(context: RunContext, resident: Policy, dtype: str, path: str, digest: str | None = None) -> Policy:
    """The frozen teacher of a folder, kept for the next call. `digest` is what its content must be, for a replay.

    Raises SettingsError when the content has changed since, or the policy's layout is beyond it.
    """
    from rft_core.distillation import refuse_other_layout

    if digest is not None and model_digest(Path(path)) != digest:
        raise SettingsError(
            f"the teacher {path} must be what the update was made with, it has changed since: put it back, or start "
            "another run with `rft rerun --from advantages`"
        )
    policies = context.policies
    if policies.teacher is None or (policies.teacher.folder, policies.teacher.dtype) != (Path(path), _torch(dtype)):
        from rft_core.config import ModelSettings
        from rft_core.policy import Policy

        settings = ModelSettings(path=path, device=context.recipe.model.device, dtype=dtype)
        policies.teacher = None  # two would not fit everywhere
        policies.teacher = Policy.load(settings, Path(path), seed=0, trainable=False)
    refuse_other_layout(resident, policies.teacher)
    return policies.teacher


def _torch(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)
