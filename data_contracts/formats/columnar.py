"""Parquet and Arrow files, batch by batch: a row group or record batch of any size is never in memory as a whole,
unless it is a batch of an Arrow file that is compressed or lies elsewhere, which has no smaller part.

Files of a glob are read with the schema that each has: a column that one file lacks is absent from its rows, and types
are not made equal. Rows count from 1 in each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats.chunks import ROWS, Chunk
from data_contracts.formats.json_rows import RowFault, checked, mend_texts
from data_contracts.formats.plain_values import check_columns, plain_columns
from data_contracts.formats.streams import BLOCK_BYTES, is_url, local_path, open_file, reaching
from data_contracts.refs import SourceRow

BATCH_BYTES = 1 << 20
NUM_PROBED = 16  # rows from whose size the number of rows in a batch is taken


@dataclass(frozen=True)
class ArrowRows:
    """Consecutive rows as an Arrow stream of one batch; conversion to Python values is what takes the time."""

    source: str
    first: int
    stream: bytes
    length: int

    def rows(self) -> list[SourceRow]:
        with pa.ipc.open_stream(self.stream) as reader:
            batch = reader.read_next_batch()
        try:
            return _rows(self.source, self.first, batch)
        except UnicodeDecodeError:
            single = (batch.slice(index, 1) for index in range(batch.num_rows))
            return [
                _row_of_text(self.source, number, row) for number, row in zip(count(self.first), single, strict=False)
            ]

    def num_rows(self) -> int:
        return self.length


def read_columnar(path: str, source: str, first: int = 1) -> Iterator[Chunk]:
    """Chunks of a file's rows, numbered from `first`."""
    for batch in _batches(path, source):
        for chunk in batch_chunks(source, first, batch):
            first += chunk.length
            yield chunk


def columns_notes(path: str, source: str) -> list[str]:
    """Notes on columns whose values change their form. Raises ContractError for columns that can't be read."""
    with open_columnar(path, source) as (schema, _):
        return check_columns(schema, source)


def batch_chunks(source: str, first: int, batch: pa.RecordBatch) -> Iterator[ArrowRows]:
    """A batch in pieces of at most ROWS rows and about BATCH_BYTES."""
    num_rows = _num_rows(batch)
    for start in range(0, batch.num_rows, num_rows):
        piece = _decoded(batch.slice(start, num_rows))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write_batch(piece)
        yield ArrowRows(source, first + start, sink.getvalue().to_pybytes(), piece.num_rows)


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dictionaries belong to a whole file; a chunk carries the values that it uses."""
    columns = [array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array for array in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _num_rows(batch: pa.RecordBatch) -> int:
    """Rows of this size that fit a chunk."""
    bytes_per_row = max(1, batch.nbytes // max(1, batch.num_rows))
    return max(1, min(ROWS, BATCH_BYTES // bytes_per_row))


def _rows(source: str, first: int, batch: pa.RecordBatch) -> list[SourceRow]:
    columns, faults = plain_columns(batch)
    names = list(columns)
    cells = zip(*columns.values(), strict=True) if names else ((),) * batch.num_rows
    rows = []
    for index, values in enumerate(cells):
        value = dict(zip(names, values, strict=True))
        raw = _written(value)
        fault = faults.get(index)
        if fault is None and (b"\\u0000" in raw or b"\\ud" in raw):
            fault = _text_fault(value)
        if fault is None:
            rows.append(SourceRow(source, first + index, value, raw))
        else:
            rows.append(SourceRow(source, first + index, None, raw, fault.reason, str(fault), fault.mended))
    return rows


def _written(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits, half of a surrogate pair, deep nesting
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _text_fault(value: dict[str, Any]) -> RowFault | None:
    """The fault of a row that may hold NUL characters or half of a surrogate pair, or only spell their escapes."""
    mends: list[tuple[str, str]] = []
    try:
        checked(mend_texts(value, mends), mends)
    except RowFault as fault:
        return fault
    return None


def _row_of_text(source: str, number: int, batch: pa.RecordBatch) -> SourceRow:
    try:
        return _rows(source, number, batch)[0]
    except UnicodeDecodeError as error:
        raw = json.dumps(_cells_as_bytes(batch), default=repr).encode()
        found = f"{error.object[error.start : error.start + 1]!r} at offset {error.start} of a text"
        return SourceRow(source, number, None, raw, "invalid_utf8", f"text must be UTF-8, found {found}")


def _cells_as_bytes(batch: pa.RecordBatch) -> dict[str, Any]:
    """Texts of a row as bytes, for a reader to look at; other columns by their type alone."""
    return {
        name: array.cast(pa.large_binary()).to_pylist()[0]
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        else str(array.type)
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    }


def _batches(path: str, source: str) -> Iterator[pa.RecordBatch]:
    with open_columnar(path, source) as (schema, batches):
        check_columns(schema, source)
        yield from batches


@contextmanager
def open_columnar(path: str, source: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """The schema of a Parquet or Arrow file and its batches. Raises ContractError where it is damaged."""
    with open_file(path) as file, reaching(path), _whole(path):
        start = file.read(8)
        file.seek(0)
        if start.startswith(b"PAR1"):
            yield _open_parquet(file)
        elif is_url(path):
            yield _open_arrow(pa.PythonFile(file, "r"), start)
        else:
            with pa.memory_map(str(local_path(path))) as mapped:
                yield _open_arrow(mapped, start)


@contextmanager
def _whole(path: str) -> Iterator[None]:
    damaged = f"{path} must be a whole file that Arrow reads, found it damaged"
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
        raise ContractError(f"{damaged}: {error}") from error
    except OSError as error:
        if error.errno is not None:  # the store's, not Arrow's
            raise
        raise ContractError(f"{damaged}: {error}") from error
    except ValueError as error:
        if not path.startswith(("http://", "https://")):
            raise
        raise SettingsError(f"{path} must be served with ranges; download it first ({error})") from error


def _open_parquet(file: BinaryIO) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    from pyarrow import parquet

    # With a buffer the columns of a row group are streamed; without, each is read as a whole.
    opened = parquet.ParquetFile(file, buffer_size=BLOCK_BYTES, pre_buffer=False)

    def batches() -> Iterator[pa.RecordBatch]:
        num_rows = None
        for group in range(opened.num_row_groups):
            if num_rows is None or opened.metadata.row_group(group).total_byte_size > BATCH_BYTES:
                probe = next(opened.iter_batches(NUM_PROBED, row_groups=[group], use_threads=False), None)
                num_rows = _num_rows(probe) if probe is not None else None
            yield from opened.iter_batches(num_rows or ROWS, row_groups=[group], use_threads=False)

    return opened.schema_arrow, batches()


def _open_arrow(file: Any, start: bytes) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if start.startswith(b"ARROW1"):
        opened = pa.ipc.open_file(file)
        return opened.schema, _valid(opened.get_batch(index) for index in range(opened.num_record_batches))
    stream = pa.ipc.open_stream(file)
    return stream.schema, _valid(stream)


def _valid(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Raises ArrowInvalid for a batch whose offsets lie outside it, as those of a damaged file may."""
    for batch in batches:
        batch.validate()
        yield batch
