"""A judge's reply -> what it says, or why that can't be read. Never a guess.

A reply is one JSON object, bare or in a code fence, with or without words around it; leading <think> blocks are not
part of it, trailing commas are forgiven. What may be the candidate's own words is no verdict: objects that say
different things, and, among other words, an object that a candidate wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rft_core.rewards.extract import strict_json
from rft_core.rewards.rows import shortened

THINKING = r"\s*<(think|thinking|thought|reasoning)>"
THOUGHT = re.compile(rf"{THINKING}.*?</\1>", re.DOTALL | re.IGNORECASE)
UNENDED_THOUGHT = re.compile(THINKING, re.IGNORECASE)
FENCE = re.compile(r"\s*```\w*\s*(.*?)\s*```\s*", re.DOTALL)
PROSE_BRACES = re.compile(r"\{\s*[^\s{}\"'“”‘’:][^{}\"'“”‘’:]*\}")  # {a, b} in a sentence or a formula
COMMA_BEFORE_END = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)
WINNERS = ("A", "B", "tie")


class UnreadableReply(ValueError):
    """What a reply lacks, as the end of the sentence "the reply ..."."""


@dataclass(frozen=True)
class ReplyForm:
    """What a reply must be: for the endpoint a JSON schema, for the judge an example, for us a reader of its value."""

    schema: dict[str, Any]
    example: str
    read: Callable[[dict[str, Any]], Any]


def score_form(low: float, high: float) -> ReplyForm:
    """{"reason": ..., "score": NUMBER} -> the number."""

    def read(found: dict[str, Any]) -> float:
        return _number(_field(found, "score"), "score", low, high)

    example = f'{{"reason": "one or two sentences", "score": a number from {low:g} to {high:g}}}'
    return ReplyForm(_schema({"score": {"type": "number"}}), example, read)


def scores_form(ranges: Mapping[str, tuple[float, float]]) -> ReplyForm:
    """{"reason": ..., "scores": {NAME: NUMBER, ...}} -> the numbers by name, all of them and no others."""

    def read(found: dict[str, Any]) -> dict[str, float]:
        scores = _field(found, "scores")
        if not isinstance(scores, dict) or scores.keys() != ranges.keys():
            raise UnreadableReply(f"must hold an object scores with the keys {', '.join(ranges)} and no others")
        return {name: _number(scores[name], f"scores.{name}", low, high) for name, (low, high) in ranges.items()}

    inner = _object({name: {"type": "number"} for name in ranges})
    shown = ", ".join(f'"{name}": a number from {low:g} to {high:g}' for name, (low, high) in ranges.items())
    return ReplyForm(_schema({"scores": inner}), f'{{"reason": "a few sentences", "scores": {{{shown}}}}}', read)


def winner_form() -> ReplyForm:
    """{"reason": ..., "winner": ...} -> one of WINNERS."""

    def read(found: dict[str, Any]) -> str:
        winner = _field(found, "winner")
        if winner not in WINNERS:
            raise UnreadableReply(f"must have as winner A, B or tie, it has {_shown(winner)}")
        return winner

    example = '{"reason": "one or two sentences", "winner": "A" or "B" or "tie"}'
    return ReplyForm(_schema({"winner": {"type": "string", "enum": list(WINNERS)}}), example, read)


def read_reply(text: str | None, form: ReplyForm, candidates: Iterable[str] = ()) -> tuple[Any, str | None]:
    """(value, the judge's reason if it gives one). Raises UnreadableReply.

    >>> read_reply('Sure! ```json\\n{"score": 0.8, "reason": "good",}\\n```', score_form(0, 1))
    (0.8, 'good')
    """
    if text is None or not text.strip():
        raise UnreadableReply("is empty")
    said = _without_thoughts(text)
    spans = _objects(said)
    if not spans:
        raise UnreadableReply("must hold a JSON object, it holds none")
    objects = [_parsed(span) for span in spans]
    values = [form.read(found) for found in objects]
    if any(value != values[0] for value in values):
        raise UnreadableReply(f"must hold one JSON object, it holds {len(values)} that differ")
    fence = FENCE.fullmatch(said)
    if (fence[1] if fence else said).strip() != spans[0]:
        wrote = [_squeezed(candidate) for candidate in candidates]
        if any(_squeezed(span) in candidate for span in spans for candidate in wrote):
            raise UnreadableReply("must be the JSON object alone, its only one stands in a candidate's text too")
    reason = objects[-1].get("reason")
    return values[-1], reason if isinstance(reason, str) and reason.strip() else None


def _without_thoughts(text: str) -> str:
    """Each ends where it first can: a candidate may have written </think> to have its own words taken for a verdict."""
    start = 0
    while thought := THOUGHT.match(text, start):
        start = thought.end()
    if UNENDED_THOUGHT.match(text, start):
        raise UnreadableReply("must end its thinking, it does not")
    return text[start:]


def _objects(text: str) -> list[str]:
    """Outermost objects. A brace that begins none must be prose, else a broken object's inner one would count."""
    spans, start = [], text.find("{")
    while start >= 0:
        end = _end_of_object(text, start)
        prose = PROSE_BRACES.match(text, start)
        if prose is not None:
            end = prose.end()
        elif end is None:
            raise UnreadableReply("must be valid JSON, its object never ends")
        else:
            spans.append(text[start:end])
        start = text.find("{", end)
    return spans


def _end_of_object(text: str, start: int) -> int | None:
    depth, is_text, index = 0, False, start
    while index < len(text):
        character = text[index]
        if is_text:
            index += character == "\\"
            is_text = character != '"'
        elif character == '"':
            is_text = True
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if not depth:
                return index + 1
        index += 1
    return None


def _parsed(span: str) -> dict[str, Any]:
    """Raises UnreadableReply, also for NaN and for a key that occurs twice."""
    lenient = COMMA_BEFORE_END.sub(lambda match: "" if match[0] == "," else match[0], span)
    try:
        return strict_json(lenient, allows_line_breaks=True)
    except RecursionError:
        raise UnreadableReply("must be valid JSON, it is nested too deep") from None
    except ValueError as error:
        raise UnreadableReply(f"must be valid JSON, it is not: {error}") from None


def _field(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise UnreadableReply(f"must hold the key {name}")
    return found[name]


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableReply(f"must hold a number as {name}, it holds {_shown(value)}")
    if not low <= value <= high:
        raise UnreadableReply(f"must hold a {name} from {low:g} to {high:g}, it holds {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 60)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _schema(verdict: dict[str, Any]) -> dict[str, Any]:
    return _object({"reason": {"type": "string"}, **verdict})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
