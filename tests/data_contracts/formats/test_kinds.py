"""What a file is: contents win over names, and what can't be read gets a sentence."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats import read_chunks, read_source, source_notes
from tests.data_contracts.formats.reading import lines, read, values, write, write_parquet

ROWS = [{"prompt": "é", "answer": "1"}, {"prompt": "y", "answer": None}]
TEXTS = {
    "rows.jsonl": lines(*ROWS),
    "rows.ndjson": lines(*ROWS),
    "rows.json": b'[{"prompt": "\xc3\xa9", "answer": "1"}, {"prompt": "y", "answer": null}]',
    "rows.csv": "prompt,answer\né,1\ny,\n".encode(),
    "rows.tsv": "prompt\tanswer\né\t1\ny\t\n".encode(),
}


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


COMPRESSIONS = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("ending", ["", *COMPRESSIONS])
def test_every_text_is_read_plain_and_compressed(tmp_path, name, ending):
    content = COMPRESSIONS.get(ending, bytes)(TEXTS[name])
    source = write(tmp_path, content, name + ending)
    rows = read(source)
    assert [row.value for row in rows] == ROWS
    assert {row.source for row in rows} == {name + ending}
    assert {chunk.source for chunk in read_chunks(source, {}, None, 0)} == {name + ending}
    assert [note for note in source_notes(source, {}, None, 0) if "read as such" in note] == []


@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("has_ending", [True, False])
def test_an_archive_of_several_parts_is_read_to_its_end(tmp_path, ending, has_ending):
    content = COMPRESSIONS[ending](TEXTS["rows.jsonl"]) + COMPRESSIONS[ending](lines({"prompt": "z"}))
    source = write(tmp_path, content, "rows.jsonl" + (ending if has_ending else ""))
    assert values(source) == [*ROWS, {"prompt": "z"}]


@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_an_archive_that_is_cut_off_is_named(tmp_path, ending):
    content = COMPRESSIONS[ending](b"".join(b'{"n": %d}\n' % (n * 7919 % 10_007) for n in range(5000)))
    source = write(tmp_path, content[: len(content) // 2], f"rows.jsonl{ending}")
    with pytest.raises(ContractError, match=r"must be a whole .* file, found it damaged"):
        read(source)


def test_a_long_archive_that_is_cut_off_gives_its_rows_and_then_the_error(tmp_path):
    content = gzip.compress(b"".join(b'{"n": %d}\n' % (n * 7919 % 100_003) for n in range(200_000)))
    rows = read_source(write(tmp_path, content[: len(content) * 9 // 10], "rows.jsonl.gz"), {}, None, 0)
    assert next(rows).value == {"n": 0}
    with pytest.raises(ContractError, match=r"rows\.jsonl\.gz must be a whole gzip file"):
        list(rows)


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("rows.jsonl", gzip.compress(TEXTS["rows.jsonl"], mtime=0), "rows.jsonl holds JSON lines, compressed by gzip"),
        ("rows.csv", zstd(TEXTS["rows.csv"]), "rows.csv holds CSV, compressed by zstd"),
        ("rows.jsonl.gz", TEXTS["rows.jsonl"], "rows.jsonl.gz holds JSON lines"),
        ("rows.jsonl.gz", zstd(TEXTS["rows.jsonl"]), "rows.jsonl.gz holds JSON lines, compressed by zstd"),
        ("rows.json", TEXTS["rows.jsonl"], "rows.json holds JSON lines"),
        ("rows.jsonl", TEXTS["rows.json"], "rows.jsonl holds a JSON document"),
        ("rows.csv", TEXTS["rows.jsonl"], "rows.csv holds JSON lines"),
    ],
)
def test_contents_win_over_names_and_a_note_says_so(tmp_path, name, content, note):
    source = write(tmp_path, content, name)
    assert values(source) == ROWS
    assert source_notes(source, {}, None, 0)[0] == f"{note}, and is read as such"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json", "rows.arrow", "rows.dat", "rows"])
def test_a_parquet_file_is_read_as_one_whatever_its_name(tmp_path, name):
    source = write_parquet(tmp_path, pa.Table.from_pylist(ROWS), name)
    assert values(source) == ROWS
    assert source_notes(source, {}, None, 0) == (f"{name} holds a Parquet file, and is read as such",)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file_is_read_as_one_whatever_its_name(tmp_path, name, new):
    table = pa.Table.from_pylist(ROWS)
    with new(str(tmp_path / name), table.schema) as writer:
        writer.write_table(table)
    assert values(str(tmp_path / name)) == ROWS


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"\xff\xfe{\x00", "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff\x00{", "UTF-16 text"),
        ('{"a"'.encode("utf-16-le"), "UTF-16 text without a mark; convert it: iconv -f UTF-16LE"),
        ('[{"a"'.encode("utf-16-be"), "UTF-16 text without a mark; convert it: iconv -f UTF-16BE"),
        (b"\xff\xfe\x00\x00{\x00\x00\x00", "UTF-32 text"),
        (b"PK\x03\x04rest", "a zip archive or a workbook; unpack it, or save the workbook as CSV"),
        (b"name" + b"\x00" * 253 + b"ustar\x0000", "a tar archive"),
        (b"SQLite format 3\x00", "an SQLite database"),
        (b"Obj\x01", "an Avro file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS .*git lfs pull"),
        (b"\n <!DOCTYPE html><html>", "a web page"),
        (b"<HTML>", "a web page"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_file_of_another_kind_is_named(tmp_path, start, words, name):
    with pytest.raises(ContractError, match=f"{name} must be UTF-8 text, Parquet or Arrow, found {words}"):
        read_source(write(tmp_path, start, name), {}, None, 0)


def test_a_tar_archive_in_gzip_is_named(tmp_path):
    tar = b"name" + b"\x00" * 253 + b"ustar\x0000" + b"\x00" * 512
    with pytest.raises(ContractError, match="found a tar archive"):
        read_source(write(tmp_path, gzip.compress(tar, mtime=0), "rows.jsonl.gz"), {}, None, 0)


@pytest.mark.parametrize("header", [b"PAR1,PAR2", b"ORCID,name", b"BZh,x", b"FEA1,FEA2", b"ARROW1,x", b"PARENT,x"])
def test_a_column_named_like_a_mark_is_no_mark(tmp_path, header):
    [value] = values(write(tmp_path, header + b"\n1,2\n", "rows.csv"))
    assert list(value.values()) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.parquet", b'{"a": 1}\n', "must be a Parquet file, found other content, which begins with"),
        ("rows.arrow", b"", "must be an Arrow file, found an empty file"),
    ],
)
def test_text_under_a_columnar_name_is_an_error(tmp_path, name, content, words):
    with pytest.raises(ContractError, match=words):
        read_source(write(tmp_path, content, name), {}, None, 0)


def test_parquet_in_gzip_is_an_error(tmp_path):
    content = Path(write_parquet(tmp_path, pa.Table.from_pylist(ROWS))).read_bytes()
    with pytest.raises(ContractError, match="must not be compressed as a whole, found a Parquet file in gzip"):
        read_source(write(tmp_path, gzip.compress(content, mtime=0), "rows.parquet.gz"), {}, None, 0)


def test_a_name_that_promises_nothing_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match=r"must be a file that ends in \.jsonl, .*\.parquet, .*; got .*rows\.txt"):
        read_source(write(tmp_path, lines(*ROWS), "rows.txt"), {}, None, 0)


@pytest.mark.parametrize(
    ("name", "content", "reasons"),
    [
        # Lists, one a line, are lines: faulty rows, not a document.
        ("rows.jsonl", b'[{"role": "user"}]\n[{"role": "user"}]\n', ["not_an_object", "not_an_object"]),
        ("rows.jsonl", b'["not", "an", "object"]\n', ["not_an_object"]),
        ("rows.jsonl", b'[{"a": 1}]\n{"b": 2}\n', ["not_an_object", None]),
        ("rows.json", b'{"a": 1,}\n{"b": 2}\n', ["trailing_comma", None]),
        ("rows.jsonl", b'[\n{"a": 1},\n{"a": 2}\n]\n', [None, None]),
        ("rows.json", b'{"data": [{"a": 1},\n{"a": 2}]}', [None, None]),
        ("rows.jsonl", b'{\n  "data": [{"a": 1}]\n}\n', [None]),
        ("rows.jsonl", b'prompt,answer\nx,"y"\n', ["not_json", "not_json"]),
    ],
)
def test_lines_and_documents_are_told_apart(tmp_path, name, content, reasons):
    assert [row.reason for row in read(write(tmp_path, content, name))] == reasons


def test_json_lines_of_long_rows_are_told_from_a_document(tmp_path):
    content = lines({"text": "x" * 500_000}, {"text": "y"})
    assert [row.row for row in read(write(tmp_path, content, "rows.json"))] == [1, 2]
