"""CSV and its kin: a header of names, then one record a row, with commas, semicolons or tabs between the fields.

Values stay text (what looks like a number may be an id) and an empty field is null. Quoted fields may hold line ends; a
row is the physical line where its record begins. Where a quote breaks the rules, the first line of its record is the
bad row, and reading goes on with the next line: an unclosed quote does not swallow the rest of the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from data_contracts.errors import ContractError
from data_contracts.formats.chunks import Chunk
from data_contracts.formats.json_rows import MAX_ROW_BYTES, RowFault, checked, excerpt, mend_texts
from data_contracts.formats.lines import Lines, LongLine, long_line_chunk, read_lines
from data_contracts.refs import SourceRow

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True)
class Header:
    """The names of the fields and what stands between them; `num_lines` is the length of the header itself."""

    names: tuple[str, ...]
    delimiter: str
    num_lines: int

    def note(self, source: str) -> str:
        return f"{source}: {DELIMITERS[self.delimiter]} between the fields {', '.join(self.names)}"


class Record(NamedTuple):
    """Fields of a record, or why there are none; its bytes; how many lines it has."""

    line: int
    fields: list[str] | RowFault
    raw: bytes
    num_lines: int


@dataclass(frozen=True)
class CsvRecords:
    """Lines that hold whole records, not parsed yet."""

    source: str
    header: Header
    lines: Lines

    def rows(self) -> list[SourceRow]:
        is_utf8 = _is_utf8(self.lines.data)
        return [_row(self.source, self.header, record, is_utf8) for record in self._records()]

    def num_rows(self) -> int:
        return sum(1 for _ in self._records())

    def _records(self) -> Iterator[Record]:
        return (record for record in _records(self.lines, self.header.delimiter, is_end=True) if record.raw.strip())


def read_csv(source: str, blocks: Iterable[bytes]) -> Iterator[Chunk]:
    """Chunks of a file's records. Raises ContractError for a header without names or with a name twice."""
    parts = read_lines(blocks)
    start = next(parts, None)
    if start is None:
        return
    header = _header(source, start)
    assert isinstance(start, Lines), "a long line is no header"
    body = start.split_off(header.num_lines)
    for lines in _whole_records(chain([body], parts), header.delimiter):
        yield long_line_chunk(source, lines) if isinstance(lines, LongLine) else CsvRecords(source, header, lines)


def read_header(source: str, blocks: Iterable[bytes]) -> Header | None:
    """The header alone; null for an empty file."""
    start = next(read_lines(blocks), None)
    return None if start is None else _header(source, start)


def _whole_records(parts: Iterable[Lines | LongLine], delimiter: str) -> Iterator[Lines | LongLine]:
    """The same lines in pieces that end where records do. A record beyond MAX_ROW_BYTES ends where its piece does."""
    held: list[Lines] = []  # lines of a record whose quote is open
    for part in parts:
        if isinstance(part, LongLine):
            if held:
                yield _joined(held)
            held = []
            yield part
            continue
        held.append(part)
        is_beyond = sum(len(lines.data) for lines in held) > MAX_ROW_BYTES
        if b'"' not in part.data and len(held) > 1 and not is_beyond:
            continue  # nothing that would close it
        lines = _joined(held)
        held = []
        if b'"' in lines.data and not is_beyond:
            rest = lines.split_off(sum(record.num_lines for record in _records(lines, delimiter, is_end=False)))
            held = [rest] if rest.data else []
            lines = Lines(lines.first, lines.data[: len(lines.data) - len(rest.data)])
        if lines.data:
            yield lines
    if held:
        yield _joined(held)


def _joined(parts: list[Lines]) -> Lines:
    return Lines(parts[0].first, b"".join(lines.data for lines in parts))


