"""Short ways to write a source and read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.formats import read_source
from data_contracts.refs import SourceRow


def write(folder: Path, content: bytes, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def write_parquet(folder: Path, columns: Any, name: str = "rows.parquet", **options: Any) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return str(path)


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def read(source: str, size: int | None = None, **parameters: Any) -> list[SourceRow]:
    return list(read_source(source, parameters, size, 0))


def values(source: str, size: int | None = None, **parameters: Any) -> list[dict[str, Any] | None]:
    return [row.value for row in read(source, size, **parameters)]


def is_plain(value: Any) -> bool:
    """Whether a value is what json.loads may give: as case ds-05 asks."""
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool)
