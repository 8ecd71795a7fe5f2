"""Data sets of the hub. There is no network in tests: a folder that `datasets` loads the same way stands in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_contracts.errors import ContractError, SettingsError, StorageUnavailable
from data_contracts.formats import read_chunks, read_source, source_digest, source_notes
from data_contracts.formats.hub import _builder, _splits
from tests.data_contracts.formats.reading import is_plain, lines, read, values, write

pytestmark = pytest.mark.slow  # importing datasets takes seconds


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A data set with two configurations, the second with one split."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    base = tmp_path / "set"
    write(base, lines({"prompt": "a", "n": [1]}, {"prompt": "b", "n": None}), "main/train.jsonl")
    write(base, lines({"prompt": "c", "n": [2]}), "main/test.jsonl")
    write(base, lines({"prompt": "d"}), "other/train.jsonl")
    write(
        base,
        b"---\nconfigs:\n- config_name: main\n  data_dir: main\n  default: true\n"
        b"- config_name: other\n  data_dir: other\n---\n",
        "README.md",
    )
    return base


def test_a_split_is_streamed_as_plain_rows(folder):
    rows = read(f"hub:{folder}", split="train")
    assert [(row.source, row.row, row.value) for row in rows] == [
        ("hub:set", 1, {"prompt": "a", "n": [1]}),
        ("hub:set", 2, {"prompt": "b", "n": None}),
    ]
    assert is_plain([row.value for row in rows])
    assert values(f"hub:{folder}", split="test") == [{"prompt": "c", "n": [2]}]
    assert values(f"hub:{folder}", 1) == [{"prompt": "a", "n": [1]}]
    assert [chunk.num_rows() for chunk in read_chunks(f"hub:{folder}", {}, None, 0)] == [2]
    assert source_notes(f"hub:{folder}", {}, None, 0) == ()


def test_a_configuration_is_chosen_by_name(folder):
    assert values(f"hub:{folder}", name="other") == [{"prompt": "d"}]


def test_what_was_downloaded_before_is_read_without_streaming(folder):
    splits = _splits(_builder(str(folder), {}), is_streamed=False)
    [table] = list(splits["train"].iter(batch_size=10))
    assert table.to_pylist() == [{"prompt": "a", "n": [1]}, {"prompt": "b", "n": None}]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"split": "tests"}, "split must be one of .*: train, test; got tests; near: test"),
        ({"name": "mian"}, r"must suit the data set .*'mian' not found"),
        ({"splits": "train"}, "must be among name, split, revision; found splits"),
    ],
)
def test_wrong_parameters_are_named(folder, parameters, words):
    with pytest.raises(SettingsError, match=words):
        read_source(f"hub:{folder}", parameters, None, 0)


def test_an_absent_folder_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="found no folder"):
        read_source(f"hub:{tmp_path}/none", {}, None, 0)


def test_code_in_a_data_set_is_never_run(tmp_path):
    write(tmp_path, b"raise SystemExit('ran')", "set/set.py")
    with pytest.raises(SettingsError, match="scripts are no longer supported"):
        read_source(f"hub:{tmp_path}/set", {}, None, 0)


def test_a_hub_that_can_not_be_reached_may_be_later():
    with pytest.raises(StorageUnavailable, match="cannot reach hub:nobody/nothing"):
        read_source("hub:nobody/nothing", {}, None, 0)


def test_values_of_mixed_types_are_what_they_were(tmp_path):
    # datasets stores such columns as JSON text.
    call = {"name": "f", "arguments": {"a": [1, "b"]}}
    rows = [
        {"answer": 1, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "call": call}]},
        {"answer": "b", "messages": [{"role": "assistant", "call": {"name": "f", "arguments": {"c": 2.0}}}]},
    ]
    write(tmp_path, lines(*rows), "set/train.jsonl")
    assert values(f"hub:{tmp_path}/set") == rows


def test_rows_that_datasets_can_not_read_say_another_way(tmp_path):
    write(tmp_path, b'{"answer": 1}\n{"answer": \n', "set/train.jsonl")
    with pytest.raises(ContractError, match="its files may be read one by one instead: hf://datasets/"):
        read(f"hub:{tmp_path}/set")


def test_identity_follows_content_configuration_and_split(folder):
    def digest(where=folder, **parameters):
        return source_digest(f"hub:{where}", parameters, None, 0)

    base = digest(split="train")
    copy = shutil.copytree(folder, folder.parent / "copy" / "set")
    assert digest(copy, split="train") == base
    assert len({base, digest(split="test"), digest(name="other", split="train")}) == 3
    write(copy, lines({"prompt": "z", "n": [1]}), "main/train.jsonl")
    assert digest(copy, split="train") != base
