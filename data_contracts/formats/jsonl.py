"""JSON lines: one object a line, UTF-8. Blank lines are no rows. Whatever is wrong with a line is a reason code, never
an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_contracts.formats.chunks import Chunk
from data_contracts.formats.json_rows import parse_rows
from data_contracts.formats.lines import Lines, LongLine, long_line_chunk, read_lines
from data_contracts.refs import SourceRow


@dataclass(frozen=True)
class JsonLines:
    """A run of lines that are not parsed yet."""

    source: str
    lines: Lines

    def rows(self) -> list[SourceRow]:
        return parse_rows(self.source, self.lines.first, self.lines.split(), self.lines.data, skip_blank=True)

    def num_rows(self) -> int:
        return sum(1 for line in self.lines.split() if line.strip())


def read_jsonl(source: str, blocks: Iterable[bytes]) -> Iterator[Chunk]:
    """Chunks of a file's rows; `source` is what the rows carry as theirs."""
    for lines in read_lines(blocks):
        yield long_line_chunk(source, lines) if isinstance(lines, LongLine) else JsonLines(source, lines)
