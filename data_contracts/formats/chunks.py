"""Runs of rows that travel to worker processes before they are parsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from data_contracts.refs import SourceRow

ROWS = 2000  # rows of a chunk at most, where they are counted as they come
BYTES = 1 << 19  # and bytes: about 2,000 rows of JSON; several times as much when parsed


class Chunk(Protocol):
    """Consecutive rows of one source. Small to pickle; `rows` does the parsing, in the process that calls it."""

    @property
    def source(self) -> str:
        """What its rows carry as their source."""

    def rows(self) -> list[SourceRow]: ...

    def num_rows(self) -> int:
        """Counts without parsing where that is cheaper."""


@dataclass(frozen=True)
class RowsChunk:
    """Rows that are parsed already; at least one."""

    parsed: tuple[SourceRow, ...]

    @property
    def source(self) -> str:
        return self.parsed[0].source

    def rows(self) -> list[SourceRow]:
        return list(self.parsed)

    def num_rows(self) -> int:
        return len(self.parsed)


def chunks_of(rows: Iterable[SourceRow], num_rows: int = ROWS) -> Iterator[RowsChunk]:
    """Rows in chunks of `num_rows`; what gives them is closed with this iterator."""
    rows = iter(rows)
    try:
        while taken := tuple(islice(rows, num_rows)):
            yield RowsChunk(taken)
    finally:
        if (close := getattr(rows, "close", None)) is not None:
            close()


def take(chunks: Iterator[Chunk], size: int | None) -> Iterator[Chunk]:
    """The chunks that hold the first `size` rows; null takes all. Reads no further than needed."""
    if size is None:
        yield from chunks
        return
    left = size
    for chunk in chunks:
        num_rows = chunk.num_rows()
        yield chunk if num_rows <= left else RowsChunk(tuple(chunk.rows()[:left]))
        left -= num_rows
        if left <= 0:
            return
