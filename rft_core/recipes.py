"""Recipes: YAML and `--set` overrides -> Recipe, with errors that name the setting and the mend. No torch.

Relative paths (sources, `model.path`, `rollout.script`, files of users' functions and what they depend on) are taken
from the recipe file's folder; in an override, from the working directory. So a recipe means the same from anywhere.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rft_core.config import Recipe
from rft_core.data.settings import DataSettings
from rft_core.errors import SettingsError
from rft_core.phases import SECTIONS, phase_recipes, with_recipes
from rft_core.recipe_paths import with_absolute_paths
from rft_core.setting_errors import describe, is_text_field, sentence, setting_at
from rft_core.settings import Settings
from rft_core.yaml_text import parse_yaml

SHIPPED_IN = "deployments"  # the package that carries recipes/*.yaml
ABSENT = "(absent)"  # stands in a Change for the side where a list has no such item
ABSENT_PHASE = (ABSENT, None)


@dataclass(frozen=True)
class Change:
    """One setting that differs between two recipes. `is_content` is False for what only decides how work is done.

    >>> Change("steps", 25, 50, True).sentence
    'steps: 25 -> 50'
    """

    path: str
    old: Any
    new: Any
    is_content: bool

    @property
    def sentence(self) -> str:
        return f"{self.path}: {_shown(self.old)} -> {_shown(self.new)}"


def load_recipe(name_or_path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """A recipe from a file, or from the shipped ones by bare name, with `a.b.0.c=value` overrides applied in order.

    Raises SettingsError.
    """
    path = find_recipe(name_or_path)
    values = parse_yaml(_read(path), str(path))
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold a mapping of settings, found {describe(values)}")
    settings = with_absolute_paths(values, path.resolve().parent)
    absolute = absolute_overrides(overrides or [], Path.cwd())
    return _validated(_overridden(settings, absolute), str(path), overrides)


def with_overrides(recipe: Recipe, overrides: list[str]) -> Recipe:
    """The recipe with overrides applied; paths in them stay as they are. Raises SettingsError."""
    values = recipe.model_dump(mode="json")
    if recipe.phases:
        del values["steps"]  # their sum, which an override may change
    return _validated(_overridden(values, overrides), "recipe", overrides)


def data_with_overrides(data: DataSettings, overrides: list[str]) -> DataSettings:
    """Data settings by themselves, of whatever record. Raises SettingsError."""
    values = _overridden({"data": data.model_dump(mode="json")}, overrides)
    try:
        return DataSettings.model_validate(values["data"], strict=True)
    except ValidationError as error:
        raise _in_words(error, "data", overrides, "data") from error


def absolute_overrides(overrides: list[str], folder: Path) -> list[str]:
    """The overrides with relative paths taken from the folder: what a command hands to a flow, which may run anywhere.

    >>> absolute_overrides(["steps=3", "data.source=rows.jsonl"], Path("/data"))
    ['steps=3', 'data.source="/data/rows.jsonl"']
    """
    absolute = []
    for text in overrides:
        path, raw = _split(text)
        value = _parsed(path, raw)
        resolved = with_absolute_paths(value, folder, path)
        absolute.append(text if resolved == value else f"{path}={json.dumps(resolved, ensure_ascii=False)}")
    return absolute


def recipe_of(values: dict[str, Any], origin: str = "settings") -> Recipe:
    """A recipe from plain values (a form, an API call), with the same errors as one from a file."""
    return _validated(values, origin)


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe. Raises SettingsError that says where it looked."""
    given = Path(name_or_path).expanduser()
    try:
        if given.is_file():
            return given
    except OSError as error:  # a name that is too long
        raise SettingsError(f"no recipe {str(name_or_path)[:80]!r}: {error.strerror}") from error
    shipped = shipped_recipes()
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    names = ", ".join(sorted(shipped)) or "none"
    close = difflib.get_close_matches(str(name_or_path), shipped, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    kind = "is a folder, not a file" if given.is_dir() else "there is no such file"
    raise SettingsError(f"no recipe {str(name_or_path)!r}: {kind} ({given.absolute()}), shipped recipes: {names}{hint}")


def shipped_recipes() -> dict[str, Path]:
    """Bare name -> file of the recipes that come with the package (files: wheels are installed unpacked)."""
    try:
        folder = Path(str(importlib.resources.files(SHIPPED_IN))) / "recipes"
    except ModuleNotFoundError:
        return {}
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def resolved_yaml(recipe: Recipe) -> str:
    """All settings, defaults too, in the order of their definition; loading this text gives the same recipe."""
    written_out = with_recipes(recipe, phase_recipes(recipe))
    return yaml.safe_dump(written_out.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the content settings, 64 hex digits. Where data and model lie does not enter; their content does,
    later, in the keys of tables.
    """
    from data_contracts.refs import digest_of  # brings pyarrow: only when asked for

    return digest_of(recipe.content())


def json_schema() -> dict[str, Any]:
    return Recipe.model_json_schema()


def difference(old: Recipe, new: Recipe) -> list[Change]:
    """What changed from old to new, in the order of the settings. Empty for equal recipes. Of recipes with phases, what
    changed in each phase.
    """
    if not old.phases and not new.phases:
        return _changes(old, new, "", True)
    changes = _of_sections(old, new, ("seed", "retention", "execution"), "")
    before, after = list(phase_recipes(old).items()), list(phase_recipes(new).items())
    for index in range(max(len(before), len(after))):
        (old_name, was), (name, is_now) = (
            items[index] if index < len(items) else ABSENT_PHASE for items in (before, after)
        )
        path = f"phases.{index}"
        if old_name != name or was is None or is_now is None:
            changes.append(Change(f"{path}.name", old_name, name, True))
        else:
            changes += _of_sections(was, is_now, ("steps", *SECTIONS), f"{path}.")
    return changes


def _of_sections(old: Recipe, new: Recipe, names: tuple[str, ...], prefix: str) -> list[Change]:
    changes = _changes(old, new, "", True)
    chosen = [change for change in changes if change.path.split(".")[0] in names]
    return [replace(change, path=prefix + change.path) for change in chosen]


def _changes(old: Any, new: Any, path: str, is_content: bool) -> list[Change]:
    if isinstance(old, Settings) and type(old) is type(new):
        changes = []
        for name, field in type(old).model_fields.items():
            extra = field.json_schema_extra
            is_execution = isinstance(extra, dict) and bool(extra.get("execution"))
            inner = f"{path}.{name}" if path else name
            changes += _changes(getattr(old, name), getattr(new, name), inner, is_content and not is_execution)
        return changes
    if isinstance(old, list) and isinstance(new, list):
        pairs = [
            (old[i] if i < len(old) else ABSENT, new[i] if i < len(new) else ABSENT)
            for i in range(max(len(old), len(new)))
        ]
        return [change for i, (a, b) in enumerate(pairs) for change in _changes(a, b, f"{path}.{i}", is_content)]
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            change
            for key in keys
            for change in _changes(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}", is_content)
        ]
    return [] if old == new and type(old) is type(new) else [Change(path, old, new, is_content)]


def _shown(value: Any) -> str:
    if isinstance(value, Settings):
        value = value.model_dump(mode="json", exclude_defaults=True)
    return ABSENT if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read recipe {path}: {error}") from error


def _validated(values: dict[str, Any], origin: str, overrides: list[str] | None = None) -> Recipe:
    # Strict: YAML has types, so `steps: "25"` or `steps: true` is a slip of the pen, not a number.
    try:
        return Recipe.model_validate(values, strict=True)
    except ValidationError as error:
        raise _in_words(error, origin, overrides or []) from error


def _in_words(error: ValidationError, origin: str, overrides: list[str], section: str = "") -> SettingsError:
    overridden = [text.partition("=")[0].strip() for text in overrides]
    lines = []
    for detail in error.errors(include_url=False):
        path = ".".join(filter(None, (section, *map(str, detail["loc"]))))
        is_override = any(f"{path}.".startswith(f"{key}.") for key in overridden)
        lines.append(f"{'--set' if is_override else origin}: {sentence(path, detail)}")
    return SettingsError("\n".join(dict.fromkeys(lines)))


def _overridden(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    for text in overrides:
        path, raw = _split(text)
        values = _with_value(values, path.split("."), _parsed(path, raw), path)
    return values


def _split(override: str) -> tuple[str, str]:
    path, equals, raw = override.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise SettingsError(f"--set takes key=value, e.g. --set training.learning_rate=1e-5; got {override!r}")
    return path, raw


def _parsed(path: str, raw: str) -> Any:
    """The override's value as YAML; as it stands, where the setting is a text and YAML would read something else."""
    if is_text_field(path):
        try:
            value = parse_yaml(raw, f"--set {path}")
        except SettingsError:
            return raw
        is_null_meant = value is None and raw.strip() and setting_at(path).is_optional
        return value if isinstance(value, str) or is_null_meant else raw
    return parse_yaml(raw, f"--set {path}")


def _with_value(container: Any, parts: list[str], value: Any, path: str) -> Any:
    """A copy of nested mappings and lists with the value at parts; missing mappings are made, lists grow by one."""
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(container, list):
        return _with_item(container, head, rest, value, path)
    if container is None:
        container = [] if head == "0" else {}
        return _with_value(container, parts, value, path)
    if isinstance(container, dict):
        return {**container, head: _with_value(container.get(head), rest, value, path)}
    raise SettingsError(f"--set {path}: {head!r} cannot be set inside {describe(container)}")


def _with_item(items: list[Any], head: str, rest: list[str], value: Any, path: str) -> list[Any]:
    if not head.isdigit() or int(head) > len(items):
        raise SettingsError(
            f"--set {path}: {head!r} must be an index from 0 to {len(items)} (the list has {len(items)} items, and "
            f"{len(items)} appends one)"
        )
    index = int(head)
    before = items[index] if index < len(items) else None
    return [*items[:index], _with_value(before, rest, value, path), *items[index + 1 :]]


__all__ = [
    "Change",
    "absolute_overrides",
    "difference",
    "find_recipe",
    "json_schema",
    "load_recipe",
    "recipe_digest",
    "recipe_of",
    "resolved_yaml",
    "shipped_recipes",
    "with_overrides",
]
