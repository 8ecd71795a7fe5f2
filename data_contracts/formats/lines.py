"""Physical lines of a text, in blocks that hold whole lines and fit in memory.

Lines end with LF or CRLF and count from 1, so that an editor jumps to what a report names. A byte-order mark at the
start of the text is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_contracts.formats.chunks import BYTES, Chunk, RowsChunk
from data_contracts.formats.json_rows import MAX_ROW_BYTES, UTF8_MARK
from data_contracts.refs import SourceRow


@dataclass(frozen=True)
class Lines:
    """Whole lines, the first of which is line `first` of its text. Only a text's last line may have no end."""

    first: int
    data: bytes

    def num_lines(self) -> int:
        return self.data.count(b"\n")

    def split(self) -> list[bytes]:
        """The lines without their ends."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return [line.rstrip(b"\r") for line in lines] if b"\r" in self.data else lines

    def split_off(self, num_lines: int) -> Lines:
        """What follows the first `num_lines` lines."""
        start = 0
        for _ in range(num_lines):
            start = self.data.find(b"\n", start) + 1 or len(self.data)
        return Lines(self.first + num_lines, self.data[start:])


@dataclass(frozen=True)
class LongLine:
    """A line of more than MAX_ROW_BYTES, of which only the beginning is kept."""

    number: int
    beginning: bytes
    length: int

    def num_lines(self) -> int:
        return 1


def read_lines(blocks: Iterable[bytes]) -> Iterator[Lines | LongLine]:
    """The lines of a text that comes in blocks of any size. At most one line and one block are in memory."""
    number = 1
    rest = b""
    blocks = iter(blocks)
    for block in blocks:
        rest = (rest + block).removeprefix(UTF8_MARK) if number == 1 else rest + block
        end = rest.rfind(b"\n") + 1
        for lines in _pieces(number, rest[:end]):
            number += lines.num_lines()
            yield lines
        rest = rest[end:]
        if len(rest) > MAX_ROW_BYTES:
            long, rest = _long_line(number, rest, blocks)
            number += 1
            yield long
    if rest:
        yield Lines(number, rest)


def _pieces(number: int, data: bytes) -> Iterator[Lines | LongLine]:
    """Pieces of about BYTES that end where lines do; a longer line is a piece of its own."""
    start = 0
    while start < len(data):
        is_last = len(data) - start < BYTES * 3 // 2
        end = len(data) if is_last else data.rfind(b"\n", start, start + BYTES) + 1
        if not end:
            end = data.index(b"\n", start) + 1
            if end - start - 1 > MAX_ROW_BYTES:
                yield LongLine(number, data[start : start + MAX_ROW_BYTES + 1], end - start - 1)
                number += 1
                start = end
                continue
        piece = Lines(number, data[start:end])
        number += piece.num_lines()
        start = end
        yield piece


def _long_line(number: int, rest: bytes, blocks: Iterator[bytes]) -> tuple[LongLine, bytes]:
    """Passes over the rest of a line; the line, and what follows it in the block where it ends."""
    beginning = rest[: MAX_ROW_BYTES + 1]
    length = len(rest)
    for block in blocks:
        end = block.find(b"\n")
        if end >= 0:
            return LongLine(number, beginning, length + end), block[end + 1 :]
        length += len(block)
    return LongLine(number, beginning, length), b""


def long_line_chunk(source: str, line: LongLine) -> Chunk:
    detail = (
        f"a line has at most {MAX_ROW_BYTES} bytes, found {line.length}; "
        f"only its beginning ({len(line.beginning)} bytes) is kept"
    )
    return RowsChunk((SourceRow(source, line.number, None, line.beginning, "line_too_long", detail),))
