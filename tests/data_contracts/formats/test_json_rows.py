"""Bytes of one JSON object: the value, or the fault by name; the quick way and the careful way say the same."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_contracts.formats.json_rows import MAX_DEPTH, mend_texts, parse_row, parse_rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
# Pieces of broken JSON, close enough to real rows to get far into a parser.
PIECES = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ":", ",", '"', '"a"', '"b"', '"a:b"', r"\u003a", r'"\u0000"', r'"\ud83d"', r'"\\u0000"']
        + ["1", "-0", "1e999", "12345678901234567890", "NaN", "null", " ", "\t", "\x00", "é", "\ufeff"]
        + [r'"\ud83d\ude00"']
    ),
    max_size=10,
).map(lambda pieces: "".join(pieces).encode())


def quickly(*raws: bytes):
    return parse_rows("rows.jsonl", 1, raws, b"\n".join(raws), skip_blank=False)


@settings(max_examples=50, deadline=None)
@given(st.lists(OBJECTS, max_size=4), st.booleans())
def test_what_json_writes_is_read_back(objects, ascii_only):
    raws = [json.dumps(value, ensure_ascii=ascii_only).encode() for value in objects]
    rows = quickly(*raws)
    assert [row.raw for row in rows] == raws
    for row, value in zip(rows, objects, strict=True):
        has_nul = "\\u0000" in json.dumps(value).replace("\\\\", "")
        assert row.reason == ("nul_byte" if has_nul else None)
        if not has_nul:
            assert row.value == value and repr(row.value) == repr(value)  # 1 and 1.0 are equal, but not the same


@settings(deadline=None)
@given(st.lists(PIECES, max_size=4))
@example([b'{"a":":","a":1}'])
@example([b'{"a":1,"a":"\\u003a"}'])
@example([b'{"a":1}', b'{"b":2,"b":2}'])
@example([b'{"a":12345678901234567890}'])
@example([b'{"a":"\\u0000"}'])
def test_the_quick_way_and_the_careful_way_agree(raws):
    careful = [parse_row("rows.jsonl", number, raw) for number, raw in enumerate(raws, start=1)]
    assert quickly(*raws) == careful
    assert repr(quickly(*raws)) == repr(careful)


@settings(deadline=None)
@given(st.lists(st.tuples(TEXTS, VALUES), min_size=1, max_size=4))
def test_a_repeated_key_is_seen_whatever_the_texts_hold(pairs):
    pairs = [(key.replace("\x00", ""), value) for key, value in pairs]
    text = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs) + "}"
    [row] = quickly(text.encode())
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        assert row.reason == "repeated_key"
    else:
        assert row.reason in (None, "nul_byte")


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"prompt": "caf\xe9"}', "invalid_utf8", "byte 0xe9 at offset 15"),
        (b'{"answer": NaN}', "not_json", "NaN"),
        (b'{"answer": 1e999}', "not_json", "1e999"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not_json", "digit"),
        (b'{"a":' * 100_000, "not_json", "deep"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "not_json", f"at most {MAX_DEPTH} levels"),
        (b'{"prompt": "x"', "not_json", "column 15"),
        (b'{"prompt": "a\x00b"', "not_json", "found 1; was the file cut off"),
        (b'{"prompt": "x",, "answer": "y"}', "not_json", "column 16"),
        (b'{"prompt": "a\tb"}', "not_json", "control character"),
        (b"{'prompt': 'x'}", "not_json", "column 2"),
        (b'{"prompt": "x", "prompt": "y"}', "repeated_key", "'prompt' twice"),
        (b'{"a": {"b": 1, "b": 2}}', "repeated_key", "'b' twice"),
        (b'{"a": 1, "a": 2,}', "repeated_key", "'a' twice"),
        (rb'{"a": 1, "\u0061": 2}', "repeated_key", "'a' twice"),
        (b'"text"', "not_an_object", "a text"),
        (b"null", "not_an_object", "null"),
        (b"3", "not_an_object", "a number"),
        (b"[1, 2,]", "not_an_object", "a list"),
        (b"", "not_json", "Expecting value"),
    ],
)
def test_a_fault_is_named(line, reason, words):
    [row] = quickly(line)
    assert (row.value, row.mended, row.raw, row.reason) == (None, None, line, reason)
    assert words in row.detail


@pytest.mark.parametrize(
    ("line", "reason", "words", "mended"),
    [
        (b'{"prompt": "a\x00b"}', "nul_byte", "found 1", {"prompt": "ab"}),
        (b'{"prompt": "x"}\x00\x00', "nul_byte", "found 2", {"prompt": "x"}),
        (rb'{"prompt": "a\u0000b"}', "nul_byte", r"found \u0000", {"prompt": "ab"}),
        (rb'{"prompt": "\ud83d alone"}', "lone_surrogate", r"\ud83d", {"prompt": "\ufffd alone"}),
        (rb'{"deep": [{"\udc00": 1}]}', "lone_surrogate", r"\udc00", {"deep": [{"\ufffd": 1}]}),
        (b'{"a": [1, 2, ], "b": ",]",}', "trailing_comma", "column 14", {"a": [1, 2], "b": ",]"}),
        (rb'{"a": "\",}", "b": 1 , }', "trailing_comma", "column", {"a": '",}', "b": 1}),
    ],
)
def test_a_fault_that_can_be_mended_carries_what_the_row_says_then(line, reason, words, mended):
    [row] = quickly(line)
    assert (row.value, row.reason, row.mended) == (None, reason, mended)
    assert words in row.detail


@pytest.mark.parametrize(
    "line", [b'{"a": "x\x00",}', rb'{"a": "\u0000\ud800"}', rb'{"a": "\ud800",}'], ids=["nul", "escapes", "comma"]
)
def test_two_faults_at_once_are_not_mended(line):
    # Each reason has a policy of its own: to repair one must not let the other through.
    [row] = quickly(line)
    assert (row.value, row.mended, row.reason) == (None, None, "not_json")
    assert "more than one fault" in row.detail


def test_keys_that_a_mend_makes_equal_are_a_fault_of_their_own():
    [row] = quickly(rb'{"a": 1, "a\u0000": 2}')
    assert (row.reason, row.mended) == ("repeated_key", None)


def test_good_rows_beside_bad_ones_stay_good():
    rows = quickly(b'{"a": ":"}', b"{", b'{"a": 1, "a": 2}', rb'{"b": "\\u0000"}', b'\xef\xbb\xbf{"c": 1}')
    assert [row.reason for row in rows] == [None, "not_json", "repeated_key", None, None]
    assert [row.value for row in rows if row.value] == [{"a": ":"}, {"b": "\\u0000"}, {"c": 1}]


@pytest.mark.parametrize("number", [2**63 - 1, 2**64 - 1, 2**64, -(2**63) - 1, 10**19, -(10**18), 10**40, 0])
def test_integers_keep_every_digit(number):
    [row] = quickly(b'{"n": %d}' % number)
    assert row.value == {"n": number} and type(row.value["n"]) is int


@pytest.mark.parametrize("text", ["0.0", "1.0", "0.1", "-0.0", "1e5", "5e-324", "0.12345678901234567890123", "1.5e300"])
def test_floats_stay_floats(text):
    # Case pq-07: 1.0 must not become 1, nor the other way round.
    [row] = quickly(f'{{"n": {text}}}'.encode())
    assert type(row.value["n"]) is float
    assert row.value["n"] == float(text) and math.copysign(1, row.value["n"]) == math.copysign(1, float(text))


def test_nesting_up_to_the_bound_is_read():
    line = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert quickly(line)[0].reason is None
    assert parse_row("rows.jsonl", 1, line).reason is None


def test_escapes_that_spell_valid_text_are_kept():
    [row] = quickly(rb'{"a": "\ud83d\ude00", "b": "\\u0000 is an escape", "c": "\u00e9", "d\u003a": "\u003A"}')
    assert row.value == {"a": "😀", "b": "\\u0000 is an escape", "c": "é", "d:": ":"}


def test_mended_texts_are_counted_by_reason():
    mends = []
    assert mend_texts({"a": ["x\x00", {"b\udfff": 1}]}, mends) == {"a": ["x", {"b\ufffd": 1}]}
    assert [reason for reason, _ in mends] == ["nul_byte", "lone_surrogate"]
