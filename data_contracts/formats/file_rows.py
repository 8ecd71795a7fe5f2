"""The rows of files, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from data_contracts.errors import ContractError
from data_contracts.formats.chunks import Chunk
from data_contracts.formats.columnar import ArrowRows, columns_notes, read_columnar
from data_contracts.formats.delimited import read_csv, read_header
from data_contracts.formats.files import find_files
from data_contracts.formats.json_document import read_json
from data_contracts.formats.jsonl import read_jsonl
from data_contracts.formats.kinds import DataFile
from data_contracts.formats.streams import file_digest, read_blocks
from data_contracts.refs import digest_of


def chunks(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[Chunk]:
    found = find_files(name, parameters)
    return _chunks(name, found.files)


def digest(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> str:
    """Of one file its own digest; of several, that of their names below the folder and digests."""
    files = find_files(name, parameters).files
    digests = [file_digest(file.path) for file in files]
    if len(files) == 1:
        return digests[0]
    return digest_of({"files": [[file.label, digest] for file, digest in zip(files, digests, strict=True)]})


def notes(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> tuple[str, ...]:
    """Those on the choice of files, and those on the first file's columns."""
    found = find_files(name, parameters)
    first = next(file for file in found.files if not file.is_empty)
    return (*found.notes, *NOTES[first.kind](first))


def _chunks(name: str, files: tuple[DataFile, ...]) -> Iterator[Chunk]:
    has_rows = False
    first = 1
    for file in files:
        first = first if file.continues else 1
        for chunk in READERS[file.kind](file, first):
            if isinstance(chunk, ArrowRows):
                first += chunk.length
            has_rows = has_rows or chunk.num_rows() > 0
            yield chunk
    if not has_rows:
        raise ContractError(f"{name} must hold at least one row, found none")


def _jsonl(file: DataFile, first: int) -> Iterator[Chunk]:
    return read_jsonl(file.label, read_blocks(file.path, file.compression))


def _json(file: DataFile, first: int) -> Iterator[Chunk]:
    return iter(()) if file.is_empty else read_json(file.label, read_blocks(file.path, file.compression))


def _csv(file: DataFile, first: int) -> Iterator[Chunk]:
    return read_csv(file.label, read_blocks(file.path, file.compression))


def _columnar(file: DataFile, first: int) -> Iterator[Chunk]:
    return read_columnar(file.path, file.label, first)


def _no_notes(file: DataFile) -> list[str]:
    return []


def _csv_notes(file: DataFile) -> list[str]:
    header = read_header(file.label, read_blocks(file.path, file.compression))
    return [header.note(file.label)] if header else []


def _columnar_notes(file: DataFile) -> list[str]:
    return columns_notes(file.path, file.label)


READERS: dict[str, Callable[[DataFile, int], Iterator[Chunk]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _columnar,
    "arrow": _columnar,
}
NOTES: dict[str, Callable[[DataFile], list[str]]] = {
    "jsonl": _no_notes,
    "json": _no_notes,
    "csv": _csv_notes,
    "parquet": _columnar_notes,
    "arrow": _columnar_notes,
}
