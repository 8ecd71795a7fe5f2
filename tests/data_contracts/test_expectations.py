"""Each rule against columns worked by hand: which rows break it."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from data_contracts import expectations as rules
from data_contracts.schemas import BOOLS, FLOATS, TEXT, TOKENS, TURN

NAN = math.nan


def faults(rule: rules.Rule, **columns: pa.Array) -> list[int]:
    """Rows that break a rule, the same however the table is cut into chunks."""
    table = pa.table(columns)
    whole = pc.indices_nonzero(rule.faults(table)).to_pylist()
    cut = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert pc.indices_nonzero(rule.faults(cut)).to_pylist() == whole
    return whole


def text(*values: str | None) -> pa.Array:
    return pa.array(values, TEXT)


def test_one_of_lets_null_pass():
    assert faults(rules.one_of("c", "a", "b"), c=text("a", "c", None, "b", "")) == [1, 4]


def test_at_least_refuses_nan():
    assert faults(rules.at_least("c", 0), c=pa.array([0.0, -0.1, NAN, None])) == [1, 2]


def test_matches():
    assert faults(rules.matches("c", r"^[a-z_]+$", "be a code"), c=text("a_b", "A", "", None, "a\n")) == [1, 2, 4]


def test_filled_takes_texts_and_lists():
    assert faults(rules.filled("c"), c=text("a", "", None)) == [1]
    assert faults(rules.filled("c"), c=pa.array([[], [1], None], TOKENS)) == [0]


def test_finite_looks_into_lists_and_maps_and_can_be_excused():
    assert faults(rules.finite("c"), c=pa.array([0.0, math.inf, None, NAN])) == [1, 3]
    assert faults(rules.finite("c"), c=pa.array([[], [0.0, NAN], None, [1.0]], FLOATS)) == [1]
    scores = pa.array([[("a", 1.0)], [("a", None), ("b", NAN)], []], pa.map_(TEXT, pa.float64()))
    assert faults(rules.finite("c"), c=scores) == [1]
    assert faults(rules.finite("c", unless="why"), c=pa.array([NAN, NAN]), why=text("skipped", None)) == [1]


def test_json_must_be_canonical_and_of_its_kind():
    values = text('{"a":1,"b":[]}', '{"b":1,"a":2}', '{"a": 1}', "[]", "not json", None, '"é"')
    assert faults(rules.json_text("c", dict), c=values) == [1, 2, 3, 4, 6]
    assert faults(rules.json_text("c"), c=values) == [1, 2, 4, 6]


def test_aligned_lets_a_null_list_pass():
    lists = pa.array([[1, 2], [1], [], [1]], TOKENS)
    masks = pa.array([[True, False], [], [], None], BOOLS)
    assert faults(rules.aligned("m", "t"), m=masks, t=lists) == [1]


def test_within():
    assert faults(rules.within("a", "b"), a=pa.array([1.0, 2.0, 3.0]), b=pa.array([1.0, 1.0, 4.0])) == [1]


def test_given_when_holds_both_ways():
    status = text("scored", "unscored", "scored", "unscored")
    reward = pa.array([1.0, None, None, 0.0])
    assert faults(rules.given_when("r", "s", "scored"), r=reward, s=status) == [2, 3]
    assert faults(rules.given_when("a", "b"), a=text("x", None, "x"), b=text("y", "y", None)) == [1, 2]


def test_implies_says_nothing_about_other_values():
    reasons, trained = text("none", "none", "stale"), pa.array([True, False, False])
    assert faults(rules.implies("r", "none", "t", True), r=reasons, t=trained) == [1]
    assert faults(rules.implies("t", False, "a", 0.0), t=trained, a=pa.array([1.0, 0.5, 0.0])) == [1]


def test_logprobs_matter_only_where_the_policy_wrote():
    values = pa.array([[-0.5, NAN], [-0.5, NAN], [0.5], None, [None], [-math.inf], []], FLOATS)
    masks = pa.array([[True, False], [True, True], [True], [True], [True], [True], []], BOOLS)
    assert faults(rules.logprobs_where_written("v", "m"), v=values, m=masks) == [1, 2, 4, 5]


def test_logprobs_of_another_length_are_left_to_aligned():
    values, masks = pa.array([[-1.0], [5.0]], FLOATS), pa.array([[True, True], [True]], BOOLS)
    assert faults(rules.logprobs_where_written("v", "m"), v=values, m=masks) == [1]


def test_spans_lie_within_tokens():
    def turn(start: int, end: int) -> dict:
        return {"role": "assistant", "start": start, "end": end, "reward": None, "state_digest": None}

    spans = pa.array([[turn(0, 2)], [turn(0, 1), turn(1, 3)], [turn(2, 1)], []], pa.large_list(TURN))
    tokens = pa.array([[7, 8], [7, 8], [7, 8], []], TOKENS)
    assert faults(rules.spans_within("s", "t"), s=spans, t=tokens) == [1, 2]


def test_maps_have_the_same_keys():
    scores = pa.array([[("a", 1.0)], [("a", 1.0)], [("a", 1.0), ("a/tests", 3.0)]], pa.map_(TEXT, pa.float64()))
    states = pa.array([[("a", "scored")], [("b", "scored")], [("a", "scored")]], pa.map_(TEXT, TEXT))
    assert faults(rules.same_keys("c", "s"), c=scores, s=states) == [1]


def test_unique_names_the_later_rows():
    assert faults(rules.unique("a"), a=text("x", "y", "x", "x")) == [2, 3]
    assert faults(rules.unique("a", "b"), a=text("x", "x", "x"), b=pa.array([0, 1, 0])) == [2]


@pytest.mark.parametrize(
    "rule",
    [rules.one_of("c", "a"), rules.filled("c"), rules.unique("c"), rules.matches("c", "a", "be"), rules.json_text("c")],
)
def test_an_empty_table_breaks_nothing(rule):
    assert pc.indices_nonzero(rule.faults(pa.table({"c": text()}))).to_pylist() == []
