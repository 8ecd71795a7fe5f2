"""Small tables of one record, and where a store keeps them."""

import pyarrow as pa

from data_contracts.schemas import RECORDS

SCHEMA = RECORDS["quarantine"].schema
KEY = "ab" * 16


def broken_rows(*numbers):
    return pa.Table.from_pylist(
        [
            {
                "source": "a.jsonl",
                "source_row": n,
                "reason": "broken",
                "action": "rejected",
                "detail": "",
                "raw": b"\xff",
            }
            for n in numbers
        ],
        schema=SCHEMA,
    )


def part_path(root, index=0, suffix="parquet"):
    return root / "store" / "quarantine" / KEY / f"part-{index:05d}.{suffix}"
