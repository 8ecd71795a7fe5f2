"""Some rows of a table, without the rest of it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.errors import ContractError, DamagedTable
from data_contracts.schemas import RECORDS
from data_contracts.store import Store
from tests.data_contracts.samples import good_rows, table_of

SCHEMA = RECORDS["quarantine"].schema
KEY = "ab" * 16


def rows(*numbers):
    return table_of("quarantine", [{**good_rows("quarantine")[0], "source_row": number} for number in numbers])


@pytest.fixture
def in_blocks(tmp_path, monkeypatch):
    """Rows 1..10 in blocks of 4, 5 and 1, in row groups of 2."""
    monkeypatch.setattr("data_contracts.store.ROW_GROUP_ROWS", 2)
    store = Store(str(tmp_path))
    writer = store.writer("quarantine", KEY, {})
    for index, numbers in enumerate([range(1, 5), range(5, 10), [10]]):
        writer.commit(index, rows(*numbers))
    return writer.close()


@pytest.mark.parametrize("indices", [[], [0], [9, 0, 3, 4, 8], [5, 5, 1], list(range(9, -1, -1))])
def test_rows_are_taken_in_the_order_asked_for(in_blocks, tmp_path, indices):
    store = Store(str(tmp_path))
    taken = store.take(in_blocks, np.array(indices, np.int64))
    assert taken.schema.equals(SCHEMA, check_metadata=True)
    assert taken.to_pylist() == store.read(in_blocks).take(pa.array(indices, pa.int64())).to_pylist()
    some = store.take(in_blocks, np.array(indices, np.int64), ["source_row"])
    assert some.to_pydict() == {"source_row": [index + 1 for index in indices]}


def test_taking_rows_reads_the_row_groups_that_hold_them_and_no_others(in_blocks, tmp_path, monkeypatch):
    read = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda file, group, *rest, **more: read.append(group) or original(file, group, *rest, **more),
    )
    store = Store(str(tmp_path))
    store.take(in_blocks, np.array([8, 3, 2]))  # the second group of the first block, the third of the second
    assert read == [1, 2]
    (tmp_path / "store" / "quarantine" / KEY / "part-00002.parquet").write_bytes(b"PAR1")
    store.take(in_blocks, np.array([8, 3, 2]))
    with pytest.raises(DamagedTable, match="part-00002"):
        store.take(in_blocks, np.array([9]))


@pytest.mark.parametrize("index", [-1, 10])
def test_a_row_that_is_not_there_is_refused(in_blocks, tmp_path, index):
    with pytest.raises(ContractError, match=rf"must be 0\.\.9, got {min(index, 0)}\.\.{max(index, 0)}"):
        Store(str(tmp_path)).take(in_blocks, np.array([0, index]))


def test_a_table_in_an_object_store_is_read_in_part():
    store = Store("memory://bucket/take")
    ref = store.write("quarantine", KEY, rows(1, 2, 3), {})
    assert store.take(ref, np.array([2, 0]))["source_row"].to_pylist() == [3, 1]
    assert store.read(ref, ["source_row"])["source_row"].to_pylist() == [1, 2, 3]
