"""Flips and drift, by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rft_core.errors import ContractError
from rft_core.rewards import build_grader
from rft_core.rewards.compare import Comparison, component_values
from rft_core.rewards.settings import RewardSettings
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

MAP = pa.map_(pa.large_string(), pa.float64())


def test_values_of_a_component_wherever_it_stands():
    maps = [[("a", 1.0), ("b", 2.0)], [("b", None)], [], [("b/x", 9.0), ("a", 4.0)]]
    column = pa.chunked_array([pa.array(maps[:2], MAP), pa.array(maps[2:], MAP)])
    np.testing.assert_equal(component_values(column, "a"), [1.0, np.nan, np.nan, 4.0])
    np.testing.assert_equal(component_values(column, "b"), [2.0, np.nan, np.nan, np.nan])
    np.testing.assert_equal(component_values(column.slice(1, 3), "a"), [np.nan, np.nan, 4.0])
    assert component_values(pa.chunked_array([], MAP), "a").size == 0


def scored(functions: list[dict], texts: list[str], answers: list[str | None]) -> pa.Table:
    prompts = prompts_table(*({"prompt_id": str(i), "answer": answer} for i, answer in enumerate(answers)))
    rollouts = rollouts_table(*({"prompt_id": str(i), "text": text} for i, text in enumerate(texts)))
    return build_grader(RewardSettings(functions=functions)).score(rollouts, prompts)


TEXTS, ANSWERS = ["4", "so 4", "5", "4"], ["4", "4", "4", None]
EXACT, NUMBER = {"name": "exact_match", "label": "right"}, {"name": "numeric_answer", "label": "right"}


def test_flips_of_two_graders():
    comparison = Comparison()
    comparison.add(scored([EXACT], TEXTS, ANSWERS), scored([NUMBER], TEXTS, ANSWERS), 1)
    total, right = comparison.functions()
    assert (total["name"], right["name"]) == ("reward", "right")
    for function in (total, right):
        assert function["old_mean"] == pytest.approx(1 / 3) and function["new_mean"] == pytest.approx(2 / 3)
        assert function["flips"] == [{"from": "0", "to": "1", "count": 1}]
        assert (function["rows"], function["changed"]) == (4, 1)
        assert (function["unscored_old"], function["unscored_new"]) == (1, 1)
        assert {"from": "unscored", "to": "unscored", "count": 1} in function["confusion"]
    assert comparison.steps == [{"step": 1, "rows": 4, "old_mean": 1 / 3, "new_mean": 2 / 3}]


def test_a_function_that_only_one_grader_has():
    comparison = Comparison()
    new = [EXACT, {"name": "numeric_answer", "weight": 0}]
    comparison.add(scored([EXACT], TEXTS, ANSWERS), scored(new, TEXTS, ANSWERS), 1)
    added = comparison.functions()[2]
    assert (added["name"], added["old_mean"], added["drift"]) == ("numeric_answer", None, None)
    assert {(flip["from"], flip["to"]): flip["count"] for flip in added["flips"]} == {
        ("absent", "1"): 2,
        ("absent", "0"): 1,
        ("absent", "unscored"): 1,
    }


def test_gated_rows_and_those_of_other_prompts_are_no_unscored_ones():
    gate = {"name": "answer_format", "label": "form", "pattern": "[0-9]+", "weight": 0}
    new = [gate, {**EXACT, "only_if": "form > 0"}, {"name": "numeric_answer", "when": "answer = '4'"}]
    comparison = Comparison()
    comparison.add(scored(new, TEXTS, ANSWERS), scored(new, TEXTS, ANSWERS), 1)
    found = {function["name"]: function for function in comparison.functions()}
    assert {cell["from"]: cell["count"] for cell in found["right"]["confusion"]} == {
        "1": 1,
        "0": 1,
        "gated": 1,
        "unscored": 1,
    }
    assert {cell["from"]: cell["count"] for cell in found["numeric_answer"]["confusion"]} == {
        "1": 2,
        "0": 1,
        "not applicable": 1,
    }
    assert found["right"]["old_mean"] == 0.5


def test_many_scores_are_shown_in_intervals_and_means_are_exact():
    def table(values: np.ndarray) -> pa.Table:
        ids = pa.array([str(index) for index in range(len(values))])
        nothing = pa.array([[]] * len(values), MAP)
        return pa.table({"rollout_id": ids, "reward": values, "components": nothing, "component_status": nothing})

    generator = np.random.default_rng(0)
    old, new = generator.normal(size=(2, 5000))
    comparison = Comparison()
    comparison.add(table(old[:2000]), table(new[:2000]), 1)
    comparison.add(table(old[2000:]), table(new[2000:]), 2)
    [total] = comparison.functions()
    assert total["old_mean"] == pytest.approx(old.mean(), abs=1e-12)
    assert total["drift"] == pytest.approx(new.mean() - old.mean(), abs=1e-12)
    assert sum(cell["count"] for cell in total["confusion"]) == 5000
    assert len({cell["from"] for cell in total["confusion"]}) <= 8
    assert total["changed"] == 5000


def test_other_rollouts_are_refused():
    tables = [scored([EXACT], [text], ["4"]) for text in ("4", "5")]
    other = tables[1].set_column(0, "rollout_id", pa.array(["x"], pa.large_string()))
    with pytest.raises(ContractError, match="rewards of step 3 must be of the same rollouts"):
        Comparison().add(tables[0], other, 3)
