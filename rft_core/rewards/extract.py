"""The part of a completion that a function judges."""

from __future__ import annotations

import json
import re
from typing import Any

FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
MAX_JSON_CHARACTERS = 1_000_000
MAX_DEPTH = 100


class NotThere(ValueError):
    """The completion lacks the part; the message says how."""


def extract(completion: str, place: str | None) -> str:
    """`place`: null for all of it, `tag.NAME` for the content of the last <NAME>...</NAME>, `json.FIELD` for a field of
    the object that the completion is. Raises NotThere.

    >>> extract('{"answer": 7}', "json.answer"), extract("so <answer> 7 </answer>", "tag.answer")
    ('7', '7')
    """
    if place is None:
        return completion
    kind, _, name = place.partition(".")
    if kind == "tag":
        found = tagged(completion, name)
        if found is None:
            raise NotThere(f"no <{name}>...</{name}>")
        return found
    value = json_object(completion)
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise NotThere(f"the JSON object has no field {name!r}")
        value = value[part]
    return value if isinstance(value, str) else json.dumps(value)


def tagged(text: str, tag: str) -> str | None:
    """The stripped content of the last <tag>...</tag>; an unclosed one is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def json_object(completion: str) -> dict[str, Any]:
    """The object that the whole completion is, plain or as one code block. Raises NotThere.

    Strict: no repeated keys, no NaN or Infinity, at most MAX_DEPTH deep.
    """
    fenced = FENCE.fullmatch(completion)
    text = fenced[1] if fenced else completion
    if len(text) > MAX_JSON_CHARACTERS:
        raise NotThere(f"more than {MAX_JSON_CHARACTERS} characters of JSON")
    depth = deepest = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += (bracket in "[{") - (bracket in "]}") if len(bracket) == 1 else 0
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise NotThere(f"JSON more than {MAX_DEPTH} deep")
    try:
        value = strict_json(text)
    except ValueError as error:
        raise NotThere(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotThere(f"JSON, but no object: {type(value).__name__}")
    return value


def strict_json(text: str, *, allows_line_breaks: bool = False) -> Any:
    """JSON without repeated keys, NaN and Infinity; with line breaks inside texts where these are allowed. Raises
    ValueError, RecursionError."""
    hooks: dict[str, Any] = {"object_pairs_hook": _without_repeats, "parse_constant": _refuse}
    return json.loads(text, strict=not allows_line_breaks, **hooks)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is repeated")
    return made


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
