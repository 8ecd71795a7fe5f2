"""The fast JSON text equals the one definition of it; ids are safe, stable and follow the content."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.refs import SourceRow
from data_contracts.schemas import canonical_json
from rft_core.data.examples.identity import canonical_text, row_id
from rft_core.data.faults import Rejected

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON)
def test_the_fast_text_is_the_canonical_one(value):
    assert canonical_text(value) == canonical_json(value)


@pytest.mark.parametrize(
    "value",
    [1e16, 1e22, 1e-4, 9.9e-5, 1e-5, 1e-7, 5e-324, -0.0, 0.1, 2**64, 10**30, -(2**63), "e-", "null", "\x00\x1f\x7f",
     {"é": 1, "z": 2, "😀": 3, "\uffff": 4}, {"b": None, "a": [0.00001, True]}, (1, 2)],
)  # fmt: skip
def test_values_that_the_fast_writer_may_write_otherwise(value):
    assert canonical_text(value) == canonical_json(value)


def test_floats_of_every_size():
    source = random.Random(0)
    for _ in range(20_000):
        value = source.uniform(-1, 1) * 10.0 ** source.randint(-12, 25)
        assert canonical_text([value]) == canonical_json([value])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")], {"a": {1, 2}}, {"a": b"b"}, [10**5000]])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        canonical_text(value)


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(UnicodeEncodeError):
        canonical_text({"a": "\ud800"})


def source_row(source: str = "gsm.jsonl", row: int = 1) -> SourceRow:
    return SourceRow(source, row, {}, b"")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("q-1", "q-1"),
        (1, "1"),
        ("1", "1"),
        (-3, "-3"),
        # The hash is SHA-256 of the text, so that a/b and a-b stay different.
        ("a/b", "a-b-" + hashlib.sha256(b"a/b").hexdigest()[:8]),
        ("..", "id-" + hashlib.sha256(b"..").hexdigest()[:8]),
        ("x" * 81, "x" * 71 + "-" + hashlib.sha256(b"x" * 81).hexdigest()[:8]),
    ],
)
def test_a_rows_own_id_is_made_safe(own, expected):
    assert row_id(own, source_row(), "{}") == expected


@pytest.mark.parametrize("own", [True, 1.5, ["a"], {"a": 1}, pytest.param(10**5000, id="long")])
def test_an_id_is_a_text_or_an_integer(own):
    with pytest.raises(Rejected) as caught:
        row_id(own, source_row(), "{}")
    assert caught.value.reason == "bad_id" and "id must be a text" in str(caught.value)


@pytest.mark.parametrize("own", [None, ""])
@pytest.mark.parametrize(
    ("source", "stem"),
    [
        ("gsm.jsonl", "gsm"),
        ("data/gsm.v2.jsonl.gz", "gsm.v2"),
        ("s3://bucket/train-00000-of-00002.parquet", "train-00000-of-00002"),
        ("hub:openai/gsm8k", "gsm8k"),
        ("my set.csv", "my-set-" + hashlib.sha256(b"my set").hexdigest()[:8]),
    ],
)
def test_a_row_without_an_id_is_named_by_its_content(own, source, stem):
    digits = hashlib.sha256(b'{"prompt":"2+2?"}').hexdigest()[:12]
    for row in (1, 731):
        assert row_id(own, source_row(source, row), '{"prompt":"2+2?"}') == f"{stem}-{digits}"


def test_a_generated_row_is_named_by_its_number():
    assert row_id(None, source_row("reasoning_gym:chain_sum", 731), "{}") == "chain_sum-00731"
