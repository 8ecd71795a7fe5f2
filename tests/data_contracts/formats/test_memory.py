"""Memory stays bounded for files of any size. In a process of its own, whose anonymous memory is measured; pages of a
mapped file are the kernel's to take back.
"""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_ROWS = 60_000  # of about 2 KB each: 120 MB
LIMIT_BYTES = 80 << 20
READER = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from data_contracts.formats import read_chunks

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

start = peak = anonymous_bytes()
num_rows = 0
for chunk in read_chunks(sys.argv[1], {}, None, 0):
    rows = chunk.rows()
    num_rows += len(rows)
    assert all(row.reason is None for row in rows)
    peak = max(peak, anonymous_bytes())
print(num_rows, peak - start)
"""


def row(number: int) -> dict[str, str]:
    return {"id": str(number), "prompt": f"{number * 7919 % 1_000_003}-" * 250, "answer": str(number)}


def rows():
    return map(row, range(NUM_ROWS))


def write_lines(file: IO[bytes]) -> None:
    for value in rows():
        file.write(json.dumps(value).encode() + b"\n")


def write_jsonl(path: Path) -> None:
    with path.open("wb") as file:
        write_lines(file)


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        write_lines(file)


def write_json(path: Path) -> None:
    path.write_text(json.dumps({"data": list(rows())}))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row(0)), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows())


def write_parquet(path: Path) -> None:
    """All rows in one row group."""
    pq.write_table(pa.Table.from_pylist(list(rows())), path, row_group_size=NUM_ROWS, use_dictionary=False)


def write_arrow(path: Path) -> None:
    """All rows in one batch."""
    table = pa.Table.from_pylist(list(rows()))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=NUM_ROWS)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.jsonl.gz": write_gzip,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_large_file_is_read_within_bounds(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    command = [sys.executable, "-c", READER, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    num_rows, grown = map(int, ended.stdout.split())
    assert num_rows == NUM_ROWS
    assert grown < LIMIT_BYTES
