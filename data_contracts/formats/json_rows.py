"""One JSON object of UTF-8 bytes -> a row: its value, or the reason why it has none.

Rows go through orjson. It takes what JSON allows in doubtful cases (of repeated keys the last, integers beyond 64 bits
as floats, escaped NUL characters) and can't name a fault as people would; so whatever it refuses, and whatever might
hold one of those cases, is read again by the standard library's parser with hooks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Never

import orjson

from data_contracts.refs import SourceRow

MAX_ROW_BYTES = 16 << 20  # a file without line ends must not fill memory
MAX_DEPTH = 253  # what orjson writes inside a list
MAX_EXCERPT_CHARACTERS = 80
UTF8_MARK = b"\xef\xbb\xbf"
DOUBTFUL_ESCAPES = (b"\\u0000", b"\\u003a", b"\\u003A")  # NUL, and the colon
LONG_NUMBER = b"0" * 19  # as many digits as an integer of 64 bits may have, or more
DIGITS_ALONE = bytes(0x30 if chr(byte).isdigit() and byte < 0x80 else 0x20 for byte in range(256))
# A comma that ends an object or list, or a text, which is passed over.
TRAILING_COMMA = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|,(?=[ \t\r\n]*[}\]])', re.DOTALL)
BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RowFault(ValueError):
    """Why bytes are not a row: a reason code, words for people, and what the row says when mended (null: it can't)."""

    def __init__(self, reason: str, detail: str, mended: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.mended = mended


def parse_rows(source: str, first: int, raws: Sequence[bytes], text: bytes, skip_blank: bool) -> list[SourceRow]:
    """The rows that `raws` hold, numbered from `first`. `text` is all of them, with white space between them.

    Blank ones are left out with `skip_blank` (they count as lines), else they are faults.
    """
    values = [_quickly_parsed(raw) for raw in raws]
    is_plain = not _is_doubtful(text, raws, values)
    rows = []
    for number, raw, value in zip(count(first), raws, values, strict=False):
        if type(value) is dict and (is_plain or not _is_doubtful(raw, (raw,), [value])):
            rows.append(SourceRow(source, number, value, raw))
        elif not skip_blank or raw.strip():
            rows.append(parse_row(source, number, raw))
    return rows


def parse_row(source: str, number: int, raw: bytes) -> SourceRow:
    """The row, read slowly: every fault is named."""
    try:
        return SourceRow(source, number, _parsed(raw), raw)
    except RowFault as fault:
        return SourceRow(source, number, None, raw, fault.reason, str(fault), fault.mended)


def parse_value(text: str) -> Any:
    """Any JSON value. Raises RowFault; halves of surrogate pairs and NUL characters are left for `mend_texts`."""
    raw = text.encode()
    value = _quickly_parsed(raw)
    if value is not None and not _is_doubtful(raw, (raw,), [value]):
        return value
    try:
        return _loaded(text)
    except json.JSONDecodeError as error:
        raise RowFault("not_json", f"{error.msg} at column {error.colno}: {excerpt(text, error.pos)}") from None


def _quickly_parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _is_doubtful(text: bytes, raws: Sequence[bytes], values: list[Any]) -> bool:
    """Whether orjson's values may differ from what a careful reader would say.

    Colons tell of repeated keys: there is one to each key and those inside texts. Written again, the values have fewer
    than the raw rows exactly when a key was dropped, unless a raw row spells a colon as an escape.
    """
    if b"\\u00" in text and any(escape in text for escape in DOUBTFUL_ESCAPES):
        return True
    if LONG_NUMBER in text.translate(DIGITS_ALONE):
        return True
    try:
        written = orjson.dumps(values)
    except TypeError:  # nested too deeply
        return True
    colons = text.count(b":")
    if None in values:
        colons -= sum(raw.count(b":") for raw, value in zip(raws, values, strict=True) if value is None)
    return colons != written.count(b":")


def _parsed(raw: bytes) -> dict[str, Any]:
    """Raises RowFault. Files joined by `cat` have byte-order marks on inner lines; they are no part of the data."""
    data = raw.removeprefix(UTF8_MARK)
    mends: list[tuple[str, str]] = []
    if b"\x00" in data:
        found = f"found {data.count(0)}; was the file cut off by a crash?"
        mends.append(("nul_byte", f"text holds no NUL bytes, {found}"))
        data = data.replace(b"\x00", b"")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise RowFault("invalid_utf8", f"the file must be UTF-8, found {found}") from None
    try:
        value = _loaded(text)
    except json.JSONDecodeError as error:
        value = _without_trailing_commas(text, error, mends)
    if not isinstance(value, dict):
        raise RowFault("not_an_object", f"a row must be a JSON object, found {kind_of(value)}: {excerpt(text, 0)}")
    if "\\u" in text:
        value = mend_texts(value, mends)
    return checked(value, mends)


def _without_trailing_commas(text: str, error: json.JSONDecodeError, mends: list[tuple[str, str]]) -> Any:
    found = f"at column {error.colno}: {excerpt(text, error.pos)}"
    mended = TRAILING_COMMA.sub(lambda match: "" if match[0] == "," else match[0], text)
    try:
        value = _loaded(mended) if mended != text else None
    except json.JSONDecodeError:
        value = None
    if value is None:
        also = "".join(f"; {detail}" for _, detail in mends)
        raise RowFault("not_json", f"{error.msg} {found}{also}")
    mends.append(("trailing_comma", f"the last item of an object or list has no comma after it; {found}"))
    return value


def _loaded(text: str) -> Any:
    """Raises JSONDecodeError where it is not JSON, RowFault for JSON that is no row."""
    if _depth(text) > MAX_DEPTH:
        raise RowFault("not_json", f"nested too deeply: objects and lists have at most {MAX_DEPTH} levels")
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object_without_repeats
        )
    except (json.JSONDecodeError, RowFault):
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise RowFault("not_json", str(error)) from None


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in BRACKETS.finditer(text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def mend_texts(value: dict[str, Any], mends: list[tuple[str, str]]) -> dict[str, Any]:
    """The object without what no text may hold; what was found is added to `mends`. Raises RowFault when two keys
    become the same.

    >>> mends = []
    >>> mend_texts({"a": ["x\\x00y"]}, mends), mends[0][0]
    ({'a': ['xy']}, 'nul_byte')
    """
    found: dict[str, str] = {}

    def mend(text: str) -> str:
        if "\x00" in text:
            found["nul_byte"] = "text holds no NUL characters, found \\u0000"
            text = text.replace("\x00", "")
        if lone := LONE_SURROGATE.search(text):
            found["lone_surrogate"] = (
                f"text must be valid Unicode, found half of a surrogate pair: \\u{ord(lone[0]):04x}"
            )
            text = LONE_SURROGATE.sub("\ufffd", text)
        return text

    mended: dict[str, Any] = _with_texts(value, mend)
    mends.extend(found.items())
    return mended


def checked(value: dict[str, Any], mends: list[tuple[str, str]]) -> dict[str, Any]:
    """The value when nothing had to be mended, else raises RowFault with it. Reasons have policies of their own, so a
    row that needs two mends has neither: it would be used although one of them may be to reject.
    """
    if not mends:
        return value
    if len(mends) > 1:
        details = "; ".join(f"{reason}: {detail}" for reason, detail in mends)
        raise RowFault("not_json", f"more than one fault, {details}")
    [(reason, detail)] = mends
    raise RowFault(reason, detail, value)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return _object_without_repeats([(change(key), _with_texts(item, change)) for key, item in value.items()])
    return value


def _refuse_constant(name: str) -> Never:
    raise RowFault("not_json", f"{name} is not JSON; use null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RowFault("not_json", f"numbers must fit a double, found {text}")
    return value


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowFault("repeated_key", f"keys of an object must differ, found {twice!r} twice")
    return value


def excerpt(text: str, position: int) -> str:
    """The text around a position, quoted and escaped."""
    start = max(0, position - MAX_EXCERPT_CHARACTERS // 2)
    return repr(text[start : start + MAX_EXCERPT_CHARACTERS])


def kind_of(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
