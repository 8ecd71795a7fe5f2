"""Runs of rows: their size, and how a stream of them ends early."""

from __future__ import annotations

import pytest

from data_contracts.formats.chunks import RowsChunk, chunks_of, take
from data_contracts.refs import SourceRow

ROWS = [SourceRow("s", number, {"n": number}, b"") for number in range(1, 8)]


def test_rows_in_chunks_of_a_size():
    chunks = list(chunks_of(iter(ROWS), 3))
    assert [chunk.num_rows() for chunk in chunks] == [3, 3, 1]
    assert [row for chunk in chunks for row in chunk.rows()] == ROWS
    assert {chunk.source for chunk in chunks} == {"s"}


@pytest.mark.parametrize("size", [None, 1, 2, 3, 5, 6, 7, 9])
def test_the_first_rows_are_taken(size):
    chunks = take(iter(chunks_of(iter(ROWS), 2)), size)
    assert [row for chunk in chunks for row in chunk.rows()] == ROWS[:size]


def test_no_chunk_is_read_beyond_the_size():
    def chunks():
        yield RowsChunk(tuple(ROWS[:2]))
        raise AssertionError("the first chunk had all that was asked for")

    assert [chunk.num_rows() for chunk in take(chunks(), 2)] == [2]


def test_a_reader_that_stops_early_ends_the_source():
    ended = []

    def rows():
        try:
            yield from ROWS
        finally:
            ended.append(True)

    chunks = chunks_of(rows(), 2)
    next(chunks)
    chunks.close()
    assert ended == [True]
