"""Files that lie elsewhere: object stores through fsspec, web servers, and what they say when they can't."""

from __future__ import annotations

import functools
import gzip
import http.server
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from data_contracts.errors import ContractError, SettingsError, StorageUnavailable
from data_contracts.formats import read_source, source_digest
from data_contracts.formats.streams import PACKAGES, reaching
from tests.data_contracts.formats.reading import lines, read, values, write, write_parquet


@pytest.fixture
def store():
    """An object store in memory, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


class NoCredentialsError(Exception):
    """Named as that of botocore."""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves whole files only: it knows no ranges."""

    def log_message(self, format, *args):
        pass


class QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that hangs up is no news."""


@pytest.fixture
def web(tmp_path):
    """A web server over tmp_path; gives its URL."""
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with QuietServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_object_is_read_like_a_file(store, tmp_path):
    store.pipe("/bucket/rows.jsonl", lines({"a": 1}, {"a": 2}))
    rows = read("memory://bucket/rows.jsonl")
    assert [(row.source, row.row, row.value) for row in rows] == [
        ("rows.jsonl", 1, {"a": 1}),
        ("rows.jsonl", 2, {"a": 2}),
    ]
    local = write(tmp_path, lines({"a": 1}, {"a": 2}))
    assert source_digest("memory://bucket/rows.jsonl", {}, None, 0) == source_digest(local, {}, None, 0)


def test_objects_of_every_kind(store, tmp_path):
    table = pa.table({"a": ["1", None]})
    for name, content in {
        "rows.csv": b"a,b\n1,\n",
        "rows.json.gz": gzip.compress(b'[{"a": "1", "b": null}]', mtime=0),
        "rows.parquet": Path(write_parquet(tmp_path, {"a": ["1"], "b": pa.nulls(1)})).read_bytes(),
    }.items():
        store.pipe(f"/bucket/{name}", content)
        assert values(f"memory://bucket/{name}") == [{"a": "1", "b": None}]
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        sink = pa.BufferOutputStream()
        with new(sink, table.schema) as writer:
            writer.write_table(table)
        store.pipe("/bucket/rows.arrow", sink.getvalue().to_pybytes())
        assert values("memory://bucket/rows.arrow") == [{"a": "1"}, {"a": None}]


def test_globs_and_folders_of_a_store(store):
    for name in ("b.jsonl", "a.jsonl", "deep/er/c.jsonl", ".hidden.jsonl"):
        store.pipe(f"/bucket/set/{name}", lines({"from": name}))
    assert [row.source for row in read("memory://bucket/set/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    for source in ("memory://bucket/set/**/*.jsonl", "memory://bucket/set", "memory://bucket/set/"):
        assert [row.source for row in read(source)] == ["a.jsonl", "b.jsonl", "deep/er/c.jsonl"]


def test_an_absent_object_names_its_neighbours(store):
    store.pipe("/bucket/train.jsonl", lines({"a": 1}))
    with pytest.raises(SettingsError, match=r"found no file memory://bucket/trian\.jsonl; near: train\.jsonl"):
        read_source("memory://bucket/trian.jsonl", {}, None, 0)
    with pytest.raises(SettingsError, match=r"its folder does not exist either$"):
        read_source("memory://elsewhere/train.jsonl", {}, None, 0)


def test_an_empty_object_is_an_error(store):
    store.pipe("/bucket/rows.jsonl", b"")
    with pytest.raises(ContractError, match="found an empty file"):
        read_source("memory://bucket/rows.jsonl", {}, None, 0)


def test_a_protocol_without_its_package_says_what_to_install():
    with pytest.raises(SettingsError, match="oss:// needs the package ossfs: pip install ossfs"):
        read_source("oss://bucket/rows.jsonl", {}, None, 0)
    assert (PACKAGES["s3"], PACKAGES["gs"]) == ("s3fs", "gcsfs")


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(SettingsError, match=r"must be one that fsspec knows \(s3://, .*\); got s4://bucket/rows.jsonl"):
        read_source("s4://bucket/rows.jsonl", {}, None, 0)


def test_a_web_file_is_read_in_order_without_ranges(tmp_path, web):
    write(tmp_path, lines(*({"n": n, "text": "x" * 100} for n in range(20_000))))
    rows = read(f"{web}/rows.jsonl?download=true")
    assert len(rows) == 20_000 and rows[-1].value["n"] == 19_999 and rows[0].source == "rows.jsonl"
    local = source_digest(str(tmp_path / "rows.jsonl"), {}, None, 0)
    assert source_digest(f"{web}/rows.jsonl", {}, None, 0) == local


def test_a_server_without_ranges_gives_no_parquet(tmp_path, web):
    numbers = [
        number * 2_654_435_761 % 2**61 for number in range(1_500_000)
    ]  # 12 MB: more than fsspec asks for at once
    write_parquet(tmp_path, {"a": numbers}, use_dictionary=False, compression="none")
    with pytest.raises(SettingsError, match="must be served with ranges; download it first"):
        read(f"{web}/rows.parquet")


def test_an_absent_web_file_is_an_error(web):
    with pytest.raises(SettingsError, match=r"found no file http://.*/absent\.jsonl"):
        read_source(f"{web}/absent.jsonl", {}, None, 0)


def test_a_server_that_does_not_answer_may_answer_later():
    with pytest.raises(StorageUnavailable, match=r"cannot read http://127\.0\.0\.1:9/rows\.jsonl"):
        read_source("http://127.0.0.1:9/rows.jsonl", {}, None, 0)


@pytest.mark.parametrize(
    ("raised", "path", "expected"),
    [
        (FileNotFoundError("x"), "s3://b/x", SettingsError),
        (PermissionError("Access Denied"), "s3://b/x", SettingsError),
        (OSError(5, "Input/output error"), "/x", StorageUnavailable),
        (RuntimeError("throttled"), "s3://b/x", StorageUnavailable),
        (NoCredentialsError("none"), "s3://b/x", SettingsError),
        (RuntimeError("ours"), "/x", RuntimeError),
        (ContractError("ours"), "s3://b/x", ContractError),
    ],
)
def test_what_stores_raise_becomes_an_error_that_says_whether_to_try_again(raised, path, expected):
    with pytest.raises(expected) as caught, reaching(path):
        raise raised
    assert type(caught.value) is expected
