"""JSON documents: an array of objects, or one object that holds one list of objects.

The document is never parsed as a whole: brackets, commas and quotes tell where each element ends, and the element's
bytes then go the way of a line of JSON lines. So memory stays bounded, one broken row does not lose the others, and
rows are parsed in worker processes. Rows are elements counted from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from data_contracts.errors import ContractError
from data_contracts.formats.chunks import BYTES, ROWS, Chunk
from data_contracts.formats.json_rows import MAX_ROW_BYTES, UTF8_MARK, excerpt, parse_rows
from data_contracts.refs import SourceRow

TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
BETWEEN = rb'[^"\[\]{}]*+'
# A text, an object without brackets inside, a bracket, a comma; a quote alone opens a text that goes beyond the buffer.
TOKEN = re.compile(rb"%b|\{%b(?:%b%b)*+\}|[\[\]{},]|\"" % (TEXT, BETWEEN, TEXT, BETWEEN), re.DOTALL)
OPENING, CLOSING = (b"[", b"{"), (b"]", b"}")
ROW_LIST = "data"  # the list that is taken although there are others
# Lists of objects that belong to a row: a document with one of these is a row, not a list of rows.
FIELDS_OF_A_ROW = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected", "tools")
MEND = "a JSON document must be an array of objects or an object with one list of objects"


@dataclass(frozen=True)
class JsonElements:
    """Consecutive elements of a list, not parsed yet."""

    source: str
    first: int
    raws: tuple[bytes, ...]

    def rows(self) -> list[SourceRow]:
        return parse_rows(self.source, self.first, self.raws, b"\n".join(self.raws), skip_blank=False)

    def num_rows(self) -> int:
        return len(self.raws)


def read_json(source: str, blocks: Iterable[bytes]) -> Iterator[Chunk]:
    """Chunks of a document's rows. Raises ContractError for a document of another form, where it is met."""
    blocks = iter(blocks)
    start = next(blocks, b"").removeprefix(UTF8_MARK)
    text = _Text(source, chain([start], blocks))
    opening = text.next_byte()
    if opening == b"[":
        text.position += 1
        yield from _chunks(source, _elements(text))
    elif opening == b"{":
        text.position += 1
        yield from _lists_of_object(source, text)
    else:
        raise ContractError(f"{source} must begin with [ or {{, found {text.shown()}; {MEND}")
    if rest := text.next_byte():
        hint = "; one object a line is JSON lines: name it .jsonl" if rest == b"{" else ""
        kind = "list" if opening == b"[" else "object"
        raise ContractError(f"{source} must end with its {kind}, found more: {text.shown()}{hint}")


class _Text:
    """The part of a document in memory. `position` is where reading goes on; what lies before may be forgotten."""

    def __init__(self, source: str, blocks: Iterator[bytes]) -> None:
        self.source = source
        self.blocks = blocks
        self.buffer = b""
        self.position = 0

    def more(self, keep: int, needed: bytes = b"") -> bool:
        """Adds blocks up to one that holds `needed`, and forgets what lies before `keep`; false at the end."""
        blocks = [self.buffer[keep:]]
        length = len(blocks[0])
        self.position -= keep
        for block in self.blocks:
            blocks.append(block)
            length += len(block)
            if needed in block or length > MAX_ROW_BYTES + len(block):
                break
        self.buffer = b"".join(blocks)
        if len(blocks) == 1:
            return False
        if length - len(blocks[-1]) > MAX_ROW_BYTES:
            begins = excerpt(self.buffer[:200].decode(errors="replace"), 0)
            raise ContractError(
                f"a row of {self.source} has at most {MAX_ROW_BYTES} bytes, found a longer one or a quote that is "
                f"never closed; it begins {begins}"
            )
        return True

    def next_byte(self) -> bytes:
        """The next byte after white space, which is passed over; empty at the end."""
        while True:
            start = self.position
            while self.buffer[start : start + 1].isspace():
                start += 1
            self.position = start
            if start < len(self.buffer) or not self.more(start):
                return self.buffer[start : start + 1]

    def shown(self) -> str:
        return excerpt(self.buffer[self.position : self.position + 80].decode(errors="replace"), 0)


