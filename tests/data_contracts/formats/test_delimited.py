"""CSV and TSV: headers, quoting, physical lines, delimiters, faults."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError
from data_contracts.formats import source_notes
from data_contracts.formats.delimited import read_csv
from data_contracts.formats.json_rows import MAX_ROW_BYTES
from tests.data_contracts.formats.reading import read, values, write


def records(content: bytes, block: int = 1 << 20):
    blocks = [content[start : start + block] for start in range(0, len(content), block)]
    return [row for chunk in read_csv("rows.csv", blocks) for row in chunk.rows()]


def test_values_stay_text_and_empty_fields_are_null(tmp_path):
    source = write(tmp_path, b"id,prompt,answer\n007,2+2?,4\n008,,4.0\n009,true,\n", "rows.csv")
    assert values(source) == [
        {"id": "007", "prompt": "2+2?", "answer": "4"},
        {"id": "008", "prompt": None, "answer": "4.0"},
        {"id": "009", "prompt": "true", "answer": None},
    ]


def test_a_row_is_the_line_where_its_record_begins():
    content = b'\xef\xbb\xbfprompt,answer\r\n"two\r\nlines, ""quoted""",1\r\n\r\n"x",2\r\n"a\n\n\nb",3\r\ny,4'
    rows = records(content)
    assert [(row.row, row.value) for row in rows] == [
        (2, {"prompt": 'two\r\nlines, "quoted"', "answer": "1"}),
        (5, {"prompt": "x", "answer": "2"}),
        (6, {"prompt": "a\n\n\nb", "answer": "3"}),
        (10, {"prompt": "y", "answer": "4"}),
    ]
    assert rows[0].raw == b'"two\r\nlines, ""quoted""",1'


CELLS = st.text(st.sampled_from('ab,;"\n é\t'), max_size=5)


@settings(deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 40),
)
def test_what_the_csv_module_writes_is_read_back(cells, delimiter, end, block):
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b", "c"), *cells])
    # A row of white space alone would be a blank line; all fields are quoted here, so none is.
    expected = [{name: cell or None for name, cell in zip("abc", row, strict=True)} for row in cells]
    assert [row.value for row in records(file.getvalue().encode(), block)] == expected


def test_a_wrong_number_of_fields_is_named():
    rows = records(b"a,b\n1,2\n1,2,3\n1\n4,5\n")
    assert [(row.row, row.reason) for row in rows] == [
        (2, None),
        (3, "wrong_field_count"),
        (4, "wrong_field_count"),
        (5, None),
    ]
    assert "the header's 2 fields with commas between them, found 3: '1,2,3'" in rows[1].detail
    assert rows[1].raw == b"1,2,3"


def test_bytes_that_are_no_utf8_cost_their_row_alone():
    rows = records('prompt,answer\ncafé,1\n"x\ny",2\n'.encode() + "naïve,3\n".encode("latin-1") + b"z,4\n")
    assert [row.reason for row in rows] == [None, None, "invalid_utf8", None]
    assert rows[2].row == 5 and "byte 0xef at offset 2" in rows[2].detail
    assert rows[2].raw == b"na\xefve,3"


def test_nul_bytes_are_mended():
    [row] = records(b"prompt,answer\na\x00b,1\n")
    assert (row.reason, row.value, row.mended) == ("nul_byte", None, {"prompt": "ab", "answer": "1"})


def test_a_quote_that_is_not_closed_costs_its_line_alone():
    rows = records(b'prompt,answer\n"never closed,1\nx,2\n\ny,3\n')
    assert [(row.row, row.reason) for row in rows] == [(2, "not_csv"), (3, None), (5, None)]
    assert rows[0].raw == b'"never closed,1'
    assert "unexpected end of data" in rows[0].detail
    rows = records(b'prompt,answer\n"open,1\nx,2\n"z",3\n"say "yes"",4\nw,5\n')
    # "open swallows two lines, until the quote before z; line 2 is the bad one.
    assert [(row.row, row.reason) for row in rows] == [
        (2, "not_csv"),
        (3, None),
        (4, None),
        (5, "not_csv"),
        (6, None),
    ]
    assert "read on to line 4" in rows[0].detail


