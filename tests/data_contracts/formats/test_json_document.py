"""JSON documents: arrays, objects with one list, broken elements, sizes beyond a block."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError
from data_contracts.formats.json_document import read_json
from data_contracts.formats.json_rows import MAX_ROW_BYTES
from tests.data_contracts.formats.reading import read, values, write

ROWS = [{"prompt": 'a, [b] {c} "d" \\', "n": [1, {"x": []}]}, {"prompt": "é", "n": []}, {}]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def elements(content: bytes, block: int = 1 << 20):
    blocks = [content[start : start + block] for start in range(0, len(content), block)]
    return [row for chunk in read_json("rows.json", blocks) for row in chunk.rows()]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": "1", "data": rows, "n": {"m": [1]}}])
def test_rows_are_elements_of_the_one_list(tmp_path, wrap, indent):
    source = write(tmp_path, json.dumps(wrap(ROWS), indent=indent).encode(), "rows.json")
    rows = read(source)
    assert [(row.source, row.row) for row in rows] == [("rows.json", 1), ("rows.json", 2), ("rows.json", 3)]
    assert [row.value for row in rows] == ROWS
    assert json.loads(rows[0].raw) == ROWS[0]


@settings(deadline=None)
@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4), st.integers(1, 30), st.booleans())
def test_rows_do_not_depend_on_how_the_bytes_come(rows, block, is_ascii):
    content = json.dumps(rows, ensure_ascii=is_ascii).encode()
    assert [row.value for row in elements(content, block)] == rows
    if rows:
        wrapped = json.dumps({"a": [[1], "x"], "rows": rows, "b": {}}, ensure_ascii=is_ascii).encode()
        assert [row.value for row in elements(wrapped, block)] == rows


def test_a_list_of_another_name_is_taken_when_it_is_the_only_one():
    assert [row.value for row in elements(b'{"tags": ["a"], "train": [{"a": 1}], "empty": []}')] == [{"a": 1}]


def test_data_is_taken_before_lists_that_follow():
    assert [row.value for row in elements(b'{"data": [{"a": 1}], "sources": [{"b": 1}]}')] == [{"a": 1}]


def test_a_broken_element_is_one_row():
    rows = elements(b'[{"a": 1}, {"a": 1,}, 5, {"a" 1}, , {"a": 1, "a": 2}, {"a": 2}]')
    assert [row.reason for row in rows] == [
        None,
        "trailing_comma",
        "not_an_object",
        "not_json",
        "not_json",
        "repeated_key",
        None,
    ]
    assert [row.row for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[1].mended == {"a": 1} and rows[4].raw == b""


def test_a_comma_after_the_last_element_is_a_row_of_nothing():
    assert [row.reason for row in elements(b'[{"a": 1},\n]')] == [None, "not_json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"a": 1}, {"a": ', "must be a whole document, found its end"),
        (b'[{"a": 1}', "must be a whole document"),
        (b'[{"a": "x', "must be a whole document"),
        (b'{"data": [{"a": 1}], "b": [1, 2', "must be a whole document"),
        (b'{"data": [{"a": 1}]', "found '' where a key must be"),
        (b'[{"a": 1}] [{"a": 2}]', "found more: '\\[{\"a\": 2}\\]'"),
        (b'{\n"a": [{"b": 1}]}\n{\n"a": 2}', "name it .jsonl"),
        (b'{"train": [{"a": 1}], "test": [{"a": 2}]}', "'train' and 'test'"),
        (b'{"data": [{"a": 1}], "data": [{"a": 2}]}', "found 'data' twice"),
        (b'{"prompt": "x", "answer": "y"}', "found an object with prompt, answer;.*put it in a list"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "found an object with messages;"),
        (b'{"prompt": {"0": "x"}, "answer": {"0": "y"}}', "orient='records'"),
        (b'{"prompt": ["x"], "answer": ["y"]}', "orient='records'"),
        (b"{}", "no keys"),
        (b"{a: 1}", "found 'a: 1}' where a key must be"),
        (b'{"a": 1]}', "] without its \\["),
        (b"prompt", "must begin with \\[ or {, found 'prompt'"),
    ],
)
def test_another_form_is_named(content, words):
    with pytest.raises(ContractError, match=words):
        elements(content)


def test_an_empty_list_is_an_error(tmp_path):
    with pytest.raises(ContractError, match="at least one row, found none"):
        read(write(tmp_path, b"[ ]", "rows.json"))


def test_a_quote_that_is_never_closed_does_not_fill_memory():
    content = b'[{"a": 1}, {"a": "' + b"x" * (MAX_ROW_BYTES + (4 << 20))
    with pytest.raises(ContractError, match="a quote that is never closed; it begins"):
        elements(content)


def test_many_rows_come_in_chunks():
    content = b"[" + b",".join(b'{"n": %d, "text": "%s"}' % (n, b"x" * 300) for n in range(5000)) + b"]"
    chunks = list(read_json("rows.json", [content]))
    assert len(chunks) > 2 and sum(chunk.num_rows() for chunk in chunks) == 5000
    assert [row.value["n"] for chunk in chunks for row in chunk.rows()] == list(range(5000))


def test_size_takes_the_first(tmp_path):
    source = write(tmp_path, json.dumps([{"n": n} for n in range(9)]).encode(), "rows.json")
    assert values(source, 4) == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}]
