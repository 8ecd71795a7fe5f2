"""The advantage stage: joins, drop reasons, shaping, metrics; grouping cases of tests/cases."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.schemas import RECORDS, canonical_json
from rft_core.config import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.errors import ContractError
from tests.rft_core.credit_tables import tables

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "cases" / "pipeline_cases.jsonl").read_text().splitlines())
}


def credit(*rows, max_completion_tokens=10, current_version=0, **settings):
    rollouts, rewards = tables(*rows)
    algorithm = AlgorithmSettings(**settings)
    return compute_advantages(rollouts, rewards, algorithm, max_completion_tokens, current_version)


def members(group: str, *rewards, **columns):
    return [{"group": group, "reward": reward, **columns} for reward in rewards]


def reasons(table: pa.Table) -> list[str]:
    return table["drop_reason"].to_pylist()


def trained(table: pa.Table) -> list[bool]:
    return table["is_trained"].to_pylist()


def advantages(table: pa.Table) -> list[float]:
    return table["advantage"].to_pylist()


def test_gr_01_zero_spread():
    groups = CASES["gr-01-zero-spread"]["input"]
    rows = [row for group in groups for row in members(group["group"], *map(float, group["rewards"]))]
    table, metrics = credit(*rows)
    by_group = {group["group"]: [] for group in groups}
    for row in table.to_pylist():
        by_group[row["group_id"]].append(row)
    for name in "abcd":
        assert [row["advantage"] for row in by_group[name]] == [0.0] * len(by_group[name])
        assert {(row["drop_reason"], row["is_trained"]) for row in by_group[name]} == {("zero_variance", True)}
    assert [row["advantage"] for row in by_group["e"]] == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024])
    assert metrics["frac_reward_zero_std"] == 0.8
    assert table.schema == RECORDS["advantages"].schema


def test_gr_03_unscored_member():
    groups = {group["group"]: group["rewards"] for group in CASES["gr-03-unscored-member"]["input"]}
    table, metrics = credit(
        *(row for name, rewards in groups.items() for row in members(name, *rewards)), min_group_size=1
    )
    rows = table.to_pylist()
    # a: scored 1 0 1, mean 2/3, std .57735: .57735, -1.1547, unscored, .57735
    assert [row["advantage"] for row in rows[:4]] == pytest.approx([0.577349, -1.154699, 0.0, 0.577349], abs=1e-5)
    assert [row["is_trained"] for row in rows[:4]] == [True, True, False, True]
    assert [row["drop_reason"] for row in rows[4:8]] == ["unscored"] * 4
    assert (rows[9]["advantage"], rows[9]["drop_reason"], rows[9]["is_trained"]) == (0.0, "zero_variance", True)
    alone, _ = credit(*members("d", *groups["d"]))
    assert advantages(table)[10:] == advantages(alone)
    assert metrics["share/unscored"] == 6 / 14
    assert reasons(credit(*members("c", *groups["c"]))[0]) == ["unscored", "group_too_small"]


def test_gr_05_groups_are_formed_by_id_in_any_order():
    rows = [
        {
            "id": f"step-00001/{case['row_id']}/{case['sample']:02d}",
            "group": f"step-00001/{case['row_id']}",
            "prompt_token_ids": [len(case["prompt"])],
            "reward": float(case["reward"]),
        }
        for case in CASES["gr-05-group-key"]["input"]
    ]
    table, _ = credit(*rows)
    wanted = dict(zip(table["rollout_id"].to_pylist(), advantages(table), strict=True))
    assert len(set(table["group_id"].to_pylist())) == 3
    signs = {rollout_id.removeprefix("step-00001/"): np.sign(value) for rollout_id, value in wanted.items()}
    assert signs == {"r1/00": 1, "r1/01": -1, "r2/00": 0, "r2/01": 0, "r3/00": 0, "r3/01": 0}
    rollouts, rewards = tables(*rows)
    for seed in range(5):
        order = random.Random(seed).sample(range(len(rows)), len(rows))
        shuffled, _ = compute_advantages(rollouts.take(order), rewards.take(order[::-1]), AlgorithmSettings(), 10, 0)
        assert dict(zip(shuffled["rollout_id"].to_pylist(), advantages(shuffled), strict=True)) == wanted


def test_gr_07_an_absent_component_is_neither_zero_nor_counted():
    # Rewards as the reward stage weighs them (1.2, .45, 0, unscored); here: what credit and metrics make of them.
    given = CASES["gr-07-several-rewards"]["input"]["rows"]
    rows = [
        {"group": "g", "reward": reward, "components": {name: row[name] for name in ("accuracy", "format", "judge")}}
        for row, reward in zip(given, (1.2, 0.45, 0.0, None), strict=True)
    ]
    table, metrics = credit(*rows, name="dr_grpo")
    assert advantages(table) == pytest.approx([0.65, -0.1, -0.55, 0.0])  # mean 1.65 / 3 = .55
    assert reasons(table) == ["none", "none", "none", "unscored"]
    assert metrics["rewards/accuracy/mean"] == 0.5  # of 1 and 0
    assert metrics["rewards/format/mean"] == pytest.approx(2 / 3)  # of 1, 1 and 0
    assert metrics["rewards/judge/mean"] == 0.25  # of .5 and 0


def test_truncated_train_mask_and_drop():
    rows = [*members("g", 1.0, 0.0), *members("g", 0.0, finish_reason="length", status="truncated")]
    table, metrics = credit(*rows, name="dr_grpo")
    assert advantages(table) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert trained(table) == [True] * 3
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    table, _ = credit(*rows, name="dr_grpo", truncated="mask")  # the mean is still 1/3
    assert advantages(table) == pytest.approx([2 / 3, -1 / 3, 0.0])
    assert (trained(table), reasons(table)) == ([True, True, False], ["none", "none", "truncated"])
    table, metrics = credit(*rows, name="dr_grpo", truncated="drop")  # mean 1/2 of the other two
    assert advantages(table) == pytest.approx([0.5, -0.5, 0.0])
    assert (trained(table), reasons(table)) == ([True, True, False], ["none", "none", "truncated"])
    assert metrics["share/truncated"] == pytest.approx(1 / 3)


def test_truncation_is_known_from_finish_reason_not_length():
    rows = [*members("g", 1.0, tokens=10), *members("g", 0.0, tokens=4, finish_reason="length", status="truncated")]
    table, metrics = credit(*rows, truncated="mask")
    assert reasons(table) == ["none", "truncated"]
    assert metrics["completions/mean_terminated_length"] == 10.0


def test_soft_overlong_counts_policy_tokens():
    # Limit 10, buffer 4: lengths 6 -> 0, 8 -> (10 - 4 - 8) / 4 = -.5, 10 -> -1, 12 -> -1. The last row is 12 tokens,
    # of which the policy wrote 6: 0. Rewards all 1: final 1 .5 0 0 1, mean .5.
    masks = [[True] * 6, [True] * 8, [True] * 10, [True] * 12, [True] * 3 + [False] * 6 + [True] * 3]
    rows = [{"group": "g", "reward": 1.0, "mask": mask} for mask in masks]
    table, metrics = credit(*rows, name="dr_grpo", overlong_buffer_tokens=4)
    assert advantages(table) == pytest.approx([0.5, 0.0, -0.5, -0.5, 0.5])
    assert metrics["reward"] == 1.0
    assert metrics["reward_shaped"] == 0.5
    assert metrics["completions/max_length"] == 12
    assert metrics["completions/min_length"] == 6


def test_reward_clip_comes_before_the_baseline():
    # 10, -10, 0 clipped to 1, -2, 0: mean -1/3.
    table, _ = credit(*members("g", 10.0, -10.0, 0.0), name="dr_grpo", reward_clip_low=-2.0, reward_clip_high=1.0)
    assert advantages(table) == pytest.approx([4 / 3, -5 / 3, 1 / 3])


def test_small_groups_are_not_trained():
    table, metrics = credit(*members("a", 1.0, 0.0), *members("b", 1.0, 0.0, 1.0), min_group_size=3)
    assert reasons(table) == ["group_too_small"] * 2 + ["none"] * 3
    assert metrics["share/group_too_small"] == 0.4
    assert advantages(table)[:2] == [0.0, 0.0]


def test_stale_rows_leave_the_group():
    rows = [*members("g", 1.0, 0.0, policy_version=4), *members("g", 0.5, policy_version=1)]
    table, _ = credit(*rows, name="dr_grpo", max_staleness=2, current_version=4)
    assert reasons(table) == ["none", "none", "stale"]
    assert advantages(table) == [0.5, -0.5, 0.0]
    assert trained(credit(*rows, max_staleness=3, current_version=4)[0]) == [True] * 3


def test_failed_and_empty_rollouts_leave_the_group():
    rows = [
        *members("g", 1.0, 0.0),
        *members("g", 0.0, status="error", finish_reason="error", error_reason="engine", tokens=0),
        *members("g", -50.0, mask=[False, False]),
    ]
    table, metrics = credit(*rows, name="dr_grpo")
    assert advantages(table) == [0.5, -0.5, 0.0, 0.0]
    assert reasons(table) == ["none", "none", "unscored", "filtered"]
    assert trained(table) == [True, True, False, False]
    assert metrics["share/error"] == 0.25


def test_rows_of_a_data_set_enter_no_group_statistic():
    rows = [*members("g", 1.0, 0.0), *members("g", 1.0, origin="dataset", finish_reason="given")]
    table, _ = credit(*rows, name="dr_grpo")
    assert advantages(table) == [0.5, -0.5, 0.0]
    assert table["term"].to_pylist() == ["own", "own", "expert"]
    assert reasons(table)[2] == "filtered"  # no term of dr_grpo reads expert rows


def test_only_train_rows_get_credit_one_row_per_segment():
    rows = [
        {"id": "r0", "group": "g", "reward": 1.0, "tokens": 3},
        {"id": "r0", "group": "g", "reward": 1.0, "tokens": 4, "segment": 1},
        {"id": "r1", "group": "g", "reward": 0.0},
        {"id": "r2", "group": "g", "reward": 9.0, "purpose": "baseline"},
    ]
    table, metrics = credit(*rows, name="dr_grpo")
    assert list(zip(table["rollout_id"].to_pylist(), table["segment"].to_pylist(), strict=True)) == [
        ("r0", 0),
        ("r0", 1),
        ("r1", 0),
    ]
    assert advantages(table) == [0.5, 0.5, -0.5]
    assert metrics["completions/max_length"] == 7


def test_reinforce_keeps_equal_rewards_and_lone_rows():
    table, _ = credit(*members("a", 1.0, 1.0), *members("b", 2.0), advantage="none", min_group_size=1)
    assert advantages(table) == [1.0, 1.0, 2.0]
    assert reasons(table) == ["none"] * 3


def test_a_lone_rollout_counts_where_nobody_is_compared():
    # Under the default min_group_size of 2, which is for groups that are compared.
    table, _ = credit(*members("a", 0.5), *members("b", 2.0), *members("c", 1.0, 1.0), name="reinforce")
    assert advantages(table) == [0.5, 2.0, 1.0, 1.0]
    assert reasons(table) == ["none"] * 4
    assert reasons(credit(*members("a", 0.5), *members("c", 1.0, 0.0))[0]) == ["group_too_small", "none", "none"]


def test_opo_weighs_by_the_tokens_that_the_policy_wrote():
    # Lengths 2 and 6: the observation of the first row does not count. Baseline 2 / 8.
    rows = [
        *members("g", 1.0, mask=[True, False, False, True]),
        *members("g", 0.0, tokens=6),
        *members("g", None, tokens=9),
    ]
    table, _ = credit(*rows, name="opo")
    assert advantages(table) == pytest.approx([0.75, -0.25, 0.0])


def test_components_that_differ_are_signal_even_if_their_sum_does_not():
    # Equal rewards: a 1 0, b 0 1, weights 1 and .5; standardised +-.7071: sum +-.35355, whitened +-.7071.
    rows = [
        {"group": "g", "reward": 1.0, "components": {"a": 1.0, "b": 0.0, "a/length": 9.0}},
        {"group": "g", "reward": 1.0, "components": {"a": 0.0, "b": 1.0, "a/length": 1.0}},
    ]
    flat = [{"group": "h", "reward": reward, "components": {"a": 1.0, "b": None}} for reward in (1.0, 0.0)]
    rollouts, rewards = tables(*rows, *flat)
    table, metrics = compute_advantages(
        rollouts, rewards, AlgorithmSettings(name="gdpo"), 10, 0, component_weights={"a": 1.0, "b": 0.5}
    )
    # Of four rows .35355 -.35355 0 0 the deviation is sqrt(.25 / 3).
    assert advantages(table) == pytest.approx([1.2247449, -1.2247449, 0.0, 0.0], rel=1e-5)
    assert reasons(table) == ["none", "none", "zero_variance", "zero_variance"]
    assert metrics["frac_reward_zero_std"] == 0.5  # of the rewards themselves: group g


def test_rows_that_are_masked_do_not_count_among_the_trained_of_gpg():
    # Three trained rows of group g and two of h, which has no signal: x 5 / 3. The cut row is in g's mean alone, 1/4.
    cut = members("g", 0.0, finish_reason="length", status="truncated")
    rows = [*members("g", 1.0, 0.0, 0.0), *cut, *members("h", 1.0, 1.0)]
    table, _ = credit(*rows, name="gpg", truncated="mask")
    assert advantages(table) == pytest.approx([0.75 * 5 / 3, -0.25 * 5 / 3, -0.25 * 5 / 3, 0, 0, 0])


def test_what_is_left_out_by_lot_follows_the_seed_and_is_counted():
    rows = members("g", *[1.0] * 2, *[0.0] * 8)
    rollouts, rewards = tables(*rows)
    settings = AlgorithmSettings(name="dr_grpo", drop="balance")
    made = [compute_advantages(rollouts, rewards, settings, 10, 0, seed=seed) for seed in (0, 0, 1)]
    found = [advantages(table) for table, _ in made]
    assert found[0] == found[1] != found[2]
    for values, (table, metrics) in zip(found, made, strict=True):
        assert sorted(values) == [-0.5, -0.5, *[0.0] * 6, 0.5, 0.5]
        assert trained(table) == [True] * 10
        assert metrics["share/surplus"] == 0.6
    order = list(reversed(range(10)))
    backwards, _ = compute_advantages(rollouts.take(order), rewards, settings, 10, 0)
    assert advantages(backwards) == found[0][::-1]


def test_nothing_to_train_is_said_not_raised():
    table, metrics = credit(*members("a", None, None), *members("b", None))
    assert trained(table) == [False] * 3
    assert metrics["rows_trained"] == 0
    assert metrics["share/unscored"] == 1.0
    assert "reward" not in metrics
    empty, metrics = credit()
    assert empty.schema == RECORDS["advantages"].schema
    assert empty.num_rows == metrics["rows"] == metrics["rows_trained"] == 0
    canonical_json(metrics)


def test_metrics_by_hand():
    rows = [*members("a", 1.0, 0.0, tokens=2), *members("b", 1.0, 1.0, tokens=6), *members("c", None)]
    _, metrics = credit(*rows)
    assert metrics["reward"] == 0.75
    assert metrics["reward_std"] == pytest.approx(0.5**0.5 / 2)  # mean of .7071 and 0
    assert metrics["rewards/r/mean"] == 0.75
    assert metrics["rewards/r/std"] == 0.5  # 1 0 1 1: sqrt(.75 / 3)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rows"] == 5
    assert metrics["rows_trained"] == 4
    assert metrics["num_tokens"] == 16
    assert metrics["completions/mean_length"] == 19 / 5


def test_mismatched_tables_are_refused():
    rollouts, rewards = tables(*members("g", 1.0, 0.0))
    settings = AlgorithmSettings()
    with pytest.raises(ContractError, match="step-00001/g/01 has none"):
        compute_advantages(rollouts, rewards.slice(0, 1), settings, 10, 0)
    with pytest.raises(ContractError, match="which rollouts lacks"):
        compute_advantages(rollouts.slice(0, 1), rewards, settings, 10, 0)
    with pytest.raises(ContractError, match="one row per rollout"):
        compute_advantages(rollouts, pa.concat_tables([rewards, rewards]), settings, 10, 0)
    for column, value in (("group_id", "other"), ("reward", float("nan")), ("status", "unscored")):
        rows = rewards.to_pylist()
        rows[1][column] = value
        broken = pa.Table.from_pylist(rows, schema=rewards.schema)
        with pytest.raises(ContractError, match="step-00001/g/01"):
            compute_advantages(rollouts, broken, settings, 10, 0)


def test_tables_in_several_chunks_and_slices():
    rollouts, rewards = tables(*members("a", 1.0, 0.0), *members("b", 1.0, 0.0, tokens=5))
    whole = compute_advantages(rollouts, rewards, AlgorithmSettings(), 10, 0)
    chunked = pa.concat_tables([rollouts.slice(0, 1), rollouts.slice(1, 2), rollouts.slice(3)])
    again = compute_advantages(chunked, rewards, AlgorithmSettings(), 10, 0)
    assert again[0].equals(whole[0])
    assert again[1] == whole[1]
