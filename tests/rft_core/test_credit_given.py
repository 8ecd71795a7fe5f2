"""The advantage stage on given rows and for preference objectives: roles, reasons, credit."""

from __future__ import annotations

import random

import pytest

from data_contracts.validation import check_table
from rft_core.algorithms import ALGORITHMS
from rft_core.config import AlgorithmSettings
from rft_core.credit import compute_advantages
from tests.rft_core.credit_tables import tables

DATASET = {"origin": "dataset", "finish_reason": "given", "policy_id": "dataset"}


def credit(*rows, order=None, **settings):
    rollouts, rewards = tables(*rows)
    if order is not None:
        rollouts, rewards = rollouts.take(order), rewards.take(order[::-1])
    table, metrics = compute_advantages(rollouts, rewards, AlgorithmSettings(**settings), 10, 7)
    check_table(table, "advantages")
    return {row["rollout_id"]: row for row in table.to_pylist()}, metrics


def given(rollout_id: str, reward, group: str | None = None, **columns):
    return {"id": rollout_id, "group": group or rollout_id[0], "reward": reward, **DATASET, **columns}


def told(rows, *names) -> dict:
    return {rollout_id: tuple(row[name] for name in names) for rollout_id, row in rows.items()}


PAIRS = [given("a0", 1.0), given("a1", 0.0), given("b0", 1.0), given("b1", 0.0)]


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.records == ("preferences",)])
def test_a_given_pair_is_chosen_against_rejected(name):
    rows, metrics = credit(*PAIRS, name=name)
    assert told(rows, "pair_id", "pair_role", "advantage", "is_trained", "drop_reason", "term", "weight") == {
        "a0": ("a", "chosen", 1.0, True, "none", "expert", 1.0),
        "a1": ("a", "rejected", -1.0, True, "none", "expert", 1.0),
        "b0": ("b", "chosen", 1.0, True, "none", "expert", 1.0),
        "b1": ("b", "rejected", -1.0, True, "none", "expert", 1.0),
    }
    assert (metrics["pairs"], metrics["pairs/ties"], metrics["rows_trained"]) == (2, 0, 4)


def test_the_order_of_rows_changes_nothing():
    rows, _ = credit(*PAIRS, name="dpo")
    for seed in range(3):
        order = random.Random(seed).sample(range(4), 4)
        assert credit(*PAIRS, name="dpo", order=order)[0] == rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": None}, "unscored"),
        ({"status": "error", "finish_reason": "error", "error_reason": "cut"}, "unscored"),
        ({"mask": [False, False]}, "filtered"),
    ],
)
def test_half_a_pair_is_not_trained(change, reason):
    rows, metrics = credit(PAIRS[0], PAIRS[1] | change, *PAIRS[2:], name="dpo")
    assert told(rows, "drop_reason", "is_trained", "pair_id", "pair_role", "advantage") == {
        "a0": ("filtered", False, None, None, 0.0),
        "a1": (reason, False, None, None, 0.0),
        "b0": ("none", True, "b", "chosen", 1.0),
        "b1": ("none", True, "b", "rejected", -1.0),
    }
    assert metrics["pairs"] == 1


def test_a_tie_is_no_pair():
    rows, metrics = credit(*PAIRS[:2], given("b0", 1.0), given("b1", 1.0), name="ipo")
    assert told(rows, "drop_reason", "pair_role")["b0"] == told(rows, "drop_reason", "pair_role")["b1"]
    assert told(rows, "drop_reason", "is_trained", "pair_role")["b0"] == ("filtered", False, None)
    assert (metrics["pairs"], metrics["pairs/ties"]) == (1, 1)
    assert metrics["share/filtered"] == 0.5


@pytest.mark.parametrize("name", ["kto", "bco", "apo_zero_unpaired"])
def test_a_labelled_completion_is_a_pair_of_its_own(name):
    rows, metrics = credit(given("a0", 1.0), given("b0", 0.0), given("c0", 1.0), given("d0", None), name=name)
    assert told(rows, "pair_id", "pair_role", "advantage", "is_trained") == {
        "a0": ("a0", "chosen", 1.0, True),
        "b0": ("b0", "rejected", -1.0, True),
        "c0": ("c0", "chosen", 1.0, True),
        "d0": (None, None, 0.0, False),
    }
    assert "pairs" not in metrics and metrics["rows_trained"] == 3


