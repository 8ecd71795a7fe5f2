"""JSON lines: physical line numbers, marks, blank lines, long lines, chunks."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError
from data_contracts.formats import read_chunks, read_source
from data_contracts.formats.json_rows import MAX_ROW_BYTES
from data_contracts.formats.jsonl import read_jsonl
from tests.data_contracts.formats.reading import lines, read, values, write


def test_messy_file_keeps_good_rows_and_names_physical_lines(tmp_path):
    # Case ds-03: BOM, CRLF, a blank line 2, a trailing comma on 4, a list on 5, a cut-off row 6.
    source = write(
        tmp_path,
        b"\xef\xbb\xbf"
        b'{"id":"a","prompt":"1+1?","answer":"2"}\r\n'
        b"\r\n"
        b'{"id":"b","prompt":"2+2?","answer":"4"}\r\n'
        b'{"id":"c","prompt":"3+3?","answer":"6",}\r\n'
        b'["not","an","object"]\r\n'
        b'{"id":"d","prompt":"4+4?","answer":"8"',
    )
    rows = read(source)
    assert [(row.source, row.row, row.reason) for row in rows] == [
        ("rows.jsonl", 1, None),
        ("rows.jsonl", 3, None),
        ("rows.jsonl", 4, "trailing_comma"),
        ("rows.jsonl", 5, "not_an_object"),
        ("rows.jsonl", 6, "not_json"),
    ]
    assert rows[0].value == {"id": "a", "prompt": "1+1?", "answer": "2"}
    assert rows[0].raw == b'{"id":"a","prompt":"1+1?","answer":"2"}'
    assert rows[1].value["answer"] == "4"
    assert rows[2].raw == b'{"id":"c","prompt":"3+3?","answer":"6",}'
    assert rows[2].mended == {"id": "c", "prompt": "3+3?", "answer": "6"}


def test_answers_of_several_types_are_read_as_they_are(tmp_path):
    # Case ds-01, as far as reading goes: nothing is guessed from the first row.
    source = write(tmp_path, lines({"answer": "5"}, {"answer": 42}, {"answer": "12b"}, {"answer": 3.5}))
    assert values(source) == [{"answer": "5"}, {"answer": 42}, {"answer": "12b"}, {"answer": 3.5}]


LINES = st.lists(
    st.sampled_from([b'{"a":1}', b'{"a":"\xc3\xa9"}', b"", b" \t", b"{", b'{"a":1,}', b'{"b":"' + b"x" * 50 + b'"}']),
    min_size=1,
)


@settings(deadline=None)
@given(LINES, st.integers(1, 40), st.booleans(), st.booleans())
def test_rows_do_not_depend_on_how_the_bytes_come(parts, block, has_end, has_returns):
    end = b"\r\n" if has_returns else b"\n"
    content = end.join(parts) + (end if has_end else b"")
    blocks = [content[start : start + block] for start in range(0, len(content), block)]
    rows = [row for chunk in read_jsonl("x", blocks) for row in chunk.rows()]
    assert rows == [row for chunk in read_jsonl("x", [content]) for row in chunk.rows()]
    expected = [(number, part) for number, part in enumerate(parts, start=1) if part.strip()]
    assert [(row.row, row.raw) for row in rows] == expected


def test_a_line_beyond_the_bound_is_a_row_of_its_beginning(tmp_path):
    long = b"x" * (MAX_ROW_BYTES + 1000)
    source = write(tmp_path, b'{"a": 1}\n' + long + b'\n{"a": 2}\n' + long + b"x" * (3 << 20) + b'\n{"a": 3}\n' + long)
    rows = read(source)
    assert [(row.row, row.reason) for row in rows] == [
        (1, None),
        (2, "line_too_long"),
        (3, None),
        (4, "line_too_long"),
        (5, None),
        (6, "line_too_long"),
    ]
    assert {len(row.raw) for row in rows if row.reason} == {MAX_ROW_BYTES + 1}
    assert f"at most {MAX_ROW_BYTES} bytes, found {MAX_ROW_BYTES + 1000};" in rows[1].detail
    assert f"found {MAX_ROW_BYTES + 1000 + (3 << 20)};" in rows[3].detail


def test_a_line_at_the_bound_is_read(tmp_path):
    text = b'{"a": "' + b"x" * (MAX_ROW_BYTES - 9) + b'"}'
    assert len(text) == MAX_ROW_BYTES
    assert [row.reason for row in read(write(tmp_path, text + b"\n" + text))] == [None, None]


def test_reading_streams(tmp_path):
    rows = read_source(write(tmp_path, b'{"prompt": "x"}\n' * 10), {}, None, 0)
    assert next(rows).row == 1
    rows.close()


def test_chunks_hold_all_rows_in_order_and_travel(tmp_path):
    count = 20_000
    source = write(tmp_path, b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 100) for n in range(count)))
    chunks = list(read_chunks(source, {}, None, 0))
    assert len(chunks) == 5  # 20,000 rows of about 123 bytes, half a mebibyte each
    assert {type(chunk).__name__ for chunk in chunks} == {"JsonLines"}
    there = [ForkingPickler.loads(ForkingPickler.dumps(chunk)) for chunk in chunks]
    rows = [row for chunk in there for row in chunk.rows()]
    assert [row.row for row in rows] == list(range(1, count + 1))
    assert [row.value["n"] for row in rows] == list(range(count))
    assert [chunk.num_rows() for chunk in there] == [len(chunk.rows()) for chunk in chunks]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_size_takes_the_first_rows_blank_lines_apart(tmp_path, size):
    source = write(tmp_path, b'{"a": 1}\n\n{"a": 2}\n{"a": 3,}\n{"a": 4}\n')
    assert [row.row for row in read(source, size)] == [1, 3, 4, 5][:size]


def test_size_is_exact_across_chunks(tmp_path):
    source = write(tmp_path, (b'{"a": "' + b"x" * 600 + b'"}\n') * 2000)
    assert [chunk.num_rows() for chunk in read_chunks(source, {}, None, 0)] == [859, 859, 282]
    assert [len(read(source, size)) for size in (858, 859, 860, 1718, 2001)] == [858, 859, 860, 1718, 2000]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error_at_once(tmp_path, content):
    with pytest.raises(ContractError, match="found an empty file"):
        read_source(write(tmp_path, content), {}, None, 0)


def test_blank_lines_alone_are_an_error(tmp_path):
    with pytest.raises(ContractError, match="at least one row, found none"):
        read(write(tmp_path, b"\n \r\n\n"))
