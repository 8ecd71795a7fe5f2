"""What a file is: by its name, checked against its first bytes.

Contents win over names: a Parquet file called `.jsonl` is read as Parquet and a note says so. What can't be read gets a
sentence that says what it is and how to convert it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

import orjson

from data_contracts.endings import COMPRESSIONS, KINDS
from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats.json_rows import UTF8_MARK
from data_contracts.formats.streams import name_of, read_blocks, read_start

TEXTS = ("jsonl", "json", "csv")
BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class DataFile:
    """A file of a source. `label` is what its rows carry as their source, `note` is for people. With `continues` its
    rows count on from those of the file before.
    """

    path: str
    label: str
    kind: str
    compression: str | None = None
    is_empty: bool = False
    note: str | None = None
    continues: bool = False


def kind_by_name(name: str) -> tuple[str | None, str | None]:
    """Kind and compression that a file's name promises.

    >>> kind_by_name("rows.JSONL.gz"), kind_by_name("README.md")
    (('jsonl', 'gzip'), (None, None))
    """
    path = PurePosixPath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    if compression:
        path = path.with_suffix("")
    return KINDS.get(path.suffix), compression


def data_file(path: str, label: str) -> DataFile:
    """Raises SettingsError for a name that promises nothing, ContractError for contents that can't be read."""
    promised, compression = kind_by_name(name_of(path))
    start = read_start(path)
    found_compression = next((name for mark, name in COMPRESSION_MARKS if mark.match(start)), None)
    if found_compression:
        start = next(read_blocks(path, found_compression), b"")
    _refuse_others(path, start)
    kind = next((kind for mark, kind in COLUMNAR_MARKS if mark.match(start)), None)
    if kind and found_compression:
        raise ContractError(f"{path} must not be compressed as a whole, found {_shown(kind)} in {found_compression}")
    if kind is None:
        kind = _text_kind(path, promised, start)
    is_empty = not start.removeprefix(UTF8_MARK)
    note = f"{label} is empty" if is_empty else _note(label, (promised, compression), (kind, found_compression))
    return DataFile(path, label, kind, found_compression, is_empty, note)


def _refuse_others(path: str, start: bytes) -> None:
    for mark, kind, mend in OTHER_MARKS:
        if start[:512].lstrip().lower().startswith(mark) if mark.startswith(b"<") else start.startswith(mark):
            raise ContractError(f"{path} must be UTF-8 text, Parquet or Arrow, found {kind}; {mend}")
    if start[257:262] == b"ustar":
        raise ContractError(f"{path} must be UTF-8 text, Parquet or Arrow, found a tar archive; unpack it first")


def _text_kind(path: str, promised: str | None, start: bytes) -> str:
    body = start.removeprefix(UTF8_MARK).lstrip()
    if promised is None:
        raise SettingsError(f"data.source must be a file that ends in {ENDINGS}; got {path}")
    if promised not in TEXTS:
        raise ContractError(
            f"{path} must be {_shown(promised)}, found "
            + ("an empty file" if not body else f"other content, which begins with {body[:40]!r}")
        )
    line, _, more = body.partition(b"\n")
    is_whole = line[:1] in (b"{", b"[") and _is_balanced(line)
    if promised == "json":
        # Many tools call JSON lines .json.
        return "jsonl" if is_whole and more.strip() else "json"
    if promised == "jsonl":
        is_list = body[:1] == b"[" and body[1:].lstrip()[:1] in (b"{", b"]")
        is_document = is_list or line.rstrip() == b"{"
        return "json" if is_document and not (is_whole and more.strip()) else "jsonl"
    return "jsonl" if is_whole and _is_object(line) else "csv"


def _is_balanced(line: bytes) -> bool:
    """Whether brackets that open in a line close in it."""
    depth = 0
    for match in BRACKETS.finditer(line):
        bracket = match[0]
        depth += (bracket in b"[{") - (bracket in b"]}")
    return depth <= 0


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _note(label: str, promised: tuple[str | None, str | None], found: tuple[str, str | None]) -> str | None:
    if promised == found:
        return None
    kind, compression = found
    packed = f", compressed by {compression}" if compression else ""
    return f"{label} holds {_shown(kind)}{packed}, and is read as such"


def _shown(kind: str) -> str:
    return {
        "jsonl": "JSON lines",
        "json": "a JSON document",
        "csv": "CSV",
        "parquet": "a Parquet file",
        "arrow": "an Arrow file",
    }[kind]


ENDINGS = f"{', '.join(KINDS)}, or in those of texts with .gz, .zst, .bz2 or .xz"
# Marks go as far as they hold bytes that no text begins with: a CSV may have a column PAR1.
COMPRESSION_MARKS = (
    (re.compile(rb"\x1f\x8b"), "gzip"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstd"),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "bz2"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz"),
)
COLUMNAR_MARKS = (
    (re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]"), "parquet"),
    (re.compile(rb"ARROW1\x00\x00"), "arrow"),
    (re.compile(rb"\xff\xff\xff\xff"), "arrow"),  # the stream format
)
UTF16 = "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
UTF32 = "convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW"
OTHER_MARKS = (  # longest first: the UTF-32 mark begins with the UTF-16 one
    (b"\xff\xfe\x00\x00", "UTF-32 text", UTF32),
    (b"\x00\x00\xfe\xff", "UTF-32 text", UTF32),
    (b"\xff\xfe", "UTF-16 text", UTF16),
    (b"\xfe\xff", "UTF-16 text", UTF16),
    *(
        (mark, "UTF-16 text without a mark", f"convert it: iconv -f UTF-16{order} -t UTF-8 OLD > NEW")
        for mark, order in ((b"{\x00", "LE"), (b"[\x00", "LE"), (b"\x00{", "BE"), (b"\x00[", "BE"))
    ),
    (b"PK\x03\x04", "a zip archive or a workbook", "unpack it, or save the workbook as CSV"),
    (b"Obj\x01", "an Avro file", "convert it to Parquet or JSON lines"),
    (b"SQLite format 3\x00", "an SQLite database", "export a table as CSV"),
    (b"version https://git-lfs", "a pointer of Git LFS in the file's place", "fetch the file: git lfs pull"),
    (b"<!doctype html", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)
