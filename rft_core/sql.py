"""DuckDB for conditions that people write: it sees the tables it is given and nothing else, no file and no network."""

from __future__ import annotations

from typing import Any

CONFINED = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "lock_configuration": "true",
}


def confined_connection() -> Any:
    """A database in memory, to be closed."""
    import duckdb

    return duckdb.connect(":memory:", config=CONFINED)
