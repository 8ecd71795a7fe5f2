"""Metrics by hand, intervals against independent formulations."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.refs import PolicyRef
from data_contracts.schemas import RECORDS
from rft_core.config import EvaluationSettings
from rft_core.errors import ContractError, SettingsError
from rft_core.evaluation import PromptScores, bootstrap, evaluate, paired_difference, pass_at_k, prompt_scores
from tests.rft_core.rewards.tables import rollouts_table


def tables(rows: list[tuple[str, float, float | None, float | None]]) -> tuple[pa.Table, pa.Table]:
    """Rollouts and rewards from (prompt_id, temperature, component "right", reward)."""
    rollouts = rollouts_table(
        *({"prompt_id": prompt, "index": i, "temperature": t} for i, (prompt, t, _, _) in enumerate(rows))
    )
    rewards = [
        {
            "rollout_id": rollout_id,
            "group_id": group_id,
            "reward": reward,
            "components": [("format", 1.0), ("right", right)],
            "component_status": [("format", "scored"), ("right", "scored" if right is not None else "down")],
            "status": "scored" if reward is not None else "unscored",
            "reason": None if reward is not None else "down",
            "turn_rewards": None,
            "step_rewards": None,
            "grader_digest": "d",
        }
        for rollout_id, group_id, (_, _, right, reward) in zip(
            rollouts.column("rollout_id").to_pylist(), rollouts.column("group_id").to_pylist(), rows, strict=True
        )
    ]
    return rollouts, pa.Table.from_pylist(rewards, RECORDS["rewards"].schema)


# a: sampled 1, 0, unscored, 0.5 -> right in 1 of 3; greedy right. b: sampled 1, 1 -> 2 of 2; greedy wrong.
ROWS = [
    ("a", 1.0, 1.0, 1.2),
    ("b", 1.0, 1.0, 1.0),
    ("a", 1.0, 0.0, 0.2),
    ("a", 1.0, None, None),
    ("a", 1.0, 0.5, 0.7),
    ("b", 1.0, 1.0, 1.0),
    ("a", 0.0, 1.0, 1.2),
    ("b", 0.0, 0.0, 0.0),
]


def evaluated(rows=ROWS, seed: int = 0, **settings) -> dict[str, dict]:
    given = EvaluationSettings(**{"samples": 4, "pass_at": [2, 3], **settings})
    table = evaluate(*tables(rows), PolicyRef("p1", 5), 5, given, "right", seed)
    assert table.schema.equals(RECORDS["evaluations"].schema, check_metadata=True)
    return {row["metric"]: row for row in table.to_pylist()}


def test_metrics_by_hand():
    found = evaluated()
    assert {name: (row["value"], row["num_prompts"], row["num_samples"]) for name, row in found.items()} == {
        "sampled_accuracy": (pytest.approx((1 / 3 + 1) / 2), 2, 5),
        "greedy_accuracy": (0.5, 2, 2),
        "mean_reward": (pytest.approx(((1.2 + 0.2 + 0.7) / 3 + 1.0) / 2), 2, 5),
        "pass@2": (pytest.approx((2 / 3 + 1) / 2), 2, 5),  # a: 2 of the 3 pairs hold the right one
        "pass@3": (1.0, 1, 3),  # b has two samples only and is left out
    }
    assert {(row["policy_id"], row["policy_version"], row["step"], row["suite"]) for row in found.values()} == {
        ("p1", 5, 5, "heldout")
    }
    assert all(row["low"] <= row["value"] <= row["high"] for row in found.values())


def test_order_of_rows_changes_nothing():
    rollouts, rewards = tables(ROWS)
    order = pa.array([3, 1, 7, 0, 6, 2, 5, 4])
    arguments = (PolicyRef("p", 0), 0, EvaluationSettings(), "right", 3)
    first = evaluate(rollouts, rewards, *arguments)
    assert evaluate(rollouts.take(order), rewards, *arguments).equals(first)
    assert evaluate(rollouts, rewards.take(order), *arguments).equals(first)


def test_greedy_alone_and_nothing_scored():
    found = evaluated([row for row in ROWS if row[1] == 0.0], samples=0)
    assert list(found) == ["greedy_accuracy", "mean_reward"]
    assert found["mean_reward"]["value"] == pytest.approx(0.6)
    assert evaluated([("a", 1.0, None, None)]) == {}
    assert evaluated([]) == {}


def test_segments_count_once():
    rollouts, rewards = tables(ROWS)
    twice = pa.concat_tables([rollouts, rollouts.set_column(1, rollouts.schema.field(1), pa.array([1] * len(ROWS)))])
    assert prompt_scores(twice, rewards, "sampled_accuracy", "right").num_samples == 5


def test_tables_that_do_not_belong_together():
    rollouts, rewards = tables(ROWS)
    arguments = (PolicyRef("p", 0), 0, EvaluationSettings(), "right", 3)
    with pytest.raises(ContractError):
        evaluate(rollouts, rewards.slice(1), *arguments)
    with pytest.raises(ContractError):
        evaluate(rollouts.slice(1), rewards, *arguments)
    with pytest.raises(SettingsError, match=r"got 'wrong'; the table has \['format', 'right'\]"):
        prompt_scores(rollouts, rewards, "sampled_accuracy", "wrong")


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_against_enumeration(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([1] * c + [0] * (n - c), k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(expected, abs=1e-12)


# Case passk (OpenRLHF): with k = n, pass@k is whether any is right; pass@1 is the mean.
def test_passk():
    correct = np.array([1, 0, 2])
    assert pass_at_k(np.full(3, 4), correct, 4).mean() == pytest.approx(0.6666666667)
    assert pass_at_k(np.full(3, 4), correct, 1).mean() == pytest.approx(0.25)


def test_pass_at_k_of_many_samples_and_of_too_few():
    assert pass_at_k(np.array([100_000]), np.array([1]), 1000)[0] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        pass_at_k(np.array([4, 2]), np.array([0, 0]), 3)


def test_bootstrap_agrees_with_the_normal_interval():
    values = np.random.default_rng(0).binomial(1, 0.4, 400).astype(float)
    found = bootstrap(values, seed=1)
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.value == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.006)
    assert found.high == pytest.approx(values.mean() + half, abs=0.006)
    assert found == bootstrap(values, seed=1)
    assert found != bootstrap(values, seed=2)


def test_bootstrap_without_spread():
    assert bootstrap(np.array([0.3]), 0).low == bootstrap(np.array([0.3]), 0).high == 0.3


def test_paired_difference_cancels_difficulty():
    prompts = tuple(f"p{i:03d}" for i in range(200))
    difficulty = np.linspace(0, 0.8, 200)
    before = PromptScores("mean_reward", prompts, difficulty, 200)
    after = PromptScores("mean_reward", prompts, difficulty + 0.02, 200)
    change = paired_difference(before, after, seed=0)
    assert (change.value, change.low, change.high) == (pytest.approx(0.02),) * 3
    assert bootstrap(after.values_P, 0).low < bootstrap(before.values_P, 0).high  # unpaired, the intervals overlap


def test_paired_difference_uses_shared_prompts():
    before = PromptScores("pass@2", ("a", "b", "c"), np.array([0.0, 1.0, 0.5]), 12)
    after = PromptScores("pass@2", ("b", "c", "d"), np.array([1.0, 1.0, 1.0]), 12)
    change = paired_difference(before, after, seed=0)
    assert (change.value, change.num_prompts) == (0.25, 2)  # (0 + 0.5) / 2
    assert paired_difference(before, PromptScores("pass@2", ("x",), np.ones(1), 4), 0) is None
    with pytest.raises(ValueError, match="one metric"):
        paired_difference(before, PromptScores("mean_reward", ("a",), np.ones(1), 1), 0)