@pytest.mark.parametrize("name", ["sft", "dft"])
def test_what_is_imitated_gets_its_reward(name):
    rows, _ = credit(
        given("a0", 1.0),
        given("b0", 0.25),
        given("c0", 0.0),
        given("d0", -2.0),
        given("e0", None),
        given("f0", 1.0, mask=[False]),
        given("g0", 1.0, status="error", finish_reason="error", error_reason="cut"),
        given("h0", 1.0, status="truncated"),
        name=name,
    )
    assert told(rows, "advantage", "is_trained", "drop_reason", "term") == {
        "a0": (1.0, True, "none", "expert"),
        "b0": (0.25, True, "none", "expert"),
        "c0": (0.0, True, "none", "expert"),
        "d0": (-2.0, True, "none", "expert"),
        "e0": (0.0, False, "unscored", "expert"),
        "f0": (0.0, False, "filtered", "expert"),
        "g0": (0.0, False, "unscored", "expert"),
        "h0": (1.0, True, "none", "expert"),
    }
    assert {row["pair_role"] for row in rows.values()} == {None}


def test_rewards_of_trajectories_may_be_clipped():
    rows, _ = credit(given("a0", 5.0), given("b0", -2.0), name="sft", reward_clip_low=0.0, reward_clip_high=1.0)
    assert told(rows, "advantage") == {"a0": (1.0,), "b0": (0.0,)}


def test_segments_share_credit_and_role():
    segments = [given("a0", 1.0), given("a0", 1.0, segment=1), given("a1", 0.0)]
    rollouts, rewards = tables(*segments)
    table, _ = compute_advantages(rollouts, rewards, AlgorithmSettings(name="dpo"), 10, 0)
    found = [(row["rollout_id"], row["segment"], row["pair_role"], row["advantage"]) for row in table.to_pylist()]
    assert found == [("a0", 0, "chosen", 1.0), ("a0", 1, "chosen", 1.0), ("a1", 0, "rejected", -1.0)]


def test_given_rows_are_not_trained_where_the_policy_samples():
    own = [{"id": f"o{number}", "group": "a", "reward": reward} for number, reward in enumerate((1.0, 0.0))]
    for name in ("grpo", "online_dpo"):
        rows, _ = credit(*own, given("a9", 7.0, "a"), name=name)
        assert told(rows, "drop_reason", "term", "pair_role")["a9"] == ("filtered", "expert", None)
        assert rows["o0"]["advantage"] > 0 > rows["o1"]["advantage"]  # the given row was no member


def test_online_dpo_sets_the_best_of_own_rows_against_the_worst():
    def own(group, *rewards, **columns):
        return [
            {"id": f"{group}{number}", "group": group, "reward": reward, "policy_version": 7, **columns}
            for number, reward in enumerate(rewards)
        ]

    rows, metrics = credit(*own("a", 0.5, 2.0, None, -1.0, 2.0), *own("b", 1.0, 1.0), *own("c", 3.0), name="online_dpo")
    assert told(rows, "pair_id", "pair_role", "drop_reason", "advantage", "term") == {
        "a0": (None, None, "filtered", 0.0, "own"),
        "a1": ("a", "chosen", "none", 1.0, "own"),
        "a2": (None, None, "unscored", 0.0, "own"),
        "a3": ("a", "rejected", "none", -1.0, "own"),
        "a4": (None, None, "filtered", 0.0, "own"),
        "b0": (None, None, "filtered", 0.0, "own"),
        "b1": (None, None, "filtered", 0.0, "own"),
        "c0": (None, None, "filtered", 0.0, "own"),
    }
    assert (metrics["pairs"], metrics["pairs/ties"]) == (1, 2)
    # What is cut, or of a policy too old, is left out of the comparison.
    cut = own("a", 1.0, 0.0)
    cut[0] |= {"finish_reason": "length", "status": "truncated"}
    rows, _ = credit(*cut, name="online_dpo", truncated="drop")
    assert told(rows, "drop_reason") == {"a0": ("truncated",), "a1": ("filtered",)}
    stale = own("a", 1.0, 0.0, 2.0)
    stale[2] |= {"policy_version": 1}
    rows, _ = credit(*stale, name="online_dpo", max_staleness=3)
    assert told(rows, "pair_role") == {"a0": ("chosen",), "a1": ("rejected",), "a2": (None,)}


def test_nothing_to_compare_is_said_not_raised():
    rows, metrics = credit(given("a0", None), given("a1", None), name="dpo")
    assert not any(row["is_trained"] for row in rows.values())
    assert (metrics["pairs"], metrics["rows_trained"]) == (0, 0)
    rows, metrics = credit(name="dpo")
    assert rows == {} and metrics["pairs"] == 0
    assert credit(name="kto")[0] == {}
