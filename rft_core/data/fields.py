"""Which field of a file holds what: recognised by the names in use, overridden by the recipe, printed.

A name is a column, or a place in an object by dots (`reward_model.ground_truth`). Two spellings stand for several:

    instruction + input             texts joined by a line break, empty ones left out; a list of [user, assistant] pairs
                                    in front (Alpaca's history) becomes earlier messages
    score_chosen - score_rejected   a margin

A column that is literally named so comes first. Names are compared without case, and - and space are the same as _.
What no field of ours takes stays in the metadata as it is: so do ids, the scores of a margin, and an object of which
one member is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, get_args

from rft_core.data.field_names import ALWAYS_OPTIONAL, FIELDS, SHAPES
from rft_core.data.messages import list_of_text, messages_of_text
from rft_core.data.settings import FieldName, RecordName
from rft_core.errors import ContractError

JOIN, MINUS = " + ", " - "
NUM_SHOWN_NAMES = 20
# A rarer candidate of higher priority gives way to one that is filled in more than twice as many rows.
MIN_FILL = 0.5
_MESSAGES = frozenset({"prompt", "completion", "messages", "chosen", "rejected"})
_LISTS = frozenset({"steps", "step_labels", "turn_rewards", "tools"})
_KEPT = frozenset({"id"})


@dataclass(frozen=True)
class Recognised:
    """Our names -> the file's, and lines to print on how they were found. Picklable.

    Recognised({"prompt": "question", "answer": "reward_model.ground_truth"}, ("prompt <- question", ...))
    """

    names: dict[FieldName, str]
    notes: tuple[str, ...]

    @cached_property
    def taken(self) -> frozenset[str]:
        """Columns that don't go into the metadata."""
        return frozenset(name for field, name in self.names.items() if field not in _KEPT)

    @cached_property
    def joins(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """Names that stand for several columns, with those."""
        return tuple((name, frozenset(name.split(JOIN))) for name in self.names.values() if JOIN in name)


def map_fields(value: dict[str, Any], recognised: Recognised) -> dict[str, Any]:
    """The row under our names, those that it has, and `metadata`: the rest as it is.

    A text that spells a list in JSON (a cell of a CSV file) is that list where a list, or messages, may stand. A row of
    pairs that lacks the file's prompt gets null there: without a prompt the sides would be searched for one.
    """
    names = recognised.names
    mapped: dict[str, Any] = {}
    for field, name in names.items():
        found = value[name] if name in value else _found(value, name)
        if found is _ABSENT:
            continue
        if type(found) is str and found[:1] == "[":
            if field in _MESSAGES:
                found = messages_of_text(found) or found
            elif field in _LISTS:
                spelled = list_of_text(found)
                found = found if spelled is None else spelled
        mapped[field] = found
    if "chosen" in names and "prompt" in names:
        mapped.setdefault("prompt", None)
    taken = recognised.taken
    for name, parts in recognised.joins:
        if name not in value:
            taken |= parts
    mapped["metadata"] = {name: item for name, item in value.items() if name not in taken}
    return mapped


def recognise(values: list[dict[str, Any]], record: RecordName, overrides: dict[FieldName, str]) -> Recognised:
    """The fields of a file by its first rows, about a thousand; an override with an empty name leaves a field out.

    Raises ContractError when an override names what no row has, or a needed field is nowhere.
    """
    fields = FIELDS[record]
    for field in overrides:
        if field not in fields:
            raise ContractError(f"data.fields may name {', '.join(fields)} of record {record}, found {field}")
    if not values:
        return Recognised({}, ("no row could be read, so no field is recognised",))
    columns = _Columns(values)
    given = {field: columns.checked(field, name) for field, name in overrides.items() if name}
    left_out = {field for field, name in overrides.items() if not name}
    # Where no values suit, the names of what is needed decide, and each row says what is wrong with its value.
    for is_strict, (needed, optional) in product((True, False), SHAPES[record]):
        shape = [field for field in (*needed, *optional, *ALWAYS_OPTIONAL) if field not in left_out]
        if not given.keys() <= set(shape) or not set(needed) <= set(shape):
            continue
        names, also = _assigned(columns, fields, shape, given, unasked=() if is_strict else needed)
        if names.keys() >= set(needed):
            return Recognised(names, tuple(_notes(columns, names, also, overrides)))
    raise ContractError(_nowhere(columns, record))


def _assigned(
    columns: _Columns,
    fields: dict[FieldName, tuple[str, ...]],
    shape: list[FieldName],
    given: dict[FieldName, str],
    unasked: tuple[FieldName, ...] = (),
) -> tuple[dict[FieldName, str], dict[FieldName, list[str]]]:
    """Names of the fields that the file has, in the order of the shape, and the other candidates of each. Values of the
    fields `unasked` need not suit."""
    names: dict[FieldName, str] = {}
    also: dict[FieldName, list[str]] = {}
    taken = {part for name in given.values() for part in _parts(name)}
    for field in shape:
        if field in given:
            names[field] = given[field]
            continue
        found = [name for name in map(columns.resolved, fields[field]) if name and taken.isdisjoint(_parts(name))]
        found = [name for name in dict.fromkeys(found) if field in unasked or _suits(columns, field, name)]
        if not found:
            continue
        most = max(columns.filled(name) for name in found)
        names[field] = next(name for name in found if columns.filled(name) >= MIN_FILL * most)
        also[field] = [name for name in found if name != names[field]]
        taken.update(_parts(names[field]))
    return names, also


def _notes(
    columns: _Columns,
    names: dict[FieldName, str],
    also: dict[FieldName, list[str]],
    overrides: dict[FieldName, str],
) -> Iterator[str]:
    taken = {part for name in names.values() for part in _parts(name)}
    for field, name in names.items():
        line = f"{field} <- {name}"
        if field in overrides:
            line += " (data.fields)"
        if others := [other for other in also.get(field, ()) if taken.isdisjoint(_parts(other))]:
            line += f" (not {', '.join(others)}, also there: data.fields.{field} would choose)"
        if (filled := columns.filled(name)) < len(columns.rows):
            line += f" (null or missing in {len(columns.rows) - filled} of the first {len(columns.rows)} rows)"
        yield line
    if rest := map_fields(dict.fromkeys(columns.names), Recognised(names, ()))["metadata"]:
        yield f"metadata <- {_listed(rest)}"


def _nowhere(columns: _Columns, record: RecordName) -> str:
    """What is needed, what is there, and how to go on."""
    needs = " or ".join(" and ".join(needed) for needed, _ in SHAPES[record])
    needed = dict.fromkeys(field for shape, _ in SHAPES[record] for field in shape)
    known = "; ".join(f"{field}: {', '.join(FIELDS[record][field])}" for field in needed)
    fitting = [
        other
        for other in get_args(RecordName)
        if any(_assigned(columns, FIELDS[other], list(shape), {})[0].keys() == set(shape) for shape, _ in SHAPES[other])
    ]
    advice = f" The fields fit record {' or '.join(fitting)}." if fitting else ""
    return (
        f"record {record} needs {needs}; found the fields {_listed(columns.names)} in the first {len(columns.rows)} "
        f"rows.{advice} Known names are {known}. Name others in data.fields, e.g. {{{next(iter(needed))}: NAME}}"
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NUM_SHOWN_NAMES} more" if len(names) > NUM_SHOWN_NAMES else ""
    return ", ".join(names[:NUM_SHOWN_NAMES]) + more if names else "none"


class _Columns:
    """The fields of some rows: which there are, and how many rows fill them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.names = list(dict.fromkeys(name for row in rows for name in row))
        self._by_fold = {_fold(name): name for name in reversed(self.names)}
        self._filled: dict[str, int] = {}

    def values(self, name: str) -> list[Any]:
        """What is found under a name, without nulls."""
        found = (row[name] if name in row else _found(row, name) for row in self.rows)
        return [value for value in found if value is not None and value is not _ABSENT]

    def filled(self, name: str) -> int:
        if name not in self._filled:
            self._filled[name] = len(self.values(name))
        return self._filled[name]

    def resolved(self, candidate: str) -> str | None:
        """The file's own spelling of a name in use; null where the file has no such field."""
        if candidate in self.names:
            return candidate
        for mark in (JOIN, MINUS):
            if mark in candidate:
                parts = [self.resolved(part) for part in candidate.split(mark)]
                return mark.join(part for part in parts if part) if all(parts) else None
        if "." in candidate:
            head = self._by_fold.get(_fold(candidate.partition(".")[0]))
            name = f"{head}.{candidate.partition('.')[2]}"
            return name if head is not None and self._has(name) else None
        return self._by_fold.get(_fold(candidate))

    def checked(self, field: FieldName, name: str) -> str:
        """The name that the recipe gives. Raises ContractError when no row has it."""
        if not self._has(name):
            raise ContractError(
                f"data.fields.{field} must name a field of the file, found none named {name!r} in the first "
                f"{len(self.rows)} rows; there are {_listed(self.names)}"
            )
        return name

    def _has(self, name: str) -> bool:
        if name in self.names:
            return True
        for mark in (JOIN, MINUS):
            if mark in name:
                return all(self._has(part) for part in name.split(mark))
        return any(_place(row, name) is not _ABSENT for row in self.rows)


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _parts(name: str) -> set[str]:
    """The places that a name stands for."""
    return {name, *name.split(JOIN), *name.split(MINUS)}


class _Absent:
    """Stands for a field that a row lacks, as null is a value."""


_ABSENT: Any = _Absent()


def _found(value: dict[str, Any], name: str) -> Any:
    """What a row has under a name that is no column of it, `_ABSENT` where nothing."""
    if JOIN in name:
        return _joined([_place(value, part) for part in name.split(JOIN)])
    if MINUS in name:
        return _difference([_place(value, part) for part in name.split(MINUS)])
    return _place(value, name)


def _place(value: Any, name: str) -> Any:
    if name in value:
        return value[name]
    head, dot, tail = name.partition(".")
    inner = value.get(head) if dot else None
    return _place(inner, tail) if isinstance(inner, dict) else _ABSENT


def _joined(found: list[Any]) -> Any:
    if all(item is _ABSENT for item in found):
        return _ABSENT
    history, *texts = found if isinstance(found[0], list) else [[], *found]
    texts = [text for text in texts if text not in (None, "", _ABSENT)]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        return wrong[0]
    joined = "\n".join(texts) if texts else None
    if not history:
        return joined
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        return history
    said = [message for turn in history for message in zip(("user", "assistant"), turn, strict=True)]
    return [{"role": role, "content": text} for role, text in (*said, ("user", joined))]


def _difference(found: list[Any]) -> Any:
    """Of numbers, or texts that spell them; null where one is null, and what is no number is left for its reader."""
    if all(item is _ABSENT for item in found):
        return _ABSENT
    numbers: list[float] = []
    for item in found:
        if item is None or item is _ABSENT:
            return None
        try:
            numbers.append(float(item))
        except (TypeError, ValueError, OverflowError):
            return item
        if isinstance(item, bool):
            return item
    return numbers[0] - sum(numbers[1:])


def _suits(columns: _Columns, field: FieldName, name: str) -> bool:
    """Whether the values under a name can be such a field; the recipe's own choice is not asked."""
    values = columns.values(name)
    if field == "id":
        is_given = _fold(name) == "id"
        are_ids = all(isinstance(value, str | int) and not isinstance(value, bool) for value in values)
        return is_given or (bool(values) and are_ids and len(set(map(str, values))) == len(values))
    if field in ("messages", "steps", "step_labels", "turn_rewards"):
        return not values or any(_is_list(value) for value in values)
    if field in ("label", "reward"):
        return not any(isinstance(value, list) for value in values)
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value[:1] == "[" and list_of_text(value) is not None)
