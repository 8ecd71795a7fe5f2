"""The folders of the models that a recipe names."""

from __future__ import annotations

from pathlib import Path

from rft_core.config import Recipe
from rft_core.model_folder import resolve_model_path
from rft_core.phases import NAMES_PHASE

MODEL_PATHS = (("model", "path"), ("critic", "path"), ("teacher", "path"), ("evaluation", "reference"))


def with_folders(recipe: Recipe, root: Path) -> Recipe:
    """With the absolute folder of each model but those that an earlier phase trains. Raises as `resolve_model_path`."""
    changes = {}
    for section, name in MODEL_PATHS:
        settings = getattr(recipe, section)
        path = getattr(settings, name)
        if path is not None and not path.startswith(NAMES_PHASE):
            folder = resolve_model_path(path, root, f"{section}.{name}")
            changes[section] = settings.model_copy(update={name: str(folder)})
    return recipe.model_copy(update=changes)
