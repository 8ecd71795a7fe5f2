"""Folders and compute types of models that score, and what can be checked before they are loaded. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rft_core.errors import SettingsError
from rft_core.hardware import resolve_device, resolve_dtype
from rft_core.model_folder import resolve_model_path
from rft_core.model_reading import HEADS, check_model_folder
from rft_core.phases import NAMES_PHASE
from rft_core.rewards.model_settings import ScoringModelSettings
from rft_core.rewards.settings import RewardFunction, RewardSettings

# How names of architectures end that have a head; others may be read with it too.
ENDINGS = {
    "causal": ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    "sequence_labels": ("ForSequenceClassification",),
    "token_labels": ("ForTokenClassification",),
}

# Which reward reads a classifier.
FITTING = {"reward_model": ENDINGS["sequence_labels"], "process_reward_model": ENDINGS["token_labels"]}


def resolve_scoring_models(
    settings: RewardSettings, root: Path, began_with: RewardSettings | None = None
) -> RewardSettings:
    """With the absolute folder of each model, its device and its dtype. A resumed run keeps what it began with where
    the recipe leaves the choice. What an earlier phase trains has no folder yet.

    Raises SettingsError and ModelUnreadable as resolve_model_path does.
    """
    known = {function.component: function.scoring_model for function in began_with.functions} if began_with else {}
    functions = []
    for function in settings.functions:
        section = function.scoring_model
        if section is not None and section.path is not None:
            before = known.get(function.component)
            choices = {
                name: getattr(before, name)
                for name in ("device", "dtype")
                if before is not None and getattr(section, name) == "auto"
            }
            section = section.model_copy(update=choices)
            device = resolve_device(section.device)
            setting = f"{function.name}.path of {function.component}"
            is_phase = section.path.startswith(NAMES_PHASE)
            found = {
                "path": section.path if is_phase else str(resolve_model_path(section.path, root, setting)),
                "device": device,
                "dtype": resolve_dtype(section.dtype, device),
            }
            function = function.model_copy(update={function.name: section.model_copy(update=found)})
        functions.append(function)
    return settings.model_copy(update={"functions": functions})


def folder_of(function: RewardFunction, folder: Path | None) -> Path:
    """The model's folder; a relative one starts at `folder`. Raises SettingsError."""
    assert function.scoring_model is not None and function.scoring_model.path is not None
    found = (folder or Path.cwd()) / Path(function.scoring_model.path).expanduser()
    if not found.is_dir():
        raise SettingsError(
            f"{function.name}.path of {function.component} must be a model folder, found none at {found}"
        )
    return found


def check_architecture(function: RewardFunction, folder: Path, head: str) -> dict[str, Any]:
    """The folder's config. Raises ModelUnreadable, or SettingsError for a model that has another head."""
    config = check_model_folder(folder)
    names = config.get("architectures") or []
    if names and not any(name.endswith(ENDINGS[head]) for name in names):
        fitting = next((made for made, ends in FITTING.items() if any(name.endswith(ends) for name in names)), None)
        raise SettingsError(
            f"{function.name}.path of {function.component} must be {HEADS[head][1]}, "
            f"found {', '.join(names)} in {folder}" + (f": use the reward {fitting}" if fitting else "")
        )
    return config


def labels_of(config: dict[str, Any]) -> list[str]:
    """Names of a classifier's labels. transformers writes none for two labels without names.

    >>> labels_of({"id2label": {"0": "bad", "1": "good"}}), labels_of({})
    (['bad', 'good'], ['LABEL_0', 'LABEL_1'])
    """
    names = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    return [names[key] for key in sorted(names, key=int)]


def label_index(label: int | str, labels: list[str], setting: str) -> int:
    """Raises SettingsError when there is no such label."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if isinstance(label, int) and 0 <= label < len(labels):
        return label
    raise SettingsError(f"{setting} must be one of the model's labels, {labels}, or an index of them, got {label!r}")


def template_of(function: RewardFunction, section: ScoringModelSettings, folder: Path | None) -> str | None:
    """The text of the file `chat_template`. Raises SettingsError."""
    if section.chat_template is None:
        return None
    path = (folder or Path.cwd()) / Path(section.chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{function.name}.chat_template of {function.component} must be a file of text, found {error}"
        ) from error


def identity_of(semantics: int, template: str | None) -> dict[str, Any]:
    """Of a scorer, besides its settings and the content of the model's folder."""
    return {"semantics": semantics, "template": template and hashlib.sha256(template.encode()).hexdigest()}
