"""Raw sources -> rows. A row that cannot be read is still a row: it carries the reason, the detail and its raw bytes.

A source is named by one text: a file, a glob, a folder, a URL, `hub:ORG/NAME`, or `reasoning_gym:NAME` for a procedural
one. What kind of file it is says its name, checked against its content. Rows come in chunks, which are small to send to
a worker process and are parsed there.

Of a text row `row` is the physical line, counted from 1, of others the row, and `source` the file (below the fixed part
of a glob, or the folder). Values are plain JSON; those of CSV are text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_contracts.errors import SettingsError
from data_contracts.formats import file_rows, hub, reasoning_gym
from data_contracts.formats.chunks import Chunk, take
from data_contracts.refs import SourceRow

__all__ = ["Chunk", "read_chunks", "read_source", "source_digest", "source_notes"]


@dataclass(frozen=True)
class Source:
    """A kind of source. All functions take (name, parameters, size, seed)."""

    chunks: Callable[[str, dict[str, Any], int | None, int], Iterator[Chunk]]
    digest: Callable[[str, dict[str, Any], int | None, int], str]
    notes: Callable[[str, dict[str, Any], int | None, int], tuple[str, ...]]


def read_chunks(source: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[Chunk]:
    """Rows of a source in its own order, in chunks. `size` takes the first rows; null takes all of a file.

    Raises SettingsError at once for a source, generator or parameter that does not exist, ContractError for a file
    without a row, in another encoding, or damaged (where it is met).
    """
    kind, name = _kind_and_name(source)
    return take(SOURCES[kind].chunks(name, parameters, size, seed), size)


def read_source(source: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[SourceRow]:
    """The rows of all chunks, parsed in this process. Raises as `read_chunks` does."""
    chunks = read_chunks(source, parameters, size, seed)
    return (row for chunk in chunks for row in chunk.rows())


def source_digest(source: str, parameters: dict[str, Any], size: int | None, seed: int) -> str:
    """64 hex digits, by content: where files lie and when they were written do not matter.

    The SHA-256 of a file's bytes; of several, of their names and digests; of a hub's data set, of the commit; of a
    procedural source, of generator, version and parameters.
    """
    kind, name = _kind_and_name(source)
    return SOURCES[kind].digest(name, parameters, size, seed)


def source_notes(source: str, parameters: dict[str, Any], size: int | None, seed: int) -> tuple[str, ...]:
    """What was found out about a source and decides how it is read: a delimiter, a file that is not what its name says,
    columns that change their form. For people.
    """
    kind, name = _kind_and_name(source)
    return SOURCES[kind].notes(name, parameters, size, seed)


def _kind_and_name(source: str) -> tuple[str, str]:
    prefix, colon, rest = source.partition(":")
    if colon and prefix in PREFIXES:
        return prefix, rest
    match = re.match(r"([A-Za-z_-]{2,}):(?!//)", source)
    if match and not Path(source).exists():
        near = difflib.get_close_matches(match[1], PREFIXES, n=1)
        hint = f"; near: {near[0]}:" if near else ""
        kinds = " or ".join(f"{prefix}:NAME" for prefix in PREFIXES)
        raise SettingsError(f"data.source must be a file, a folder, a glob, a URL, or {kinds}; got {source!r}{hint}")
    return FILES, source


FILES = "files"
PREFIXES = ("reasoning_gym", "hub")
SOURCES = {
    FILES: Source(file_rows.chunks, file_rows.digest, file_rows.notes),
    "reasoning_gym": Source(reasoning_gym.chunks, reasoning_gym.digest, reasoning_gym.notes),
    "hub": Source(hub.chunks, hub.digest, hub.notes),
}
