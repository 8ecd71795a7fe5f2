"""The advantage stage where experts stand beside own rollouts, where the best are selected, and what rows weigh."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_contracts.validation import check_table
from rft_core.config import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.credit_weights import copies_to_fill
from tests.rft_core.credit_tables import tables

EXPERT = {"origin": "dataset", "finish_reason": "given", "policy_id": "dataset", "components": {"given": 1.0}}
# Rewards 1 and 0 of own rollouts: z-scores +- .7071 (std .7071); an expert's reward in the same group.
OWN = [{"id": "a0", "group": "a", "reward": 1.0}, {"id": "a1", "group": "a", "reward": 0.0}]
GIVEN = [{"id": "a2", "group": "a", "reward": 1.0, **EXPERT}, {"id": "e0", "group": "e", "reward": 1.0, **EXPERT}]


def credit(*rows, order=None, max_groups=None, weights=None, seed=0, scores=None, budget=10, **settings):
    rollouts, rewards = tables(*rows)
    if order is not None:
        rollouts, rewards = rollouts.take(order), rewards.take(order[::-1])
    table, metrics = compute_advantages(
        rollouts,
        rewards,
        AlgorithmSettings(**settings),
        budget,
        7,
        max_groups=max_groups,
        expert_weights=weights,
        token_scores=scores,
        seed=seed,
    )
    check_table(table, "advantages")
    return {row["rollout_id"]: row for row in table.to_pylist()}, metrics


def told(rows, *names) -> dict:
    return {rollout_id: tuple(row[name] for name in names) for rollout_id, row in rows.items()}


@pytest.mark.parametrize("name", ["mix", "chord"])
def test_experts_enter_no_statistic_of_own_groups(name):
    rows, metrics = credit(*OWN, *GIVEN, name=name)
    assert told(rows, "term", "is_trained", "drop_reason", "weight") == {
        "a0": ("own", True, "none", 1.0),
        "a1": ("own", True, "none", 1.0),
        "a2": ("expert", True, "none", 1.0),
        "e0": ("expert", True, "none", 1.0),
    }
    found = {rollout_id: row["advantage"] for rollout_id, row in rows.items()}
    assert found == pytest.approx({"a0": 0.7071058, "a1": -0.7071058, "a2": 1.0, "e0": 1.0}, abs=1e-6)
    assert (metrics["reward"], metrics["rows"], metrics["share/expert"]) == (0.5, 4, 0.5)
    assert "rewards/given/mean" not in metrics  # what the data says is no reward of the policy
    alone, _ = credit(*OWN, name=name)
    assert [alone[key] for key in ("a0", "a1")] == [rows[key] for key in ("a0", "a1")]
    assert credit(*OWN, *GIVEN, name=name, order=[3, 1, 0, 2])[0] == rows


def test_without_a_loss_over_experts_their_rows_are_left_out():
    rows, _ = credit(*OWN, *GIVEN, name="grpo")
    assert told(rows, "term", "is_trained", "drop_reason")["e0"] == ("expert", False, "filtered")


@pytest.mark.parametrize(("change", "reason"), [({"reward": None}, "unscored"), ({"mask": [False, False]}, "filtered")])
def test_what_no_expert_can_teach_says_why(change, reason):
    rows, _ = credit(*OWN, GIVEN[1] | change, name="mix")
    assert told(rows, "is_trained", "drop_reason", "advantage")["e0"] == (False, reason, 0.0)


def test_shaping_is_of_own_rows():
    """A clip at .5 and a penalty of -1 for the longest own completions; an expert's reward is what the data says."""
    own = [{**OWN[0], "tokens": 10}, OWN[1]]
    rows, metrics = credit(
        *own, {**GIVEN[1], "tokens": 10}, name="mix", advantage="none", reward_clip_high=0.5, overlong_buffer_tokens=5
    )
    assert {key: row["advantage"] for key, row in rows.items()} == {"a0": -0.5, "a1": 0.0, "e0": 1.0}
    assert metrics["reward_shaped"] == -0.25


def test_a_trajectory_weighs_by_its_reward_and_its_source():
    far = {**GIVEN[1], "id": "f0", "group": "f", "reward": 0.25}
    rows, _ = credit(*OWN, *GIVEN, far, name="mix", weights={"a": 2.0, "e": 0.0})
    assert told(rows, "weight", "advantage", "is_trained", "drop_reason") == {
        "a0": (1.0, rows["a0"]["advantage"], True, "none"),  # the weight is of the expert's example, not of the prompt
        "a1": (1.0, rows["a1"]["advantage"], True, "none"),
        "a2": (2.0, 1.0, True, "none"),
        "e0": (0.0, 0.0, False, "filtered"),
        "f0": (1.0, 0.25, True, "none"),
    }


def test_experts_have_no_credit_per_token_and_no_kl():
    """batch_whiten is of own tokens: rewards 1 and 0 of 3 tokens each, sqrt(6 x .25 / 5) = .5477. Scores of experts are
    not asked for."""
    scores = pa.table(
        {
            "rollout_id": ["a0", "a1"] * 2,
            "segment": [0] * 4,
            "scorer": ["old"] * 2 + ["reference"] * 2,
            "values": [[0.0] * 3] * 4,
        }
    )
    rows, _ = credit(*OWN, *GIVEN, name="mix", advantage="batch_whiten", reward_kl_coefficient=0.5, scores=scores)
    assert rows["a0"]["token_advantages"] == pytest.approx([0.912871] * 3, abs=1e-5)
    assert rows["e0"]["token_advantages"] is None and rows["e0"]["advantage"] == rows["a2"]["advantage"] == 1.0


