"""One name for every kind of source; whatever a file holds, it ends as rows or as one of our errors."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats import PREFIXES, SOURCES, read_source, source_digest
from data_contracts.formats.kinds import KINDS
from data_contracts.reasons import REASONS
from tests.data_contracts.formats.reading import is_plain, lines, read, write

ROWS = [{"prompt": 'a, "b"', "n": [1, 2.5]}, {"prompt": "é\n", "n": None}, {"prompt": "", "n": []}]


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def arrow() -> bytes:
    file = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


CONTENTS = [
    lines(*ROWS),
    json.dumps(ROWS).encode(),
    json.dumps({"data": ROWS, "more": [1]}, indent=1).encode(),
    b'prompt,n\n"a, ""b""",1\n"two\nlines",\nx,2\n',
    parquet(),
    arrow(),
]
PIECES = [b"", b'"', b"{", b"}", b"[", b"]", b",", b"\n", b"\r", b"\x00", b"\xff", b"\\", b":", b"\xef\xbb\xbf"]
PIECES += [b'\\ud800"', b"\\u0000"]


@st.composite
def damaged(draw):
    """A good file, in which a few places are cut out or written over."""
    content = draw(st.sampled_from(CONTENTS))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 8)))
        content = content[:start] + draw(st.sampled_from(PIECES)) + content[end:]
    return content


@settings(deadline=None)
@given(damaged() | st.binary(max_size=40), st.sampled_from(sorted(KINDS)))
def test_whatever_a_file_holds_ends_as_rows_or_as_an_error_of_ours(tmp_path_factory, content, ending):
    source = write(tmp_path_factory.getbasetemp(), content, f"rows{ending}")
    try:
        rows = read(source)
    except (ContractError, SettingsError) as error:
        assert str(error)
        return
    assert rows
    for row in rows:
        assert (row.value is None) == (row.reason is not None)
        assert is_plain(row.value) and is_plain(row.mended)
        json.dumps(row.value, allow_nan=False)
        if row.reason is not None:
            assert (row.mended is not None) == (REASONS[row.reason].mend is not None)
    assert len({row.row for row in rows}) == len(rows)


def test_every_prefix_has_a_source():
    assert set(PREFIXES) | {"files"} == set(SOURCES)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("reasoning-gym:chain_sum", "near: reasoning_gym:"),
        ("hbu:org/name", "got 'hbu:org/name'; near: hub:"),
        ("somewhere:else", "must be a file, a folder, a glob, a URL, or reasoning_gym:NAME or hub:NAME"),
    ],
)
def test_an_unknown_kind_is_named(source, words):
    for function in (read_source, source_digest):
        with pytest.raises(SettingsError, match=words):
            function(source, {}, None, 0)
