"""Operators of `data.cleaning` on single rows, in the order of the recipe. What compares rows is in `near_duplicates`
and `dataset`.

A row is a dict of our field names; its texts are strings, or the contents of messages (`content`, or ShareGPT's
`value`; parts of a content under `text`). A conversation's assistant turns are completion, its other turns prompt.
Values of other kinds pass untouched: reading the row names them.
"""

from __future__ import annotations

import copy
import difflib
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from data_contracts.refs import SourceRow
from data_contracts.schemas import canonical_json
from rft_core.data.examples import Content
from rft_core.data.faults import Rejected
from rft_core.data.messages import ROLES
from rft_core.data.settings import CleaningOperator, DataSettings, FieldName
from rft_core.errors import CleaningFunctionError, SettingsError
from rft_core.rewards.plugin import Plugin, load_plugin
from rft_core.rewards.rows import shortened
from rft_core.rewards.user_state import USER_STATE

Row = dict[str, Any]
Operator = Callable[[Row], Row]

# Measured on sentences of eight languages, cut at every length: from 20 bytes of letters (20 Latin letters, 7 Chinese
# characters) and a confidence of a half, 0.2 % of the wanted rows are dropped and 93 % of the others; below that length
# one wanted row in sixty would be.
MIN_LETTER_BYTES = 20
MIN_CONFIDENCE = 0.5
LANGUAGE_CHARACTERS = 2000  # looked at; more costs time (half a microsecond each) and settles nothing

PROMPT, COMPLETION, BY_ROLE = "prompt", "completion", "by_role"
SIDES: dict[str, str] = {
    "system": PROMPT,
    "prompt": PROMPT,
    "messages": BY_ROLE,
    "text": COMPLETION,
    "completion": COMPLETION,
    "chosen": BY_ROLE,
    "rejected": BY_ROLE,
    "steps": COMPLETION,
}
TEXT_KEYS = ("content", "value", "text")  # of a message, or of a part of its content
ROW_FIELDS = (*get_args(FieldName), "metadata")


@dataclass(frozen=True)
class RowOperator:
    """An operator made ready; it adds the rows that it changes or drops to `operations`."""

    label: str
    apply: Operator
    operations: Counter[str]

    def __call__(self, mapped: Row) -> Row:
        """The row, a new dict where it changed. Raises Rejected for a row that is dropped."""
        try:
            cleaned = self.apply(mapped)
        except Rejected:
            self.operations[f"{self.label} dropped"] += 1
            raise
        if cleaned is not mapped and cleaned != mapped:
            self.operations[f"{self.label} changed"] += 1
        return cleaned


def row_operators(settings: DataSettings, folder: Path | None, operations: Counter[str]) -> list[RowOperator]:
    """The operators of single rows, to be built once per process. Relative paths of functions start at `folder`.

    `operations` counts rows under "1. unicode changed", "3. length dropped": the operator's place in the recipe, its
    name and what it did. Counters of several processes can be added. Raises SettingsError or CleaningFunctionError.
    """
    return [
        RowOperator(f"{place}. {operator.name}", OPERATORS[operator.name](operator, folder), operations)
        for place, operator in enumerate(settings.cleaning, start=1)
        if operator.name in OPERATORS
    ]


def clean(operators: Iterable[RowOperator], mapped: Row, row: SourceRow) -> Row:
    """A row after all operators. Raises Rejected, and CleaningFunctionError that says which row of which source."""
    try:
        for operator in operators:
            mapped = operator(mapped)
    except CleaningFunctionError as error:
        raise CleaningFunctionError(f"{row.source} row {row.row}: {error}") from error
    return mapped


def users_code(settings: DataSettings) -> AbstractContextManager[None]:
    """Around the cleaning of many rows: what users' functions set for the process holds for them alone. To enter and
    leave takes 0.2 ms, so not around each row."""
    has_functions = any(operator.name == "custom" for operator in settings.cleaning)
    return USER_STATE.entered() if has_functions else nullcontext()


def cleaning_identity(settings: DataSettings, folder: Path | None) -> dict[str, Any]:
    """What decides the outcome besides the settings: the code of users' functions, by their place in the recipe."""
    return {
        str(place): _plugin(operator, folder).identity
        for place, operator in enumerate(settings.cleaning, start=1)
        if operator.name == "custom"
    }


def content_text(content: Content, on: str = "both") -> str:
    """The texts of a row's content (those of one side, where `on` says so), a line break between them."""
    return "\n".join(_texts(content.parts, on))


def unicode_form(operator: CleaningOperator, folder: Path | None) -> Operator:
    """All texts, and the answer with the completion: both are compared with what the policy writes."""
    sides = {**SIDES, "answer": COMPLETION}
    return lambda mapped: _with_texts(
        mapped, operator.on, lambda text: unicodedata.normalize(operator.form, text), sides
    )


def strip(operator: CleaningOperator, folder: Path | None) -> Operator:
    """White space at both ends of every text; of a conversation, of every message."""
    return lambda mapped: _with_texts(mapped, operator.on, str.strip)


def length(operator: CleaningOperator, folder: Path | None) -> Operator:
    """By the characters of all texts together; a pair is judged with either side. A row without texts stays."""
    low, high = operator.min_characters, operator.max_characters

    def apply(mapped: Row) -> Row:
        sizes = [sum(map(len, texts)) for texts in _alternatives(mapped, operator.on) if texts]
        what = "prompt and completion" if operator.on == "both" else operator.on
        if low is not None and sizes and min(sizes) < low:
            raise Rejected("too_short", f"{what} must have at least {low} characters, found {min(sizes)}")
        if high is not None and sizes and max(sizes) > high:
            raise Rejected("too_many_characters", f"{what} must have at most {high} characters, found {max(sizes)}")
        return mapped

    return apply


