"""Which files a source names: globs, folders, splits, near names, digests."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats import read_source, source_digest, source_notes
from tests.data_contracts.formats.reading import lines, read, values, write, write_parquet


def digest(source: str, **parameters) -> str:
    return source_digest(source, parameters, None, 0)


def test_a_glob_gives_its_files_in_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c/a.jsonl", ".hidden.jsonl", "c/d/e.jsonl", "a.txt"):
        write(tmp_path, lines({"from": name}), name)
    assert [(row.source, row.row) for row in read(f"{tmp_path}/*.jsonl")] == [("a.jsonl", 1), ("b.jsonl", 1)]
    found = read(f"{tmp_path}/**/*.jsonl")
    assert [row.source for row in found] == ["a.jsonl", "b.jsonl", "c/a.jsonl", "c/d/e.jsonl"]
    assert [row.value["from"] for row in found] == [row.source for row in found]
    assert [row.source for row in read(f"{tmp_path}/c/[ax].json?")] == ["a.jsonl"]


def test_size_goes_over_the_files_of_a_glob(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, lines({"n": 1}, {"n": 2}), name)
    assert [(row.source, row.row) for row in read(f"{tmp_path}/*.jsonl", 3)] == [
        ("a.jsonl", 1),
        ("a.jsonl", 2),
        ("b.jsonl", 1),
    ]


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    assert values(write(tmp_path, lines({"a": 1}), "rows[1].jsonl")) == [{"a": 1}]


def test_a_file_whose_name_has_a_colon_is_itself(tmp_path, monkeypatch):
    write(tmp_path, lines({"a": 1}), "run:one.jsonl")
    monkeypatch.chdir(tmp_path)
    assert values("run:one.jsonl") == [{"a": 1}]


def test_a_glob_may_mix_compressed_and_plain(tmp_path):
    import gzip

    write(tmp_path, lines({"a": 1}), "a.jsonl")
    write(tmp_path, gzip.compress(lines({"a": 2})), "b.jsonl.gz")
    assert values(f"{tmp_path}/*.jsonl*") == [{"a": 1}, {"a": 2}]


def test_an_empty_file_among_others_is_said(tmp_path):
    write(tmp_path, lines({"a": 1}), "a.jsonl")
    write(tmp_path, b"", "b.jsonl")
    assert values(f"{tmp_path}/*.jsonl") == [{"a": 1}]
    assert source_notes(f"{tmp_path}/*.jsonl", {}, None, 0) == ("b.jsonl is empty",)
    write(tmp_path, b"", "a.jsonl")
    with pytest.raises(ContractError, match="found empty files only"):
        read_source(f"{tmp_path}/*.jsonl", {}, None, 0)


def test_a_glob_that_matches_nothing_names_near_files(tmp_path):
    write(tmp_path, b"{}", "train-1.jsonl")
    with pytest.raises(SettingsError, match=r"found none for .*trian-\*\.jsonl; near: train-1\.jsonl"):
        read_source(f"{tmp_path}/trian-*.jsonl", {}, None, 0)
    with pytest.raises(SettingsError, match=r"found none for .*; its folder does not exist either"):
        read_source(f"{tmp_path}/nowhere/*.jsonl", {}, None, 0)


def test_files_of_several_kinds_are_an_error(tmp_path):
    write(tmp_path, lines({"a": 1}), "rows.jsonl")
    write(tmp_path, b"a\n1\n", "rows.csv")
    for source in (f"{tmp_path}/rows.*", str(tmp_path)):
        with pytest.raises(ContractError, match=r"found rows\.csv \(csv\), rows\.jsonl \(jsonl\); choose with a glob"):
            read_source(source, {}, None, 0)


def test_a_folder_gives_its_data_files(tmp_path):
    for name in ("part-0.jsonl", "more/part-1.jsonl"):
        write(tmp_path, lines({"from": name}), name)
    for name in ("README.md", "dataset_infos.json", ".git/x.jsonl", "_SUCCESS"):
        write(tmp_path, b"{}", name)
    assert [row.source for row in read(str(tmp_path))] == ["more/part-1.jsonl", "part-0.jsonl"]
    assert source_notes(f"{tmp_path}/", {}, None, 0) == ("passed over README.md, _SUCCESS, dataset_infos.json",)


def test_a_folder_without_data_files_is_an_error(tmp_path):
    write(tmp_path, b"x", "README.md")
    with pytest.raises(SettingsError, match=r"must hold data files .*found none in the folder"):
        read_source(str(tmp_path), {}, None, 0)


def test_held_out_files_of_a_folder_do_not_slip_in(tmp_path):
    for name in ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"):
        write_parquet(tmp_path, {"from": [name]}, name)
    with pytest.raises(SettingsError, match=r"split must say which files .* its names say test, train"):
        read_source(str(tmp_path), {}, None, 0)
    assert [row.source for row in read(str(tmp_path), split="train")] == ["data/train-00000-of-00001.parquet"]
    with pytest.raises(SettingsError, match="names say test, train; got 'dev'"):
        read_source(str(tmp_path), {"split": "dev"}, None, 0)
    # A glob says itself what it takes.
    assert len(read(f"{tmp_path}/data/*.parquet")) == 2


@pytest.mark.parametrize(
    ("name", "split"), [("val.jsonl", "validation"), ("my-dev.jsonl", "dev"), ("eval/a.jsonl", "eval")]
)
def test_other_names_of_splits(tmp_path, name, split):
    write(tmp_path, lines({"a": 1}), name)
    write(tmp_path, lines({"a": 2}), "train.jsonl")
    assert values(str(tmp_path), split=split) == [{"a": 1}]


def test_words_that_contain_a_split_are_none(tmp_path):
    for name in ("constraints.jsonl", "contest.jsonl", "trainer.jsonl"):
        write(tmp_path, lines({"a": 1}), name)
    assert len(read(str(tmp_path))) == 3


def test_paths_that_are_no_file_are_settings_errors(tmp_path):
    write(tmp_path, b"{}", "train.jsonl")
    with pytest.raises(SettingsError, match=r"found no file .*trian\.jsonl; near: train\.jsonl"):
        read_source(str(tmp_path / "trian.jsonl"), {}, None, 0)
    with pytest.raises(SettingsError, match="folder does not exist"):
        read_source(str(tmp_path / "nowhere" / "a.jsonl"), {}, None, 0)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SettingsError, match="device or pipe"):
        read_source(str(tmp_path / "pipe.jsonl"), {}, None, 0)
    with pytest.raises(SettingsError, match="found min_terms; the others are for procedural sources"):
        read_source(str(tmp_path / "train.jsonl"), {"min_terms": 2}, None, 0)
    with pytest.raises(SettingsError, match="split is for folders and hub:"):
        read_source(str(tmp_path / "train.jsonl"), {"split": "train"}, None, 0)


def test_a_home_folder_and_file_urls_are_paths(tmp_path, monkeypatch):
    source = write(tmp_path, lines({"a": 1}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values("~/rows.jsonl") == values(f"file://{source}") == [{"a": 1}]


def test_a_relative_path_starts_at_the_working_folder(tmp_path, monkeypatch):
    write(tmp_path, lines({"a": 1}), "data/rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [row.source for row in read("data/rows.jsonl")] == ["rows.jsonl"]
    assert [row.source for row in read("data/*.jsonl")] == ["rows.jsonl"]
    assert [row.source for row in read("data")] == ["rows.jsonl"]


def test_file_digest_is_of_content_alone(tmp_path):
    one = write(tmp_path, b'{"a": 1}\n', "one.jsonl")
    two = write(tmp_path, b'{"a": 1}\n', "two.jsonl")
    os.utime(two, (1, 1))
    assert digest(one) == digest(two) == hashlib.sha256(b'{"a": 1}\n').hexdigest()
    assert source_digest(one, {}, 5, 1) == digest(one)
    Path(two).write_bytes(b'{"a": 2}\n')
    assert digest(two) != digest(one)


@pytest.mark.parametrize("pattern", ["*.jsonl", ""])
def test_the_digest_of_several_files_is_of_names_and_contents(tmp_path, pattern):
    first = tmp_path / "first"
    for name in ("a.jsonl", "b.jsonl"):
        write(first, lines({"from": name}), name)
    base = digest(f"{first}/{pattern}")
    moved = shutil.move(first, tmp_path / "moved")
    assert digest(f"{moved}/{pattern}") == base
    (moved / "b.jsonl").rename(moved / "c.jsonl")
    assert digest(f"{moved}/{pattern}") != base
    (moved / "c.jsonl").rename(moved / "b.jsonl")
    write(moved, lines({"from": "other"}), "b.jsonl")
    assert digest(f"{moved}/{pattern}") != base
