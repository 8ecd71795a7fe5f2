"""Small rollouts and rewards tables for tests of credit: give what matters, the rest is filled in."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from data_contracts.schemas import RECORDS

GIVEN = {"component_status": [], "turn_rewards": None, "step_rewards": None, "grader_digest": "g"}


def tables(*rows: dict[str, Any]) -> tuple[pa.Table, pa.Table]:
    """One rollout per row. Keys: id, group, reward (None: unscored), tokens, mask, and columns of `rollouts`."""
    rollouts, rewards = [], {}
    for number, row in enumerate(rows):
        mask = row.get("mask", [True] * row.get("tokens", 3))
        rollout_id = row.get("id", f"step-00001/{row['group']}/{number:02d}")
        rollouts.append(
            {
                "rollout_id": rollout_id,
                "segment": 0,
                "prompt_id": row["group"],
                "group_id": row["group"],
                "rollout_index": number,
                "step": 1,
                "round": 0,
                "purpose": "train",
                "origin": "policy",
                "policy_id": "p",
                "policy_version": 0,
                "prompt_token_ids": [1],
                "completion_token_ids": [5] * len(mask),
                "completion_mask": mask,
                "behaviour_logprobs": None,
                "messages": "[]",
                "turns": [],
                "step_ends": None,
                "environment_reward": None,
                "completion_text": "",
                "finish_reason": "stop",
                "status": "completed",
                "error_reason": None,
                "sampling": "{}",
                "seed": number,
            }
            | {name: value for name, value in row.items() if name in RECORDS["rollouts"].schema.names}
        )
        reward = row.get("reward")
        rewards[rollout_id] = GIVEN | {
            "rollout_id": rollout_id,
            "group_id": row["group"],
            "reward": reward,
            "components": list(row.get("components", {"r": reward}).items()),
            "status": "unscored" if reward is None else "scored",
            "reason": "why" if reward is None else None,
        }
    return (
        pa.Table.from_pylist(rollouts, schema=RECORDS["rollouts"].schema),
        pa.Table.from_pylist(list(rewards.values()), schema=RECORDS["rewards"].schema),
    )