def language(operator: CleaningOperator, folder: Path | None) -> Operator:
    """Drops a row whose texts are surely of another language; one with few letters, or in doubt, stays.

    Raises SettingsError for a code that is not known.
    """
    identifier = _language_identifier()
    known = identifier.labels
    for code in operator.languages:
        if code not in known:
            near = difflib.get_close_matches(code, known, n=3, cutoff=0.3)
            raise SettingsError(
                f"languages of cleaning operator language must be ISO 639 codes that it knows, got {code!r}; "
                f"{'near ones: ' + ', '.join(near) if near else 'it knows ' + ', '.join(sorted(known))}"
            )
    wanted = frozenset(operator.languages)

    def apply(mapped: Row) -> Row:
        text = "\n".join(_texts(mapped, operator.on))[:LANGUAGE_CHARACTERS]
        letters = "".join(filter(str.isalpha, text))
        if len(letters.encode(errors="replace")) < MIN_LETTER_BYTES:
            return mapped
        found, confidence = identifier.classify(text)
        if found not in wanted and confidence >= MIN_CONFIDENCE:
            raise Rejected(
                "wrong_language",
                f"texts must be in {' or '.join(sorted(wanted))}, found {found} (confidence {confidence:.2f})",
            )
        return mapped

    return apply


def custom(operator: CleaningOperator, folder: Path | None) -> Operator:
    """A user's function: one row (its own copy) -> the row, changed or not, or null to drop it."""
    function = _plugin(operator, folder).function
    name = f"cleaning function {operator.path}"

    def apply(mapped: Row) -> Row:
        try:
            given = function(copy.deepcopy(mapped))
            cleaned = None if given is None else _checked_row(given)
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, _BadRow) else f"it raised {type(error).__name__}: {error}"
            raise CleaningFunctionError(
                f"{name}: {shortened(said)}; it was given {shortened(repr(mapped), 200)}"
            ) from error
        if cleaned is None:
            raise Rejected("dropped_by_function", f"{name} gave null")
        return cleaned

    return apply


class _BadRow(ValueError):
    """What a user's function gave is no row."""


def _checked_row(given: Any) -> Row:
    """The row as plain JSON values of its own. Raises _BadRow."""
    if not isinstance(given, dict):
        raise _BadRow(f"it must give a dict or None, got {shortened(repr(given), 80)} ({type(given).__name__})")
    unknown = [key for key in given if key not in ROW_FIELDS]
    if unknown:
        raise _BadRow(
            f"the row that it gives must have fields among {', '.join(ROW_FIELDS)}, got {unknown[0]!r}; "
            "put what is your own under metadata"
        )
    try:
        return json.loads(canonical_json(given))
    except (TypeError, ValueError) as error:
        raise _BadRow(f"the row that it gives must hold JSON values, found otherwise: {error}") from error


def _plugin(operator: CleaningOperator, folder: Path | None) -> Plugin:
    return load_plugin(operator.path or "", folder, [], "cleaning")


@cache
def _language_identifier() -> Any:
    """100 MB and two seconds: once per process, when a recipe asks for it."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _texts(fields: Mapping[str, Any], on: str) -> list[str]:
    """All texts of the sides that `on` says, in the order of SIDES."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for name, side in SIDES.items():
        if name in fields:
            _changed(fields[name], side, on, note)
    return found


def _alternatives(mapped: Row, on: str) -> list[list[str]]:
    """The texts of a row; of a pair, those with its chosen and those with its rejected side."""
    if "chosen" not in mapped or "rejected" not in mapped:
        return [_texts(mapped, on)]
    return [
        _texts({name: value for name, value in mapped.items() if name != other}, on) for other in ("rejected", "chosen")
    ]


def _with_texts(mapped: Row, on: str, change: Callable[[str], str], sides: Mapping[str, str] = SIDES) -> Row:
    """The row with its texts changed; the same object where none did."""
    changes = {}
    for name, side in sides.items():
        if name in mapped:
            value = _changed(mapped[name], side, on, change)
            if value is not mapped[name]:
                changes[name] = value
    return {**mapped, **changes} if changes else mapped


def _changed(value: Any, side: str, on: str, change: Callable[[str], str]) -> Any:
    """A text, a list of texts or messages, a message, or a part of its content; the same object where nothing did."""
    if isinstance(value, str):
        if on not in ("both", COMPLETION if side == BY_ROLE else side):
            return value
        changed = change(value)
        return value if changed == value else changed
    if isinstance(value, list):
        items = [_changed(item, side, on, change) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        if side == BY_ROLE:
            role = value.get("role", value.get("from"))
            is_assistant = isinstance(role, str) and ROLES.get(role.strip().lower()) == "assistant"
            side = COMPLETION if is_assistant else PROMPT
        inner = {key: _changed(value[key], side, on, change) for key in TEXT_KEYS if key in value}
        return {**value, **inner} if any(new is not value[key] for key, new in inner.items()) else value
    return value


OPERATORS: dict[str, Callable[[CleaningOperator, Path | None], Operator]] = {
    "unicode": unicode_form,
    "strip": strip,
    "length": length,
    "language": language,
    "custom": custom,
}
