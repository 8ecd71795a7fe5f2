"""SQL conditions on prompts, which say where a reward function applies."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa

from rft_core.errors import SettingsError
from rft_core.sql import confined_connection

COLUMNS = ("prompt_id", "source", "dataset", "split", "answer", "metadata")
UNKNOWN_COLUMN = re.compile(r'Referenced column "([^"]+)" (?:was )?not found')


def matching(condition: str, prompts: pa.Table, setting: str, unknown: set[str] | None = None) -> np.ndarray:
    """Which prompts meet it, booleans of shape (rows,); null does not. `setting` names it in errors.

    It sees the columns COLUMNS and the prompts' metadata fields; a field that no prompt here has is null and goes into
    `unknown`. Raises SettingsError.
    """
    import duckdb

    columns: dict[str, Any] = {name: prompts.column(name) for name in COLUMNS if name in prompts.column_names}
    for name, values in _metadata_columns(prompts).items():
        columns.setdefault(name, values)
    query = f"SELECT coalesce((\n{condition}\n), false)::boolean FROM t ORDER BY __row"
    connection = confined_connection()
    try:
        while True:
            table = pa.table({**columns, "__row": np.arange(prompts.num_rows)})
            connection.register("t", table)
            if len(duckdb.extract_statements(query)) != 1:
                raise SettingsError(f"{setting} must be a single SQL condition, got {condition!r}")
            try:
                found = connection.execute(query).fetchnumpy()
            except duckdb.BinderException as error:
                named = UNKNOWN_COLUMN.search(str(error))
                if named is None or named[1] in columns:
                    raise
                if unknown is not None:
                    unknown.add(named[1])
                columns[named[1]] = pa.nulls(prompts.num_rows)  # of no type, so that it may be compared with any
                continue
            return np.asarray(next(iter(found.values())), dtype=bool)
    except duckdb.Error as error:
        raise SettingsError(
            f"{setting} must be an SQL condition on {', '.join(COLUMNS)} and metadata fields, got {condition!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        connection.close()


def check_condition(condition: str, setting: str) -> None:
    """Raise SettingsError where it is no SQL condition."""
    empty = pa.table({name: pa.array([], pa.string()) for name in COLUMNS})
    matching(condition, empty, setting)


def _metadata_columns(prompts: pa.Table) -> dict[str, pa.Array]:
    """Each field as a column of its own: numbers and booleans where all prompts have them, else texts (JSON for
    containers)."""
    fields: dict[str, list[Any]] = {}
    for row, text in enumerate(prompts.column("metadata").to_pylist()):
        for name, value in json.loads(text).items():
            fields.setdefault(name, [None] * prompts.num_rows)[row] = value
    return {name: _column(values) for name, values in fields.items()}


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds and kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())
