import json
import os
import time

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError, DamagedTable, StorageUnavailable
from data_contracts.refs import TableRef, content_key
from data_contracts.store import Store
from tests.data_contracts.stored import KEY, SCHEMA, part_path
from tests.data_contracts.stored import broken_rows as rows


def test_what_is_written_is_read_back_in_the_records_schema(tmp_path):
    ref = Store(str(tmp_path)).write("quarantine", KEY, rows(1, 2), {"note": "x"})
    again = Store(str(tmp_path))
    table = again.read(again.find("quarantine", KEY))
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.to_pylist() == rows(1, 2).to_pylist()
    assert again.manifest(ref)["provenance"] == {"note": "x"}


def test_the_manifest_says_how_long_the_making_took_and_no_digest_holds_it(tmp_path):
    began = time.monotonic() - 100
    slow = Store(str(tmp_path / "slow")).write("quarantine", KEY, rows(1, 2), {}, began)
    assert 100 <= Store(str(tmp_path / "slow")).manifest(slow)["seconds"] < 110
    quick = Store(str(tmp_path / "quick")).write("quarantine", KEY, rows(1, 2), {})
    assert 0 <= Store(str(tmp_path / "quick")).manifest(quick)["seconds"] < 10
    assert slow == quick


def test_equal_rows_give_equal_digests_and_other_rows_do_not(tmp_path):
    one = Store(str(tmp_path / "one")).write("quarantine", KEY, rows(1, 2), {"at": "now"})
    two = Store(str(tmp_path / "two")).write("quarantine", KEY, rows(1, 2), {"at": "later"})
    three = Store(str(tmp_path / "three")).write("quarantine", KEY, rows(2, 1), {})
    assert one == two
    assert one.digest != three.digest


def test_a_chunked_table_has_the_digest_of_the_whole_one(tmp_path):
    chunked = pa.concat_tables([rows(1), rows(2)])
    one = Store(str(tmp_path / "one")).write("quarantine", KEY, chunked, {})
    two = Store(str(tmp_path / "two")).write("quarantine", KEY, rows(1, 2), {})
    assert one.digest == two.digest


def test_an_empty_table_is_a_table(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, SCHEMA.empty_table(), {})
    assert (ref.rows, store.read(ref).num_rows) == (0, 0)
    assert store.read(ref).schema.equals(SCHEMA, check_metadata=True)


def test_without_a_manifest_there_is_no_table_but_its_blocks_are_found(tmp_path):
    store = Store(str(tmp_path))
    writer = store.writer("quarantine", KEY, {})
    writer.commit(0, rows(1))
    assert store.find("quarantine", KEY) is None
    continued = Store(str(tmp_path)).writer("quarantine", KEY, {})
    assert continued.committed == [0]
    continued.commit(1, rows(2, 3))
    assert store.read(continued.close()).to_pylist() == rows(1, 2, 3).to_pylist()


def test_blocks_may_be_committed_in_any_order(tmp_path):
    store = Store(str(tmp_path))
    writer = store.writer("quarantine", KEY, {})
    writer.commit(1, rows(2))
    writer.commit(0, rows(1))
    assert store.read(writer.close())["source_row"].to_pylist() == [1, 2]


def test_a_gap_between_blocks_is_refused(tmp_path):
    writer = Store(str(tmp_path)).writer("quarantine", KEY, {})
    writer.commit(1, rows(2))
    with pytest.raises(ContractError, match=r"found \[1\]"):
        writer.close()


def test_a_half_written_block_is_made_again(tmp_path):
    writer = Store(str(tmp_path)).writer("quarantine", KEY, {})
    writer.commit(0, rows(1))
    part_path(tmp_path).write_bytes(b"PAR1")
    assert Store(str(tmp_path)).writer("quarantine", KEY, {}).committed == []


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda path: path.unlink(), "found nothing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "bytes, found"),
    ],
    ids=["deleted", "truncated"],
)
def test_missing_and_truncated_files_are_found_at_reuse(tmp_path, harm, found):
    store = Store(str(tmp_path))
    store.write("quarantine", KEY, rows(1), {})
    harm(part_path(tmp_path))
    with pytest.raises(DamagedTable, match=found) as error:
        store.find("quarantine", KEY)
    assert str(part_path(tmp_path)) in str(error.value)


def test_altered_bytes_are_found_at_the_first_read_of_a_process(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, rows(1), {})
    path = part_path(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedTable, match="bytes were altered"):
        Store(str(tmp_path)).read(ref)