def _records(lines: Lines, delimiter: str, is_end: bool) -> Iterator[Record]:
    """Records of lines. A last one whose quote is still open is left out, unless the text ends here."""
    csv.field_size_limit(MAX_ROW_BYTES)  # for the whole process; the default refuses fields of 128 KiB
    raws = lines.data.splitlines(keepends=True) if b"\r" not in lines.data else _split_at_lf(lines.data)
    texts = [raw.decode("utf-8", "surrogateescape") for raw in raws]
    start = base = 0  # lines of records given so far; of records given by earlier readers
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    while start < len(texts):
        try:
            fields: list[str] | RowFault = next(reader)
            end = base + reader.line_num
        except csv.Error as error:
            if not is_end and str(error) == "unexpected end of data":
                return
            fields = _quoting_fault(error, lines.first + start, base + reader.line_num - start)
            base = end = start + 1
            reader = csv.reader(islice(texts, base, None), delimiter=delimiter, strict=True)
        raw = raws[start] if end == start + 1 else b"".join(raws[start:end])
        yield Record(lines.first + start, fields, raw.rstrip(b"\r\n"), end - start)
        start = end


def _split_at_lf(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _quoting_fault(error: csv.Error, line: int, num_lines: int) -> RowFault:
    until = f" (read on to line {line + num_lines - 1})" if num_lines > 1 else ""
    return RowFault(
        "not_csv",
        f'quotes must enclose a whole field and be doubled inside one ("say ""yes"""), found: {error}{until}',
    )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _row(source: str, header: Header, record: Record, is_utf8: bool) -> SourceRow:
    try:
        if not is_utf8:
            _check_utf8(record)
        return SourceRow(source, record.line, _value(header, record), record.raw)
    except RowFault as fault:
        return SourceRow(source, record.line, None, record.raw, fault.reason, str(fault), fault.mended)


def _check_utf8(record: Record) -> None:
    try:
        record.raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{record.raw[error.start]:02x} at offset {error.start}"
        raise RowFault(
            "invalid_utf8", f"the file must be UTF-8, found {found}; save it as UTF-8, or convert it with iconv"
        ) from None


def _value(header: Header, record: Record) -> dict[str, str | None]:
    if isinstance(record.fields, RowFault):
        raise record.fields
    if len(record.fields) != len(header.names):
        raise RowFault(
            "wrong_field_count",
            f"a row has the header's {len(header.names)} fields with {DELIMITERS[header.delimiter]} between them, "
            f"found {len(record.fields)}: {excerpt(record.raw.decode(), 0)}",
        )
    value = {name: field or None for name, field in zip(header.names, record.fields, strict=True)}
    if b"\x00" not in record.raw:
        return value
    mends: list[tuple[str, str]] = []
    return checked(mend_texts(value, mends), mends)


def _header(source: str, start: Lines | LongLine) -> Header:
    if isinstance(start, LongLine):
        raise ContractError(f"{source} must begin with a header, found a first line of {start.length} bytes")
    found = {delimiter: _first_record(start, delimiter) for delimiter in DELIMITERS}
    delimiter = max(found, key=lambda delimiter: len(_fields(found[delimiter])))
    record = found[delimiter]
    if record is None or isinstance(record.fields, RowFault):
        raise ContractError(
            f"{source} must begin with a header, found {excerpt(start.data[:80].decode(errors='replace'), 0)}"
        )
    if b"\x00" in record.raw:
        raise ContractError(f"the header of {source} must be text, found NUL bytes; UTF-16 is converted with iconv")
    if not _is_utf8(record.raw):
        raise ContractError(f"the header of {source} must be UTF-8, found {record.raw[:80]!r}; convert it with iconv")
    names = tuple(field.strip() or f"column {number}" for number, field in enumerate(record.fields, start=1))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ContractError(f"the names in the header of {source} must differ, found {', '.join(twice)} more than once")
    return Header(names, delimiter, record.line + record.num_lines - start.first)


def _fields(record: Record | None) -> list[str]:
    return [] if record is None or isinstance(record.fields, RowFault) else record.fields


def _first_record(start: Lines, delimiter: str) -> Record | None:
    return next((record for record in _records(start, delimiter, is_end=True) if record.raw.strip()), None)
