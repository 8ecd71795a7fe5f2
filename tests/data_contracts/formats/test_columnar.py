"""Parquet and Arrow files: values come back as they were, in chunks, whatever the size of a row group."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError
from data_contracts.formats import read_chunks, source_notes
from data_contracts.schemas import canonical_json
from tests.data_contracts.formats.reading import is_plain, lines, read, values, write, write_parquet

TOOL_CALL = {"function": {"name": "find", "arguments": {"names": ["ann lee", "bo ray"], "exact": True}}}
ROW = {
    "id": "n1",
    "messages": [
        {"role": "user", "content": "Find these.", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
    ],
    "tools": [{"name": "find"}],
}


def write_ipc(folder: Path, table: pa.Table, name: str, **options) -> str:
    new = pa.ipc.new_stream if name.endswith("stream.arrow") else pa.ipc.new_file
    with new(str(folder / name), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=3)
    return str(folder / name)


def write_any(folder: Path, table: pa.Table, name: str) -> str:
    if name.endswith(".parquet"):
        return write_parquet(folder, table, name, row_group_size=3)
    if name.endswith(".feather"):
        pa.feather.write_feather(table, str(folder / name), compression="lz4")
        return str(folder / name)
    return write_ipc(folder, table, name)


NAMES = ["rows.parquet", "rows.arrow", "stream.arrow", "rows.feather"]


@pytest.mark.parametrize("name", NAMES)
def test_nested_rows_come_back_as_plain_json(tmp_path, name):
    # Case ds-05: lists are lists, never numpy arrays, and truth of an empty one is that of a list.
    [row] = read(write_any(tmp_path, pa.Table.from_pylist([ROW]), name))
    assert row.value == ROW and is_plain(row.value)
    assert json.loads(row.raw) == json.loads(json.dumps(row.value)) == ROW
    assert [bool(message["tool_calls"]) for message in row.value["messages"]] == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_rows_count_from_one_and_keep_their_order(tmp_path, name):
    rows = read(write_any(tmp_path, pa.table({"n": list(range(10))}), name))
    assert [(row.source, row.row, row.value) for row in rows] == [(name, n + 1, {"n": n}) for n in range(10)]
    assert rows[9].raw == b'{"n":9}'
    assert values(str(tmp_path / name), 4) == [{"n": n} for n in range(4)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6)
MESSAGES = st.fixed_dictionaries({"role": TEXTS, "scores": st.none() | st.lists(st.floats(0, 1), max_size=2)})
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | TEXTS,
            "integer": st.none() | st.integers(-(2**63), 2**63 - 1),
            "float": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.none() | st.booleans(),
            "list": st.none() | st.lists(st.none() | TEXTS, max_size=3),
            "messages": st.none() | st.lists(st.none() | MESSAGES, max_size=3),
        }
    ),
    min_size=1,
    max_size=6,
)
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "integer": pa.int64(),
        "float": pa.float64(),
        "flag": pa.bool_(),
        "list": pa.list_(pa.string()),
        "messages": pa.list_(pa.struct({"role": pa.string(), "scores": pa.large_list(pa.float64())})),
    }
)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, group=st.integers(1, 4))
def test_a_round_trip_through_parquet_and_arrow_changes_nothing(tmp_path_factory, rows, group):
    folder = tmp_path_factory.mktemp("trip")
    table = pa.Table.from_pylist(rows, SCHEMA)
    sources = [write_parquet(folder, table, row_group_size=group)]
    sources += [write_ipc(folder, table, name) for name in ("rows.arrow", "stream.arrow")]
    for source in sources:
        found = values(source)
        assert found == rows and canonical_json(found) == canonical_json(rows)  # 1 is equal to 1.0, but not the same
    again = write(folder, lines(*found), "again.jsonl")
    assert values(again) == rows


def test_empty_lists_and_null_stay_apart(tmp_path):
    # Case pq-03: tool_calls [] has the type list<null>; {} is a struct without fields, which Arrow can hold.
    rows = [
        {"id": "a", "tool_calls": [], "tags": [], "extra": {}},
        {"id": "b", "tool_calls": [], "tags": None, "extra": None},
    ]
    table = pa.Table.from_pylist(rows)
    assert table.schema.field("tool_calls").type == pa.list_(pa.null())
    assert values(write_ipc(tmp_path, table, "rows.arrow")) == rows
    without = [{key: value for key, value in row.items() if key != "extra"} for row in rows]
    assert values(write_parquet(tmp_path, table.drop(["extra"]))) == without


def test_files_of_a_glob_keep_their_own_schemas(tmp_path):
    # Case pq-01: null first, integers and floats, a column that only one file has.
    shards = [
        {"id": "a", "reward": 1, "judge_note": None},
        {"id": "b", "reward": 0.5, "judge_note": "fine"},
        {"id": "c", "reward": 0, "judge_note": None, "tests_passed": 3},
    ]
    for number, shard in enumerate(shards, start=1):
        write_parquet(tmp_path, pa.Table.from_pylist([shard]), f"shard-{number}.parquet")
    rows = read(str(tmp_path / "shard-*.parquet"))
    assert [row.value for row in rows] == shards
    assert [(row.source, row.row) for row in rows] == [(f"shard-{number}.parquet", 1) for number in (1, 2, 3)]


def test_whole_floats_stay_floats(tmp_path):
    # Case pq-07.
    found = values(write_parquet(tmp_path, {"reward": [0.0, 1.0], "count": [0, 1]}))
    assert repr(found) == "[{'reward': 0.0, 'count': 0}, {'reward': 1.0, 'count': 1}]"


def test_a_huge_row_group_comes_in_small_chunks(tmp_path):
    # Case pq-05, scaled down: nested texts in one row group; a chunk holds about a mebibyte, not the group.
    turns = [{"role": "user", "content": "u" * 1200}, {"role": "assistant", "content": "a" * 1200}] * 2
    count = 4000
    source = write_parquet(tmp_path, {"messages": [turns] * count}, row_group_size=count)
    assert pq.ParquetFile(source).num_row_groups == 1
    chunks = list(read_chunks(source, {}, None, 0))
    assert sum(chunk.num_rows() for chunk in chunks) == count
    # 4 x 1,200 bytes of text a row, 19 MB in all.
    assert max(len(ForkingPickler.dumps(chunk)) for chunk in chunks) < 1.1 * (1 << 20)
    there = ForkingPickler.loads(ForkingPickler.dumps(chunks[-1]))
    assert there.rows()[-1].row == count and there.rows()[-1].value == {"messages": turns}


def test_a_huge_batch_of_an_arrow_file_comes_in_small_chunks(tmp_path):
    table = pa.table({"text": ["x" * 1000] * 10_000, "kind": pa.array(["a", "b"] * 5000).dictionary_encode()})
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    chunks = list(read_chunks(str(tmp_path / "rows.arrow"), {}, None, 0))
    # 1,000 bytes of text, 4 of its offset, 4 of the kind's index: 1,008 and a little.
    assert {chunk.num_rows() for chunk in chunks[:-1]} == {1040}
    assert chunks[-1].rows()[-1].row == 10_000
    assert chunks[-1].rows()[-1].value == {"text": "x" * 1000, "kind": "b"}


def test_texts_that_no_row_may_hold_are_faults(tmp_path):
    source = write_parquet(tmp_path, {"a": ["fine", "nul\x00", "spelled \\u0000"], "n": [1, 2, 3]})
    rows = read(source)
    assert [row.reason for row in rows] == [None, "nul_byte", None]
    assert (rows[1].value, rows[1].mended) == (None, {"a": "nul", "n": 2})
    assert rows[1].raw == b'{"a":"nul\\u0000","n":2}'


def test_half_a_surrogate_pair_in_a_json_column_is_mended(tmp_path):
    column = pa.array([r'{"a": "\ud800", "n": 123456789012345678901}', r'{"a": "\\ud800"}']).cast(pa.json_())
    rows = read(write_parquet(tmp_path, {"j": column}))
    assert [row.reason for row in rows] == ["lone_surrogate", None]
    assert rows[0].mended == {"j": {"a": "\ufffd", "n": 123456789012345678901}}
    assert rows[0].raw == rb'{"j":{"a":"\ud800","n":123456789012345678901}}'
    assert rows[1].value == {"j": {"a": r"\ud800"}}


def test_text_that_is_no_utf8_costs_its_row_alone(tmp_path):
    broken = pa.array([b"fine", b"caf\xe9", b"good"]).view(pa.string())
    rows = read(write_parquet(tmp_path, {"a": broken, "n": [1, 2, 3]}))
    assert [(row.row, row.reason) for row in rows] == [(1, None), (2, "invalid_utf8"), (3, None)]
    assert "b'\\xe9' at offset 3" in rows[1].detail
    assert b"caf" in rows[1].raw


def test_raw_is_the_row_with_sorted_keys(tmp_path):
    [row] = read(write_parquet(tmp_path, {"b": [1.5], "a": ["é"]}))
    assert row.raw == '{"a":"é","b":1.5}'.encode()


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow"])
def test_a_damaged_file_is_named(tmp_path, name):
    table = pa.table({"text": [f"{n}" * 100 for n in range(100)]})
    path = Path(write_any(tmp_path, table, name))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ContractError, match=f"{name} must be a whole file that Arrow reads, found it damaged"):
        read(str(path))


def test_a_file_without_rows_is_an_error(tmp_path):
    with pytest.raises(ContractError, match="at least one row, found none"):
        read(write_parquet(tmp_path, {"a": pa.array([], pa.string())}))


def test_columns_of_one_name_are_an_error(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(ContractError, match="must differ in name, found a more than once"):
        read(write_parquet(tmp_path, table))


def test_binary_columns_are_said(tmp_path):
    source = write_parquet(tmp_path, {"image": [b"\xff\x00"], "text": ["x"]})
    assert values(source) == [{"image": "/wA=", "text": "x"}]
    assert source_notes(source, {}, None, 0) == (
        "rows.parquet: column image is binary, its values become base64 text; if it is text, cast it",
    )