def test_an_open_quote_does_not_fill_memory():
    line = b"x" * 999 + b",1\n"
    content = b'prompt,answer\n"open,1\n' + line * ((MAX_ROW_BYTES + (4 << 20)) // len(line))
    rows = records(content)
    assert [(row.row, row.reason) for row in rows[:3]] == [(2, "not_csv"), (3, None), (4, None)]
    assert len(rows) == content.count(b"\n") - 1


@pytest.mark.parametrize("block", [20, 100, 1 << 20])
def test_records_across_blocks_are_whole(block):
    cell = "line\n" * 50
    content = "prompt,answer\n" + "".join(f'"{cell}{n}",{n}\n' for n in range(20))
    rows = records(content.encode(), block)
    assert [row.value for row in rows] == [{"prompt": f"{cell}{n}", "answer": str(n)} for n in range(20)]
    assert [row.row for row in rows] == [2 + 51 * n for n in range(20)]


def test_long_fields_are_read():
    [row] = records(b"prompt,answer\n" + b"x" * 1_000_000 + b",1\n")
    assert len(row.value["prompt"]) == 1_000_000


def test_a_long_line_is_a_row_of_its_beginning():
    rows = records(b"prompt,answer\n1,2\n" + b"x" * (MAX_ROW_BYTES + 5) + b"\n3,4\n")
    assert [(row.row, row.reason) for row in rows] == [(2, None), (3, "line_too_long"), (4, None)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b"prompt;answer\na,b;c\n", "semicolons between the fields prompt, answer"),
        ("rows.tsv", b"prompt\tanswer\na,b\tc\n", "tabs between the fields prompt, answer"),
        ("rows.csv", b"prompt\tanswer\na,b\tc\n", "tabs"),
        ("rows.tsv", b'prompt,answer\n"a,b",c\n', "commas"),
    ],
)
def test_the_delimiter_is_found_in_the_header_and_said(tmp_path, name, content, words):
    source = write(tmp_path, content, name)
    assert values(source) == [{"prompt": "a,b", "answer": "c"}]
    [note] = source_notes(source, {}, None, 0)
    assert note.startswith(f"{name}: ") and words in note


def test_one_column_needs_no_delimiter():
    assert [row.value for row in records(b"prompt\nx\ny\n")] == [{"prompt": "x"}, {"prompt": "y"}]


def test_names_are_stripped_and_a_nameless_column_gets_one():
    # pandas writes its index under an empty name.
    assert [row.value for row in records(b", prompt \n0, x\n")] == [{"column 1": "0", "prompt": " x"}]


def test_a_header_may_have_line_ends():
    [row] = records(b'\n"the\nprompt",b\n1,2\n')
    assert (row.row, row.value) == (4, {"the\nprompt": "1", "b": "2"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"prompt,answer,prompt\n1,2,3\n", "must differ, found prompt more than once"),
        (b"pr\xe9mpt,b\n1,2\n", "header of rows.csv must be UTF-8"),
        ("prompt,b\n1,2\n".encode("utf-16-le"), "found NUL bytes; UTF-16 is converted with iconv"),
        (b'"prompt,b\n1,2\n', "must begin with a header"),
        (b"a,b\r1,2\r", "must begin with a header, found 'a,b.r1"),
        (b"x" * (MAX_ROW_BYTES + 9), f"a first line of {MAX_ROW_BYTES + 9} bytes"),
    ],
    ids=["twice", "latin-1", "UTF-16", "open quote", "old line ends", "long"],
)
def test_a_header_that_can_not_be_used_is_an_error(content, words):
    with pytest.raises(ContractError, match=words):
        records(content)


def test_a_header_without_rows_is_an_error(tmp_path):
    with pytest.raises(ContractError, match="at least one row, found none"):
        read(write(tmp_path, b"prompt,answer\n\n", "rows.csv"))


def test_size_takes_the_first_records(tmp_path):
    source = write(tmp_path, b'a,b\n"x\ny",1\n\n"z",2\nw,3\n', "rows.csv")
    assert [row.row for row in read(source, 2)] == [2, 5]
