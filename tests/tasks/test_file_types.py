"""One raw file of each format, in each file type where it makes sense, ends as the right record."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from data_contracts.schemas import RECORDS
from data_contracts.store import Store
from rft_core.data.row_pipeline import RowSettings
from rft_core.data.settings import DataSettings
from tasks.sources import build_dataset, dataset_record

Rows = list[dict[str, Any]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def jsonl(rows: Rows, path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def compressed(open_file: Callable[..., Any]) -> Callable[[Rows, Path], None]:
    def write(rows: Rows, path: Path) -> None:
        with open_file(path, "wt", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    return write


def zstd_open(path: Path, mode: str, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd"), encoding)


def json_document(rows: Rows, path: Path) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))


def delimited(delimiter: str) -> Callable[[Rows, Path], None]:
    def write(rows: Rows, path: Path) -> None:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)

    return write


def saved_by_datasets(rows: Rows, path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(path))


def parquet(rows: Rows, path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def arrow_file(rows: Rows, path: Path) -> None:
    feather.write_feather(pa.Table.from_pylist(rows), str(path), compression="uncompressed")


def arrow_stream(rows: Rows, path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


# File types that hold any value, and those that hold texts only.
ANY = {
    "rows.jsonl": jsonl,
    "rows.json": json_document,
    "rows.jsonl.gz": compressed(gzip.open),
    "rows.jsonl.zst": compressed(zstd_open),
    "rows.jsonl.bz2": compressed(bz2.open),
    "rows.jsonl.xz": compressed(lzma.open),
    "rows.parquet": parquet,
    "rows.arrow": arrow_file,
    "stream.arrow": arrow_stream,
    "saved": saved_by_datasets,
}
TEXTS = {"rows.csv": delimited(","), "rows.tsv": delimited("\t")}

TURNS = [user("2+2?"), assistant('4, "naturally"\nof course'), user("And ×2?"), assistant("8")]
SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
BOTH_SIDES = {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}

# name -> (record setting, rows, whether all values are texts, what the first row of the record holds)
FORMATS: dict[str, tuple[str, Rows, bool, dict[str, Any]]] = {
    "prompts, plain": (
        "prompts",
        [{"prompt": "2+2?", "answer": "4"}, {"prompt": '3+3, "please"\n?', "answer": "6"}],
        True,
        {"messages": [user("2+2?")], "answer": "4"},
    ),
    "prompts, conversational": (
        "prompts",
        [{"prompt": TURNS[:3], "answer": "8"}, {"prompt": [user("1+1?")], "answer": "2"}],
        False,
        {"messages": TURNS[:3], "answer": "8"},
    ),
    "demonstrations, messages": (
        "demonstrations",
        [{"messages": TURNS}, {"messages": [user("a"), assistant("b")]}],
        False,
        {"kind": "demonstration", "messages": {"prompt": TURNS[:1], "completion": TURNS[1:]}},
    ),
    "demonstrations, ShareGPT": (
        "demonstrations",
        [{"conversations": SHAREGPT}],
        False,
        {"kind": "demonstration", "messages": {"prompt": [user("2+2?")], "completion": [assistant("4")]}},
    ),
    "demonstrations, prompt and completion": (
        "demonstrations",
        [{"prompt": "2+2?", "completion": "4"}, {"prompt": "3+3?", "completion": "6"}],
        True,
        {"kind": "demonstration", "messages": {"prompt": [user("2+2?")], "completion": [assistant("4")]}},
    ),
    "demonstrations, text": (
        "demonstrations",
        [{"text": 'Once upon a time, "far" away.'}, {"text": "The end."}],
        True,
        {"kind": "demonstration", "messages": {"text": 'Once upon a time, "far" away.'}},
    ),
    "preferences, explicit prompt": (
        "preferences",
        [PAIR, {"prompt": "3+3?", "chosen": "6", "rejected": "7"}],
        True,
        {
            "kind": "pair",
            "messages": {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
        },
    ),
    "preferences, implicit prompt": (
        "preferences",
        [{"chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")]}],
        False,
        {
            "kind": "pair",
            "messages": {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
        },
    ),
    "preferences, margin": (
        "preferences",
        [{**PAIR, "margin": 0.5}],
        False,
        {"kind": "pair", "margin": 0.5},
    ),
    "labelled": (
        "labelled",
        [{"prompt": "2+2?", "completion": "4", "label": True}, {"prompt": "2+2?", "completion": "5", "label": False}],
        False,
        {"kind": "labelled", "messages": {"prompt": [user("2+2?")], "completion": [assistant("4")]}, "label": True},
    ),
    "trajectories": (
        "trajectories",
        [{"messages": TURNS, "reward": 1.0, "turn_rewards": [0.25, 0.75]}],
        False,
        {
            "kind": "trajectory",
            "messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
            "reward": 1.0,
            "turn_rewards": [0.25, 0.75],
        },
    ),
    "stepwise": (
        "stepwise",
        [{"prompt": "2+2*2?", "completions": ["2*2=4", "2+4=7"], "labels": [True, False]}],
        False,
        {"kind": "stepwise", "step_labels": [True, False]},
    ),
}
NAMES_OF_FILES = ("source", "source_row", "dataset")


def table_of(source: Path, record: str, root: Path) -> pa.Table:
    """The committed record, without the columns that name the file."""
    data = DataSettings(source=str(source), record=record, heldout_fraction=0, max_rejected_fraction=0)
    store = Store(str(root))
    name = dataset_record(data)
    keys = {name: f"k{len(store.keys(name))}", "quarantine": f"k{len(store.keys(name))}"}
    refs, _ = build_dataset(store, keys, {each: {} for each in keys}, RowSettings(data, None, None, None))
    table = store.read(refs[name])
    assert table.schema.equals(RECORDS[name].schema, check_metadata=True)
    assert store.read(refs["quarantine"]).num_rows == 0
    return table.drop_columns(
        [column for column in ("source", "source_row", "dataset") if column in table.column_names]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_in_each_file_type(name, tmp_path):
    record, rows, are_texts, expected = FORMATS[name]
    tables = []
    for file, write in {**ANY, **(TEXTS if are_texts else {})}.items():
        folder = tmp_path / str(len(tables))  # ids begin with the file's name
        folder.mkdir()
        path = folder / file.replace("stream", "rows").replace("saved", "rows")
        write(rows, path)
        tables.append(table_of(path, record, tmp_path / "root"))
    found = tables[0].to_pylist()
    assert len(found) == len(rows)
    first = {**found[0], "messages": json.loads(found[0]["messages"])}
    assert {column: first[column] for column in expected} == expected
    assert [table.to_pylist() for table in tables] == [found] * len(tables)
    pq.write_table(tables[0], tmp_path / "record.parquet")  # and the record itself outlives Parquet
    assert pq.read_table(tmp_path / "record.parquet").equals(tables[0])
