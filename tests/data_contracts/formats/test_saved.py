"""Folders that `datasets` saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats import read_source, source_digest
from tests.data_contracts.formats.reading import read, values, write

pytestmark = pytest.mark.slow  # importing datasets takes seconds
ROWS = [{"prompt": f"{n}", "tags": [] if n % 2 else None} for n in range(7)]


@pytest.fixture
def dataset():
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(ROWS)


def test_a_dataset_is_read_in_its_order_over_its_files(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "mine", num_shards=3)
    assert len(list((tmp_path / "mine").glob("*.arrow"))) == 3
    rows = read(str(tmp_path / "mine"))
    assert [(row.source, row.row) for row in rows] == [("mine", number) for number in range(1, 8)]
    assert [row.value for row in rows] == ROWS


def test_a_selection_is_read_as_selected(tmp_path, dataset):
    dataset.select([5, 1, 3]).save_to_disk(tmp_path / "mine")
    assert values(str(tmp_path / "mine")) == [ROWS[5], ROWS[1], ROWS[3]]


def test_a_dataset_dict_gives_the_split_that_is_asked_for(tmp_path, dataset):
    import datasets

    splits = {"train": dataset, "test": dataset.select([0])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "mine")
    folder = str(tmp_path / "mine")
    assert [row.source for row in read(folder, split="test")] == ["mine/test"]
    assert values(folder) == values(folder, split="train") == ROWS
    with pytest.raises(SettingsError, match=r"must be one of .*: train, test; got tset; near: test"):
        read_source(folder, {"split": "tset"}, None, 0)
    datasets.DatasetDict({"a": dataset, "b": dataset}).save_to_disk(tmp_path / "other")
    with pytest.raises(SettingsError, match=": a, b; got none"):
        read_source(str(tmp_path / "other"), {}, None, 0)


def test_a_split_of_one_dataset_is_an_error(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "mine")
    with pytest.raises(SettingsError, match="found one Dataset"):
        read_source(str(tmp_path / "mine"), {"split": "train"}, None, 0)


def test_the_digest_is_of_the_rows_files(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "one", num_shards=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "one")
    digests = [source_digest(str(folder), {}, None, 0) for folder in (tmp_path / "one", tmp_path / "two" / "one")]
    assert digests[0] == digests[1]
    dataset.select(range(6)).save_to_disk(tmp_path / "three", num_shards=2)
    assert source_digest(str(tmp_path / "three"), {}, None, 0) != digests[0]


def test_a_missing_file_is_named(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "mine", num_shards=2)
    Path(tmp_path / "mine" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ContractError, match=r"names data-00001-of-00002\.arrow, which is not there"):
        read_source(str(tmp_path / "mine"), {}, None, 0)


def test_a_damaged_description_is_named(tmp_path):
    write(tmp_path, b"{", "mine/state.json")
    write(tmp_path, b"{}", "mine/dataset_info.json")
    with pytest.raises(ContractError, match=r"state\.json must be what datasets saved, found it unreadable"):
        read_source(str(tmp_path / "mine"), {}, None, 0)