def test_an_experts_prompt_needs_no_greedy_completion():
    greedy = {"id": "a-greedy", "group": "g", "prompt_id": "a", "reward": 0.25, "purpose": "baseline"}
    rows, _ = credit(*OWN, *GIVEN, greedy, name="mix", advantage="greedy_baseline")
    assert {key: row["advantage"] for key, row in rows.items()} == {"a0": 0.75, "a1": -0.25, "a2": 1.0, "e0": 1.0}


# Selection.

GROUPS = [
    {"id": "a0", "group": "a", "reward": 1.0},
    {"id": "a1", "group": "a", "reward": 2.0},
    {"id": "a2", "group": "a", "reward": 2.0},
    {"id": "b0", "group": "b", "reward": 0.5},
    {"id": "b1", "group": "b", "reward": None},
]


def test_raft_trains_on_the_best_that_passes():
    rows, metrics = credit(*GROUPS, name="raft")
    assert told(rows, "term", "advantage", "is_trained", "drop_reason") == {
        "a0": ("selected", 0.0, False, "filtered"),
        "a1": ("selected", 1.0, True, "none"),  # of two equal ones that of the lower index
        "a2": ("selected", 0.0, False, "filtered"),
        "b0": ("selected", 0.0, False, "filtered"),
        "b1": ("selected", 0.0, False, "unscored"),
    }
    assert metrics["rows_trained"] == 1
    assert credit(*GROUPS, name="raft", order=[2, 4, 1, 3, 0])[0] == rows
    every, _ = credit(*GROUPS, name="raft", select="passing", pass_threshold=0.5)
    assert [key for key, row in every.items() if row["is_trained"]] == ["a0", "a1", "a2", "b0"]
    assert {row["advantage"] for row in every.values() if row["is_trained"]} == {1.0}


def test_what_is_cut_is_not_selected():
    cut = {**GROUPS[1], "finish_reason": "length", "status": "truncated"}
    for truncated, chosen in (("train", "a1"), ("mask", "a2"), ("drop", "a2")):
        rows, _ = credit(GROUPS[0], cut, GROUPS[2], name="raft", truncated=truncated)
        assert [key for key, row in rows.items() if row["is_trained"]] == [chosen]


def test_another_advantage_selects_what_it_rewards():
    rows, _ = credit(*GROUPS, name="raft", advantage="group_mean")  # mean 5 / 3; the lone b0 has no signal
    assert [key for key, row in rows.items() if row["is_trained"]] == ["a1", "a2"]


# Filling.


def group(name: str, *rewards: float) -> list[dict]:
    return [{"id": f"{name}{i}", "group": name, "reward": reward} for i, reward in enumerate(rewards)]


def test_groups_with_signal_count_for_those_without():
    rows = [*group("a", 1, 0), *group("b", 0, 0), *group("c", 0, 1), *group("d", 1, 1)]
    found, _ = credit(*rows, name="dapo", max_groups=4, duplicate_to_fill=True)
    weight = {key: row["weight"] for key, row in found.items() if row["is_trained"]}
    assert weight == {"a0": 2.0, "a1": 2.0, "c0": 2.0, "c1": 2.0}
    odd, _ = credit(*rows, name="dapo", max_groups=5, duplicate_to_fill=True)
    weights = {key: row["weight"] for key, row in odd.items() if row["is_trained"]}
    assert sorted(weights.values()) == [2, 2, 3, 3] and weights["a0"] == weights["a1"]  # whole groups
    plain, _ = credit(*rows, name="dapo", max_groups=4)
    assert {row["weight"] for row in plain.values()} == {1.0}
    assert [row["advantage"] for row in plain.values()] == [row["advantage"] for row in found.values()]
    none, _ = credit(*group("b", 0, 0), name="dapo", max_groups=4, duplicate_to_fill=True)
    assert not any(row["is_trained"] for row in none.values())


def test_filling_and_signal_look_at_own_groups():
    rows = [*group("a", 1, 0), *group("b", 0, 0), *GIVEN]
    found, _ = credit(*rows, name="mix", max_groups=2, dynamic_sampling=True, duplicate_to_fill=True)
    assert {key: row["weight"] for key, row in found.items() if row["is_trained"]} == {
        "a0": 2.0, "a1": 2.0, "a2": 1.0, "e0": 1.0
    }  # fmt: skip


def test_what_is_left_over_goes_by_lot():
    groups = [f"g{number}" for number in range(5)]
    counts = [copies_to_fill(groups, 7, seed) for seed in range(40)]
    assert all(sorted(found.values()) == [1, 1, 1, 2, 2] for found in counts)
    assert {name for found in counts for name in groups if found[name] == 2} == set(groups)
    assert copies_to_fill(groups, 3, 0) == dict.fromkeys(groups, 1)  # never less than once
