"""1.0 if the whole completion has a form, else 0.0 with what is wrong.

pattern      a regular expression. The `regex` package (syntax of `re` and more) runs it under a time limit, because a
             completion can make `re` backtrack for longer than the universe lasts. `.` matches line breaks too.
tags         <think>...</think><answer>...</answer>: each tag once, in order, none empty, only white space outside
json_schema  a JSON object (plain, or as one code block) that the schema accepts
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex

from rft_core.errors import SettingsError
from rft_core.rewards.extract import NotThere, json_object
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 2
TIME_LIMIT_SECONDS = 1.0  # a pattern either needs milliseconds or doesn't end: the exact limit changes no score


def matches_pattern(text: str, pattern: regex.Pattern[str]) -> Scored:
    """A match that does not end in time is 0.0 with a reason: only the completion's text can cause it."""
    try:
        match = pattern.fullmatch(text, timeout=TIME_LIMIT_SECONDS)
    except TimeoutError:
        return Scored(0.0, f"timeout: the pattern found no match within {TIME_LIMIT_SECONDS:g} s")
    return Scored(float(match is not None))


def has_tags(text: str, tags: list[str]) -> Scored:
    rest = text
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if text.count(mark) != 1:
                return Scored(0.0, f"{mark} occurs {text.count(mark)} times")
        before, _, rest = rest.partition(f"<{tag}>")
        content, closing, rest = rest.partition(f"</{tag}>")
        if before.strip() or not closing:
            return Scored(0.0, f"<{tag}> must follow at once, in the order {', '.join(tags)}")
        if not content.strip():
            return Scored(0.0, f"<{tag}> is empty")
    return Scored(0.0, "text after the last tag") if rest.strip() else Scored(1.0)


def fits_schema(text: str, validator: Any) -> Scored:
    try:
        error = next(validator.iter_errors(json_object(text)), None)
    except NotThere as missing:
        return Scored(0.0, shortened(str(missing), 120))
    if error is None:
        return Scored(1.0)
    place = "/".join(map(str, error.absolute_path))
    return Scored(0.0, shortened(f"{place or 'the object'}: {error.message}", 120))


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Raises SettingsError when the pattern is not a regular expression, or the schema no schema."""
    check = _check(settings)
    return Scorer(lambda rows: [check(row) for row in rows], {"semantics": SEMANTICS})


def _check(settings: RewardFunction) -> Callable[[RewardRow], Scored]:
    if settings.tags:
        tags = settings.tags
        return lambda row: has_tags(row.completion_text, tags)
    if settings.json_schema is not None:
        import jsonschema
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        validator = jsonschema.Draft202012Validator(settings.json_schema, registry=Registry())  # which never fetches
        try:
            validator.check_schema(settings.json_schema)
            validator.is_valid({})
        except jsonschema.SchemaError as error:
            raise SettingsError(
                f"reward function {settings.component}: json_schema must be a JSON schema, got {error.message}"
            ) from error
        except Unresolvable as error:
            raise SettingsError(
                f"reward function {settings.component}: json_schema must hold all that it refers to, got {error}"
            ) from error
        return lambda row: fits_schema(row.completion_text, validator)
    try:
        pattern = regex.compile(settings.pattern or "", regex.DOTALL)
    except regex.error as error:
        raise SettingsError(
            f"reward function {settings.component}: pattern must be a regular expression, "
            f"got {settings.pattern!r}: {error}"
        ) from error
    return lambda row: matches_pattern(row.completion_text, pattern)
