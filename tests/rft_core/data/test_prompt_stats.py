"""The statistics of prompts, worked by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_contracts.schemas import PROMPT_STATS, RECORDS
from data_contracts.validation import check_table
from rft_core.data.prompt_stats import update_stats
from rft_core.errors import ContractError, SettingsError
from tests.rft_core.rewards.tables import prompts_table, rollouts_table


def step_tables(step: int, **scores: list[float | None]):
    """Prompts, rollouts and rewards of a step from {prompt: scores of its rollouts}; null is unscored."""
    rollouts = rollouts_table(
        *(
            {"prompt_id": name, "index": index, "rollout_id": f"step-{step:05d}/{name}/{index:02d}"}
            for name, values in scores.items()
            for index in range(len(values))
        )
    )
    flat = [value for values in scores.values() for value in values]
    return prompts_table(*({"prompt_id": name} for name in scores)), rollouts, rewards_of(rollouts, flat)


def rewards_of(rollouts: pa.Table, values: list[float | None]) -> pa.Table:
    rows = [
        {
            "rollout_id": name,
            "group_id": "g",
            "reward": value,
            "components": [("exact_match", value), ("length", 1.0)],
            "component_status": [("exact_match", "scored" if value is not None else "timeout"), ("length", "scored")],
            "status": "scored",
            "reason": None,
            "turn_rewards": None,
            "step_rewards": None,
            "grader_digest": "g",
        }
        for name, value in zip(rollouts["rollout_id"].to_pylist(), values, strict=True)
    ]
    return pa.Table.from_pylist(rows, RECORDS["rewards"].schema)


def updated(previous, step: int, decay: float = 1.0, component: str = "exact_match", **scores) -> pa.Table:
    stats = update_stats(previous, *step_tables(step, **scores), component, decay, step)
    assert stats.schema.equals(PROMPT_STATS.schema, check_metadata=True)
    check_table(stats, "prompt_stats")
    return stats


def rows_of(stats: pa.Table) -> dict[str, tuple[float, ...]]:
    """{prompt: (attempts, passes, draws, last_step)}"""
    return {row.pop("prompt_id"): tuple(row.values()) for row in stats.to_pylist()}


def test_a_first_step_is_counted():
    # A score of 1 or more passes, 0.9 doesn't, null counts neither way.
    stats = updated(None, 1, a=[1.0, 0.0, 1.0, 2.0], b=[0.9, 0.0, None, None])
    assert rows_of(stats) == {"a": (4.0, 3.0, 1, 1), "b": (2.0, 0.0, 1, 1)}


def test_steps_add_up_and_new_prompts_come_last():
    first = updated(None, 1, b=[1.0, 0.0], a=[0.0, 0.0])
    second = updated(first, 2, c=[1.0, 1.0], a=[1.0, 0.0])
    assert rows_of(second) == {"b": (2.0, 1.0, 1, 1), "a": (4.0, 1.0, 2, 2), "c": (2.0, 2.0, 1, 2)}
    assert list(rows_of(second)) == ["b", "a", "c"]


def test_earlier_counts_fade_when_a_prompt_is_measured_again():
    # decay 0.5. a: 4 attempts, 4 passes; then 0.5 x 4 + 4 = 6 and 0.5 x 4 + 1 = 3; then 0.5 x 6 + 2 = 5 and
    # 0.5 x 3 + 0 = 1.5. b is measured once and keeps what it has.
    stats = updated(None, 1, 0.5, a=[1.0] * 4, b=[1.0, 0.0])
    stats = updated(stats, 2, 0.5, a=[1.0, 0.0, 0.0, 0.0])
    assert rows_of(stats) == {"a": (6.0, 3.0, 2, 2), "b": (2.0, 1.0, 1, 1)}
    stats = updated(stats, 5, 0.5, a=[0.0, 0.0])
    assert rows_of(stats) == {"a": (5.0, 1.5, 3, 5), "b": (2.0, 1.0, 1, 1)}


def test_unscored_rollouts_are_a_draw_but_no_measurement():
    stats = updated(None, 1, 0.5, a=[1.0, 0.0])
    stats = updated(stats, 2, 0.5, a=[None, None], b=[None, None])
    assert rows_of(stats) == {"a": (2.0, 1.0, 2, 2), "b": (0.0, 0.0, 1, 2)}


def test_another_component_may_say_what_passes():
    assert rows_of(updated(None, 1, component="length", a=[0.0, None])) == {"a": (2.0, 2.0, 1, 1)}
    with pytest.raises(SettingsError, match=r"must be a reward component, got 'wit'; the table has \['exact_match'"):
        updated(None, 1, component="wit", a=[0.0])


def test_segments_of_a_rollout_count_once_and_greedy_rollouts_not_at_all():
    rollouts = rollouts_table(
        {"prompt_id": "a", "index": 0},
        {"prompt_id": "a", "index": 0, "segment": 1},
        {"prompt_id": "a", "index": 1, "temperature": 0},
    )
    once = rollouts_table({"prompt_id": "a", "index": 0}, {"prompt_id": "a", "index": 1})
    stats = update_stats(
        None, prompts_table({"prompt_id": "a"}), rollouts, rewards_of(once, [1.0, 1.0]), "exact_match", 1.0, 1
    )
    assert rows_of(stats) == {"a": (1.0, 1.0, 1, 1)}


def test_a_prompt_without_rollouts_was_drawn():
    prompts = prompts_table({"prompt_id": "a"}, {"prompt_id": "b"})
    _, rollouts, rewards = step_tables(1, a=[1.0])
    stats = update_stats(None, prompts, rollouts, rewards, "exact_match", 1.0, 1)
    assert rows_of(stats) == {"a": (1.0, 1.0, 1, 1), "b": (0.0, 0.0, 1, 1)}


def test_tables_that_do_not_belong_together():
    _, rollouts, rewards = step_tables(1, a=[1.0], b=[0.0])
    with pytest.raises(ContractError, match="rollouts of step 3 must be of its prompts, found one of 'b'"):
        update_stats(None, prompts_table({"prompt_id": "a"}), rollouts, rewards, "exact_match", 1.0, 3)
    with pytest.raises(ContractError, match="one row for each rollout_id"):
        update_stats(None, prompts_table({"prompt_id": "a"}), rollouts, rewards.slice(1), "exact_match", 1.0, 3)
