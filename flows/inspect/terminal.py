"""Tables for people in a terminal, and the same rows as tab-separated lines for programs when piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_columns(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a title; nothing when there are none. Cell texts are never read as rich markup."""
    if not rows:
        return
    if not console.is_terminal:
        print_plain(console, "\t".join(columns))
        for row in rows:
            print_plain(console, "\t".join(_one_line(value) for value in row))
        print_plain(console, "")
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        is_number = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(value))) for value in row))
    console.print(table)


def print_plain(console: Console, line: str) -> None:
    """One line as it is: no wrapping, no colours, no markup."""
    console.file.write(visible(line) + "\n")


def visible(text: str) -> str:
    """Control characters (terminal escapes in a model's text) as their code points; tab and newline stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _one_line(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