def test_a_table_that_was_replaced_by_another_valid_one_is_not_the_refs_table(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, rows(1), {})
    Store(str(tmp_path)).write("quarantine", KEY, rows(2), {})
    with pytest.raises(DamagedTable, match="it was replaced"):
        Store(str(tmp_path)).read(ref)


def test_a_damaged_table_is_set_aside_with_its_bytes(tmp_path):
    store = Store(str(tmp_path))
    store.write("quarantine", KEY, rows(1), {})
    store.set_aside("quarantine", KEY)
    assert store.find("quarantine", KEY) is None
    assert len(list((tmp_path / "damaged").glob("*/part-00000.parquet"))) == 1
    store.set_aside("quarantine", KEY)  # gone already, as when a person deleted its folder


def test_a_block_of_another_schema_names_the_first_difference(tmp_path):
    wrong = rows(1).set_column(1, "source_row", pa.array(["one"]))
    with pytest.raises(ContractError, match=r"column source_row: .*string.* instead of .*int64"):
        Store(str(tmp_path)).write("quarantine", KEY, wrong, {})
    with pytest.raises(ContractError, match="no column raw"):
        Store(str(tmp_path)).write("quarantine", KEY, rows(1).drop_columns("raw"), {})
    with pytest.raises(ContractError, match="extra column more"):
        Store(str(tmp_path)).write("quarantine", KEY, rows(1).append_column("more", pa.array([1])), {})


def test_a_table_of_another_schema_version_is_refused_with_the_mend(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, rows(1), {})
    manifest = tmp_path / "store" / "quarantine" / KEY / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 99}))
    with pytest.raises(ContractError, match="version 99: re-run from this stage"):
        Store(str(tmp_path)).read(ref)


def test_a_full_disk_is_transient_and_leaves_what_was_committed(small_disk):
    full_disk = small_disk.path
    store = Store(str(full_disk))
    writer = store.writer("quarantine", KEY, {})
    writer.commit(0, rows(1))
    big = pa.Table.from_pylist(
        [
            {
                "source": "a",
                "source_row": 1,
                "reason": "r",
                "action": "rejected",
                "detail": "",
                "raw": os.urandom(4 << 20),
            }
        ],
        schema=SCHEMA,
    )
    with pytest.raises(StorageUnavailable, match="disk is full"):
        writer.commit(1, big)
    assert not list(full_disk.rglob("*.tmp"))
    assert Store(str(full_disk)).writer("quarantine", KEY, {}).committed == [0]


def test_an_object_store_holds_the_same_tables(tmp_path):
    local = Store(str(tmp_path)).write("quarantine", KEY, rows(1, 2), {})
    remote = Store("memory://bucket/rft")
    assert remote.write("quarantine", KEY, rows(1, 2), {}) == local
    again = Store("memory://bucket/rft")
    assert again.read(again.find("quarantine", KEY)).to_pylist() == rows(1, 2).to_pylist()


def test_columns_can_be_read_alone(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, rows(1, 2), {})
    assert store.read(ref, ["source_row"]).to_pydict() == {"source_row": [1, 2]}


def test_keys_depend_on_everything_that_decides_content():
    base = {
        "inputs": [TableRef("prompts", "k", "d", 1)],
        "settings": {"a": 1},
        "identity": {"model": "m"},
        "seed": 0,
        "semantics": 1,
    }
    others = [
        {"inputs": [TableRef("prompts", "k", "e", 1)]},
        {"settings": {"a": 2}},
        {"identity": {"model": "n"}},
        {"seed": 1},
        {"semantics": 2},
    ]
    keys = {content_key("rollouts", **{**base, **other}) for other in [{}, *others]}
    keys.add(content_key("rewards", **base))
    assert len(keys) == 7
    assert content_key("rollouts", **base) == content_key("rollouts", **dict(reversed(base.items())))


def test_a_manifest_of_other_content_is_damage(tmp_path):
    store = Store(str(tmp_path))
    ref = store.write("quarantine", KEY, rows(1), {})
    part_path(tmp_path).with_name("manifest.json").write_text('{"rows": 1}')
    with pytest.raises(DamagedTable, match=r"manifest.json must be a JSON object with .*'parts'.*delete the table's"):
        store.read(ref)


def test_a_file_where_a_folder_should_be_is_a_storage_error(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StorageUnavailable, match="cannot write"):
        Store(str(tmp_path)).write("quarantine", KEY, rows(1), {})