def _chunks(source: str, elements: Iterable[bytes]) -> Iterator[Chunk]:
    first, raws, size = 1, [], 0
    for raw in elements:
        raws.append(raw)
        size += len(raw)
        if size >= BYTES or len(raws) == ROWS:
            yield JsonElements(source, first, tuple(raws))
            first, raws, size = first + len(raws), [], 0
    if raws:
        yield JsonElements(source, first, tuple(raws))


def _elements(text: _Text) -> Iterator[bytes]:
    """The elements of the list whose bracket was just passed, stripped; ends behind its closing bracket.

    An element that is missing between commas is empty bytes. Raises ContractError where the document ends too early.
    """
    start, depth, is_first = text.position, 0, True
    while True:
        needed = b""
        for match in TOKEN.finditer(text.buffer, text.position):
            token = match[0]
            if token == b'"':
                text.position, needed = match.start(), token
                break
            text.position = match.end()
            if token in OPENING:
                depth += 1
            elif depth and token in CLOSING:
                depth -= 1
            elif not depth and (token == b"," or token in CLOSING):
                element = text.buffer[start : match.start()].strip()
                is_last = token != b","
                if element or not (is_first and is_last):
                    yield element
                if is_last:
                    return
                start, is_first = match.end(), False
        else:
            text.position = len(text.buffer)
        if not text.more(start, needed):
            raise _cut_off(text, text.buffer)
        start = 0


def _lists_of_object(source: str, text: _Text) -> Iterator[Chunk]:
    """Chunks of the one list of objects that an object holds."""
    taken: str | None = None
    names: list[str] = []
    while (name := _next_key(text)) is not None:
        if name in names:
            raise ContractError(f"the keys of {source} must differ, found {name!r} twice")
        names.append(name)
        depth = 0
        if text.next_byte() == b"[" and name not in FIELDS_OF_A_ROW:
            text.position += 1
            depth = 1
            if text.next_byte() == b"{" and taken != ROW_LIST:
                if taken is not None:
                    raise ContractError(f"{source} must hold one list of objects, found {taken!r} and {name!r}; {MEND}")
                taken = name
                yield from _chunks(source, _elements(text))
                continue
        _skip_value(text, depth)
    if taken is None:
        keys = ", ".join(names[:8]) or "no keys"
        raise ContractError(
            f"{source} must hold a list of objects, found an object with {keys}; {MEND} (one row alone: put it in a "
            "list; columns: write rows, with pandas by orient='records')"
        )


def _next_key(text: _Text) -> str | None:
    """The next key of the object at `position`, which goes behind its colon; null behind the object's end."""
    if text.next_byte() == b",":
        text.position += 1
    if text.next_byte() == b"}":
        text.position += 1
        return None
    begins = text.shown()
    token = _next_token(text) if text.next_byte() == b'"' else b""
    if text.next_byte() != b":" or len(token) < 2:
        raise ContractError(f"{text.source} must be JSON, found {begins} where a key must be")
    text.position += 1
    return token[1:-1].decode(errors="replace")


def _skip_value(text: _Text, depth: int) -> None:
    """Passes over a value, `depth` brackets of which are behind `position` already."""
    while depth or text.next_byte() not in (b",", b"}"):
        token = _next_token(text)
        if token in OPENING:
            depth += 1
        elif depth and token in CLOSING:
            depth -= 1
        elif not depth and token == b"]":
            raise ContractError(f"{text.source} must be JSON, found ] without its [")
        elif not depth and token in (b",", b"}"):
            text.position -= 1


def _next_token(text: _Text) -> bytes:
    while True:
        match = TOKEN.search(text.buffer, text.position)
        if match and match[0] != b'"':
            text.position = match.end()
            return match[0]
        text.position = match.start() if match else len(text.buffer)
        if not text.more(text.position, match[0] if match else b""):
            raise _cut_off(text, text.buffer)


def _cut_off(text: _Text, rest: bytes) -> ContractError:
    ending = excerpt(rest[-80:].decode(errors="replace"), 0)
    return ContractError(
        f"{text.source} must be a whole document, found its end too early, in {ending}; was it cut off?"
    )
