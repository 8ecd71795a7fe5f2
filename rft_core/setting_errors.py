"""Sentences for settings that are wrong: the full path, what must hold, what was found, the nearest valid key."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

from rft_core.config import Recipe
from rft_core.phases import PHASE_NAME, SECTIONS
from rft_core.rewards.settings import COMPONENT, PLACE, TAG
from rft_core.settings import NOT_BLANK, Settings

KEY_MARK = ".[key]"  # how pydantic ends the path of a mapping's key
FOUND_LENGTH = 80  # longer values are cut in messages
# Likeness (difflib's ratio, 1 = equal) from which a key is suggested. `lerning_rate` beside `seed` means training's.
NEAR, NEAR_ELSEWHERE, SIBLING_BONUS = 0.5, 0.75, 0.2


@dataclass(frozen=True)
class Setting:
    """One setting. `path` has `*` for the index in a list; `annotation` is its type without `| None`."""

    path: str
    annotation: Any
    is_optional: bool
    description: str


@functools.cache
def fields_of(model: type[Settings] = Recipe) -> dict[str, Setting]:
    """Every setting of a model by dotted path, sections and leaves, in order of definition.

    >>> fields_of()["reward.functions.*.weight"].annotation
    <class 'float'>
    """
    found: dict[str, Setting] = {}
    _collect(model, "", found)
    if model is Recipe:  # a phase holds any settings of these sections
        for section in SECTIONS:
            _collect(_without_none(Recipe.model_fields[section].annotation)[0], f"phases.*.{section}.", found)
    return found


def _collect(model: type[Settings], prefix: str, found: dict[str, Setting]) -> None:
    for name, field in model.model_fields.items():
        annotation, is_optional = _without_none(field.annotation)
        path = f"{prefix}{name}"
        found[path] = Setting(path, annotation, is_optional, field.description or "")
        if _is_model(annotation):
            _collect(annotation, f"{path}.", found)
        elif typing.get_origin(annotation) is list:
            inner = _without_bounds(typing.get_args(annotation)[0])
            found[f"{path}.*"] = Setting(f"{path}.*", inner, False, field.description or "")
            if _is_model(inner):
                _collect(inner, f"{path}.*.", found)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _without_bounds(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    rest = [choice for choice in typing.get_args(annotation) if choice is not type(None)]
    return (rest[0] if len(rest) == 1 else annotation), len(rest) < len(typing.get_args(annotation))


def setting_at(path: str) -> Setting:
    """The setting of a concrete path such as `reward.functions.0.weight`. Raises KeyError if there is none."""
    return fields_of()[pattern_of(path)]


def is_text_field(path: str) -> bool:
    setting = fields_of().get(pattern_of(path))
    return setting is not None and setting.annotation is str


def is_section(path: str) -> bool:
    """Whether a setting is a group of settings."""
    setting = fields_of().get(pattern_of(path))
    return setting is not None and _is_model(setting.annotation)


def pattern_of(path: str) -> str:
    """A dotted path with `*` for each index in a list."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def sentence(path: str, detail: Any) -> str:
    """One pydantic error detail at a dotted path, in words."""
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown setting {path}; {_suggestion(path)}"
    if kind == "missing":
        meaning = fields_of()[pattern_of(path)].description
        return f"{path} is required" + (f": {meaning}" if meaning else "")
    if kind == "value_error":  # raised by a validator of ours, already a sentence
        message = str(context["error"])
        return f"{path}: {message}" if path else message
    if kind == "literal_error" and path.endswith(KEY_MARK):  # a mapping from names of ours
        parent = path.removesuffix(KEY_MARK).rpartition(".")[0]
        return f"keys of {parent} must be among {context['expected']}, found {found!r}"
    if kind == "literal_error":
        return f"{path} must be {context['expected']}, found {describe(found)}{_nearest_choice(found, path)}"
    if kind == "string_pattern_mismatch":
        meaning = fields_of()[pattern_of(path)].description
        must = MUST_MATCH.get(context["pattern"], f"a text of the form {context['pattern']}")
        return f"{path} must be {must}, found {describe(found)}: {meaning}"
    must = MUST.get(kind)
    requirement = must.format(**context) if must else detail["msg"].removeprefix("Input should ")
    return f"{path} must be {requirement.removeprefix('be ')}, found {describe(found)}"


def describe(value: Any) -> str:
    """What was found, short.

    >>> describe({"a": 1}), describe("25"), describe(None)
    ('a mapping', "the text '25'", 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value) if len(repr(value)) <= FOUND_LENGTH else repr(value)[: FOUND_LENGTH - 3] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def _suggestion(path: str) -> str:
    """The setting most likely meant: the nearest spelling; in the same section before elsewhere."""
    parent, _, key = path.rpartition(".")
    siblings = _children(parent)
    if not siblings:
        return f"{parent} is a value without parts"
    likeness: dict[str, float] = {}
    for known in fields_of():
        leaf = known.rpartition(".")[2]
        is_sibling = leaf in siblings and known.rpartition(".")[0] == pattern_of(parent)
        ratio = difflib.SequenceMatcher(None, key.lower(), leaf).ratio()
        if ratio >= (NEAR if is_sibling else NEAR_ELSEWHERE):
            likeness[known] = ratio + (SIBLING_BONUS if is_sibling else 0)
    if not likeness:
        return f"{parent or 'a recipe'} has: {', '.join(siblings)}"
    nearest = max(likeness, key=lambda known: likeness[known])
    prefix = f"{parent}." if parent and nearest.rpartition(".")[0] == pattern_of(parent) else ""
    return f"did you mean {prefix + nearest.rpartition('.')[2] if prefix else nearest.replace('*', '0')}?"


def _children(parent: str) -> list[str]:
    prefix = f"{pattern_of(parent)}." if parent else ""
    return [
        known[len(prefix) :]
        for known in fields_of()
        if known.startswith(prefix) and "." not in known[len(prefix) :] and known[len(prefix) :] != "*"
    ]


def _nearest_choice(found: Any, path: str) -> str:
    choices = typing.get_args(fields_of()[pattern_of(path)].annotation)
    close = difflib.get_close_matches(str(found).lower(), [str(choice) for choice in choices], n=1)
    return f"; did you mean {close[0]}?" if close else ""


# What must hold, by pydantic's error type. Types not listed here keep pydantic's own words.
MUST = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "a mapping of settings",
    "string_too_short": "a text of length {min_length} or more",
    "string_type": "a text",
    "too_short": "a list of at least {min_length}",
}
MUST_MATCH = {  # others are shown as they are
    NOT_BLANK: "a text that is not blank",
    COMPONENT: "a text without slashes that is not blank",
    TAG: "a name of letters, digits, _ and -",
    PLACE: "tag.NAME or json.FIELD",
    PHASE_NAME: "a name of at most 32 lower-case letters, digits, - and _ that begins with a letter",
}
