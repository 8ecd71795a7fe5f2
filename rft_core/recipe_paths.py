"""Settings that name files: what of their text is a path, and from which folder a relative one is taken.

A recipe file gives that folder, a command line the working directory. Values that come without either (a form, an API
call) must name absolute paths, since a flow runs wherever its worker does. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.algorithm_settings import CUSTOM
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.phases import NAMES_PHASE
from rft_core.setting_errors import pattern_of

# A source of another kind than a file: `reasoning_gym:chain_sum`, `s3://bucket/rows.jsonl`.
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9_+.-]+:(?!\\)")


@dataclass(frozen=True)
class _PathSetting:
    """`file` gives the part of the setting's text that is a path, or None where it names something else. The folder,
    where one is known, decides for names that could be either. An environment's interpreter is a link, which tells it
    where its packages are: such a path `keeps_links`.
    """

    must: str
    file: Callable[[str, Path | None], str | None]
    keeps_links: bool = False


def with_absolute_paths(value: Any, folder: Path, path: str = "") -> Any:
    """Settings below `path` with relative paths taken from the folder. What is no path, or of a wrong type, stays:
    validation names the latter.
    """
    if isinstance(value, dict):
        return {name: with_absolute_paths(inner, folder, _below(path, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(inner, folder, _below(path, index)) for index, inner in enumerate(value)]
    setting = _setting_at(path)
    file = setting.file(value, folder) if setting is not None and isinstance(value, str) else None
    if file is None or not file.strip():  # a blank text is no path to the folder; validation refuses it
        return value
    joined = folder / Path(file).expanduser()
    keeps_links = setting is not None and setting.keeps_links
    return (os.path.abspath(joined) if keeps_links else str(joined.resolve())) + value.removeprefix(file)


def refuse_relative_paths(recipe: Recipe) -> None:
    """Raise SettingsError for a path whose meaning depends on where the process happens to run."""
    for path, text in texts(recipe.model_dump(mode="json")):
        setting = _setting_at(path)
        file = setting.file(text, None) if setting is not None else None
        if setting is not None and file and not Path(file).is_absolute():
            raise SettingsError(
                f"{path} must be {setting.must}, found the relative path {text!r}: a flow may run in any folder. "
                "Relative paths are for recipe files (taken from the file's folder) and for --set"
            )


def is_model_path(path: str) -> bool:
    """Whether a setting says which model: a folder, a fetched name or a hub id, or, in a phase, an earlier phase."""
    setting = _setting_at(path)
    return setting is not None and setting.file is _model_folder


def _setting_at(path: str) -> _PathSetting | None:
    """A phase has the settings of a recipe."""
    return PATH_SETTINGS.get(pattern_of(path).removeprefix("phases.*."))


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, text) of every text below."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from texts(inner, _below(path, name))


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _any_file(text: str, _folder: Path | None) -> str | None:
    return text


def _source_file(text: str, _folder: Path | None) -> str | None:
    return None if _SCHEME.match(text) else text


def _model_folder(text: str, folder: Path | None) -> str | None:
    """A folder beside the recipe, or written as a path; a bare name, `owner/name` or `phase:NAME` is none."""
    if text.startswith(NAMES_PHASE):
        return None
    is_path = text.startswith(("./", "../", "~", "/")) or text in (".", "..")
    is_path = is_path or text.endswith("/") or text.count("/") > 1
    return text if is_path or (folder is not None and (folder / text).is_dir()) else None


def _function_file(text: str, _folder: Path | None) -> str | None:
    return text.rpartition(":")[0] if ".py:" in text else None


PATH_SETTINGS = {
    **{
        f"{section}.{name}": _PathSetting("an absolute path, or reasoning_gym:NAME", _source_file)
        for section in ("data", "experts")
        for name in ("source", "heldout_source", "mixture.*.source")
    },
    **{
        f"{section}.cleaning.*.path": _PathSetting(
            "an absolute path as /FOLDER/FILE.py:function, or module.function", _function_file
        )
        for section in ("data", "experts")
    },
    "model.path": _PathSetting("an absolute path, a name from `rft fetch-model`, or a hub id", _model_folder),
    "critic.path": _PathSetting("an absolute path, a name from `rft fetch-model`, or a hub id", _model_folder),
    "teacher.path": _PathSetting("an absolute path, a name from `rft fetch-model`, or a hub id", _model_folder),
    "evaluation.reference": _PathSetting("an absolute path, a name from `rft fetch-model`, or a hub id", _model_folder),
    "rollout.script": _PathSetting("an absolute path", _any_file),
    "rollout.vllm.python": _PathSetting("an absolute path", _any_file, keeps_links=True),
    "rollout.vllm.weights_folder": _PathSetting("an absolute path", _any_file),
    **{
        f"algorithm.{name}": _PathSetting(
            "an absolute path as /FOLDER/FILE.py:function, or module.function", _function_file
        )
        for name in CUSTOM
    },
    "reward.functions.*.path": _PathSetting(
        "an absolute path as /FOLDER/FILE.py:function, or module.function", _function_file
    ),
    **{
        f"reward.functions.*.{section}.{name}": setting
        for section in ("reward_model", "process_reward_model")
        for name, setting in (
            ("path", _PathSetting("an absolute path, a name from `rft fetch-model`, or a hub id", _model_folder)),
            ("chat_template", _PathSetting("an absolute path", _any_file)),
        )
    },
    "reward.steps.path": _PathSetting(
        "an absolute path as /FOLDER/FILE.py:function, or module.function", _function_file
    ),
    "reward.steps.depends_on.*": _PathSetting("an absolute path", _any_file),
    "reward.functions.*.depends_on.*": _PathSetting("an absolute path", _any_file),
    "reward.functions.*.judge.instruction_file": _PathSetting("an absolute path", _any_file),
}
