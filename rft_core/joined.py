"""Rollouts and their rewards, one to one: what credit is computed from.

Shapes: S rows of rollouts (segments) with purpose train; N rollouts (a rollout is one or more segments).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rft_core.errors import ContractError


@dataclass(frozen=True)
class Joined:
    """Train rollouts with their rewards; arrays of N rollouts, in the order of their first segment."""

    rollout_ids: list[str]
    segments: list[tuple[int, int]]  # per row of the table: (rollout number, segment)
    group_ids: list[str]
    prompt_ids: list[str]
    group_N: np.ndarray  # int64, numbers of groups in order of appearance
    reward_N: np.ndarray  # float64, NaN where unscored
    components: list[dict[str, float | None]]
    num_tokens_N: np.ndarray  # int64, tokens that the policy wrote
    is_truncated_N: np.ndarray
    is_error_N: np.ndarray
    is_expert_N: np.ndarray  # origin dataset
    policy_version_N: np.ndarray
    index_N: np.ndarray  # int64, of the rollout in its group

    def component_values(self) -> dict[str, np.ndarray]:
        """float64[N] of each component, NaN where a rollout has no score of it."""
        names = sorted({name for components in self.components for name in components})
        return {name: np.array([row.get(name) for row in self.components], dtype=float) for name in names}


def join(rollouts: pa.Table, rewards: pa.Table) -> Joined:
    """Rollouts and rewards by rollout_id; counts are conserved: every rollout has one reward row, and no other is."""
    reward_rows = _reward_rows(rewards)
    rollout_ids = rollouts.column("rollout_id").to_pylist()
    unscored = next((rollout_id for rollout_id in rollout_ids if rollout_id not in reward_rows), None)
    if unscored is not None:
        raise ContractError(f"every rollout needs a row of rewards, but {unscored} has none; score the rollouts again")
    if len(reward_rows) != len(set(rollout_ids)):
        unknown = next(iter(reward_rows.keys() - set(rollout_ids)))
        raise ContractError(f"rewards has a row for {unknown}, which rollouts lacks; the tables do not belong together")
    train = np.flatnonzero([purpose == "train" for purpose in rollouts.column("purpose").to_pylist()])
    rollouts = rollouts.select([*_READ, "completion_mask"]).take(pa.array(train, pa.int64()))
    columns = {name: rollouts.column(name).to_pylist() for name in _READ}
    policy_tokens_S = true_counts(rollouts.column("completion_mask"))
    first: dict[str, int] = {}
    for row, rollout_id in enumerate(columns["rollout_id"]):
        first.setdefault(rollout_id, row)
    number = {rollout_id: index for index, rollout_id in enumerate(first)}
    rollout_S = np.array([number[rollout_id] for rollout_id in columns["rollout_id"]], dtype=np.int64)
    group_ids = [columns["group_id"][row] for row in first.values()]
    for rollout_id, group_id in zip(first, group_ids, strict=True):
        if reward_rows[rollout_id]["group_id"] != group_id:
            raise ContractError(
                f"group_id of {rollout_id} must be the same in rollouts and rewards, got {group_id!r} and "
                f"{reward_rows[rollout_id]['group_id']!r}"
            )
    group_number: dict[str, int] = {}
    group_N = [group_number.setdefault(group_id, len(group_number)) for group_id in group_ids]

    def any_segment(flags: list[bool]) -> np.ndarray:
        return np.bincount(rollout_S, weights=np.array(flags, float), minlength=len(first)) > 0

    return Joined(
        rollout_ids=list(first),
        segments=list(zip(rollout_S.tolist(), columns["segment"], strict=True)),
        group_ids=group_ids,
        prompt_ids=[columns["prompt_id"][row] for row in first.values()],
        group_N=np.array(group_N, dtype=np.int64),
        reward_N=np.array([reward_rows[rollout_id]["reward"] for rollout_id in first], dtype=float),
        components=[reward_rows[rollout_id]["components"] for rollout_id in first],
        num_tokens_N=np.bincount(rollout_S, weights=policy_tokens_S, minlength=len(first)).astype(np.int64),
        is_truncated_N=any_segment([reason == "length" for reason in columns["finish_reason"]]),
        is_error_N=any_segment([status == "error" for status in columns["status"]]),
        is_expert_N=any_segment([origin == "dataset" for origin in columns["origin"]]),
        policy_version_N=np.array([columns["policy_version"][row] for row in first.values()], dtype=np.int64),
        index_N=np.array([columns["rollout_index"][row] for row in first.values()], dtype=np.int64),
    )


def _reward_rows(rewards: pa.Table) -> dict[str, dict[str, Any]]:
    """Rewards by rollout_id; NaN stands for unscored."""
    rows: dict[str, dict[str, Any]] = {}
    for row in rewards.select(["rollout_id", "group_id", "reward", "components", "status"]).to_pylist():
        rollout_id = row["rollout_id"]
        if rollout_id in rows:
            raise ContractError(f"rewards must have one row per rollout, got two for {rollout_id}")
        is_scored = row["status"] == "scored"
        if is_scored != (row["reward"] is not None) or (is_scored and not np.isfinite(row["reward"])):
            raise ContractError(
                f"a reward is a finite number when status is scored and null when unscored, got {row['reward']} with "
                f"{row['status']} for {rollout_id}"
            )
        reward = row["reward"] if is_scored else np.nan
        rows[rollout_id] = {**row, "reward": reward, "components": dict(row["components"] or [])}
    return rows


def true_counts(masks: pa.ChunkedArray) -> np.ndarray:
    """int64[S]: how many values of each list are true."""
    lists = masks.combine_chunks() if masks.num_chunks != 1 else masks.chunk(0)
    flat = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.int64)
    ends = np.cumsum(np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64))
    sums = np.concatenate([[0], np.cumsum(flat)])
    return np.diff(sums[np.concatenate([[0], ends]).astype(np.int64)])


_READ = (
    "rollout_id",
    "prompt_id",
    "segment",
    "group_id",
    "rollout_index",
    "finish_reason",
    "status",
    "origin",
    "policy_version",
)
