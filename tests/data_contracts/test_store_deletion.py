"""A table whose data were deleted by rule keeps its name, and can be made again."""

from __future__ import annotations

import json

import pytest

from data_contracts.errors import DeletedTable, FatalError, StorageUnavailable
from data_contracts.store import Store
from data_contracts.tombstones import Tombstone
from tests.data_contracts.stored import KEY, part_path
from tests.data_contracts.stored import broken_rows as rows

TOMBSTONE = Tombstone(rule="keep_last 2", run="demo", facts={"counts": {"broken": 2}})


def deleted(tmp_path, *blocks):
    """A store whose one table, of these blocks, was deleted; and the table's ref."""
    store = Store(str(tmp_path))
    writer = store.writer("quarantine", KEY, {"note": "x", "fingerprint": {"cpu": "old"}})
    for index, block in enumerate(blocks):
        writer.commit(index, block)
    ref = writer.close()
    store.delete(ref, TOMBSTONE)
    return store, ref


def test_a_deleted_table_keeps_its_manifest_and_its_name(tmp_path):
    store, ref = deleted(tmp_path, rows(1), rows(2))
    assert [path.name for path in part_path(tmp_path).parent.iterdir()] == ["manifest.json"]
    assert store.find("quarantine", KEY) is None
    assert store.named("quarantine", KEY) == ref
    assert store.manifest(ref)["provenance"]["note"] == "x"
    assert store.keys("quarantine") == [KEY]
    found = store.tombstone("quarantine", KEY)
    assert (found.rule, found.facts, found.is_swept) == ("keep_last 2", {"counts": {"broken": 2}}, True)


def test_reading_a_deleted_table_says_when_and_why_and_how_it_comes_back(tmp_path):
    store, ref = deleted(tmp_path, rows(1))
    for look in (store.read, store.check):
        with pytest.raises(DeletedTable, match=r"quarantine/abababababab was deleted on 20.*keep_last 2 of run demo"):
            look(ref)
    with pytest.raises(DeletedTable, match=f"rft run {tmp_path}/runs/demo/recipe.yaml --name demo .*--remake"):
        store.read(ref)


@pytest.mark.parametrize("left", [(), ("part-00000.parquet",), ("part-00001.parquet", "part-00001.json")])
def test_a_crash_behind_the_tombstone_leaves_a_deleted_table(tmp_path, left):
    """The manifest says deleted, and any of its files may still be there."""
    other = Store(str(tmp_path))
    writer = other.writer("quarantine", KEY, {})
    writer.commit(0, rows(1))
    writer.commit(1, rows(2))
    ref = writer.close()
    folder = part_path(tmp_path).parent
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(TOMBSTONE.put_on(manifest)))
    for path in folder.iterdir():
        if path.name not in (*left, "manifest.json"):
            path.unlink()
    assert other.find("quarantine", KEY) is None
    with pytest.raises(DeletedTable):
        other.read(ref)
    other.delete(ref, Tombstone(rule="another", run="other"))
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert other.tombstone("quarantine", KEY).rule == "keep_last 2"


def test_a_deleted_table_made_again_is_the_table_it_was(tmp_path):
    store, ref = deleted(tmp_path, rows(1), rows(2))
    writer = store.writer("quarantine", KEY, {"note": "again"})
    writer.commit(0, rows(1))
    assert store.find("quarantine", KEY) is None  # half of it is no table
    store.delete(ref, TOMBSTONE)  # and no left-over of a deletion
    assert Store(str(tmp_path)).writer("quarantine", KEY, {}).committed == [0]
    writer.commit(1, rows(2))
    assert writer.close() == ref
    assert store.tombstone("quarantine", KEY) is None
    assert store.read(ref).to_pylist() == rows(1, 2).to_pylist()


def test_another_table_in_the_place_of_a_deleted_one_is_refused_before_it_is_written(tmp_path):
    store, ref = deleted(tmp_path, rows(1), rows(2))
    writer = store.writer("quarantine", KEY, {"fingerprint": {"cpu": "new"}})
    with pytest.raises(
        FatalError, match=r"block 0 .* before its deletion, .* \(cpu old -> new\): it is made again where"
    ):
        writer.commit(0, rows(9))
    assert not part_path(tmp_path).exists()
    writer.commit(0, rows(1))
    with pytest.raises(FatalError, match="must have 2 blocks as before its deletion, found 1"):
        writer.close()
    writer.commit(1, rows(2))
    with pytest.raises(FatalError, match="block 2"):
        writer.commit(2, rows(3))
    assert writer.close() == ref


def test_what_is_swept_while_a_table_is_made_again_is_made_at_the_next_try(tmp_path):
    """A pruning that had begun before the writer found the blocks it left."""
    store, ref = deleted(tmp_path, rows(1))
    writer = store.writer("quarantine", KEY, {})
    writer.commit(0, rows(1))
    part_path(tmp_path).unlink()
    with pytest.raises(StorageUnavailable, match="deleted while its table was made again"):
        writer.close()
    again = store.writer("quarantine", KEY, {})
    assert again.committed == []
    again.commit(0, rows(1))
    assert again.close() == ref


def test_an_object_store_deletes_in_the_same_order():
    store = Store("memory://bucket/deleting")
    ref = store.write("quarantine", KEY, rows(1), {})
    store.delete(ref, TOMBSTONE)
    assert store.find("quarantine", KEY) is None
    assert store.files.names(f"store/quarantine/{KEY}") == ["manifest.json"]
    assert store.write("quarantine", KEY, rows(1), {}) == ref
    assert store.read(ref).to_pylist() == rows(1).to_pylist()
