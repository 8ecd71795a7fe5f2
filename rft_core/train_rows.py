"""Rollouts and their credit, joined into the rows that an update trains on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.refs import PolicyRef
from rft_core.batching import TrainRow
from rft_core.errors import ContractError

ROLLOUT_COLUMNS = (
    "rollout_id",
    "segment",
    "group_id",
    "purpose",
    "policy_id",
    "prompt_token_ids",
    "completion_token_ids",
    "completion_mask",
    "behaviour_logprobs",
    "step_ends",
    "sampling",
)


def all_tokens(rollout: dict[str, Any]) -> np.ndarray:
    """What the policy wrote, or is to learn."""
    return np.array(rollout["completion_mask"], bool)


def last_token(rollout: dict[str, Any]) -> np.ndarray:
    """The completion's last token, by its length: nothing is looked for, so pad and stop tokens may be the same."""
    return np.arange(len(rollout["completion_mask"])) == len(rollout["completion_mask"]) - 1


def ends_of_steps(rollout: dict[str, Any]) -> np.ndarray:
    mask = np.zeros(len(rollout["completion_mask"]), bool)
    mask[rollout["step_ends"] or []] = True
    return mask


# Which tokens of a completion are trained; bool[C] from a row of rollouts.
POSITIONS = {"tokens": all_tokens, "last": last_token, "steps": ends_of_steps}


def train_rows(
    rollouts: pa.Table,
    advantages: pa.Table,
    before: PolicyRef,
    positions: str = "tokens",
    correct_engine: bool = True,
) -> list[TrainRow]:
    """One row per train rollout segment, ordered by group, rollout and segment, whatever the tables' order.

    With `correct_engine` rows of an engine that computes the policy by other code than the trainer are corrected as
    off-policy ones are. Rollouts of other purposes (baselines) have no credit and are left out. Raises ContractError
    unless train rollouts and advantages have the same keys, and lists aligned with the completion.
    """
    credit = {(row["rollout_id"], row["segment"]): row for row in advantages.to_pylist()}
    wanted = [row for row in rollouts.select(list(ROLLOUT_COLUMNS)).to_pylist() if row["purpose"] == "train"]
    keys = {(row["rollout_id"], row["segment"]) for row in wanted}
    if len(keys) != len(wanted) or len(credit) != advantages.num_rows or keys != credit.keys():
        odd = sorted(keys ^ credit.keys()) or ["a key occurs twice"]
        raise ContractError(
            f"advantages must hold one row per train rollout segment, found {advantages.num_rows} rows for "
            f"{len(wanted)} rollouts; the first that differs: {odd[0]}"
        )
    wanted.sort(key=lambda row: (row["group_id"], row["rollout_id"], row["segment"]))
    if positions == "last":  # a conversation in several segments ends in the last one
        last = {row["rollout_id"]: row["segment"] for row in wanted}
        wanted = [row for row in wanted if row["segment"] == last[row["rollout_id"]]]
    return [
        _train_row(row, credit[row["rollout_id"], row["segment"]], before, positions, correct_engine) for row in wanted
    ]


def _train_row(
    rollout: dict[str, Any], credit: dict[str, Any], before: PolicyRef, positions: str, correct_engine: bool
) -> TrainRow:
    completion = np.array(rollout["completion_token_ids"], np.int64)
    mask = POSITIONS[positions](rollout)
    values = credit["token_advantages"]
    advantages = np.full(len(completion), credit["advantage"], np.float32) if values is None else _floats(values)
    behaviour = rollout["behaviour_logprobs"]
    lists = {
        "completion_mask": mask,
        "token_advantages": advantages,
        "behaviour_logprobs": completion if behaviour is None else _floats(behaviour),
        "returns": completion if credit["returns"] is None else _floats(credit["returns"]),
    }
    for name, found in lists.items():
        if len(found) != len(completion):
            raise ContractError(
                f"{name} must be aligned with completion_token_ids, found {len(found)} values for "
                f"{len(completion)} tokens in rollout {rollout['rollout_id']}, segment {rollout['segment']}"
            )
    is_off_policy = rollout["policy_id"] != before.policy_id
    trained_mask = mask & credit["is_trained"]
    if not np.isfinite(advantages[trained_mask]).all():
        raise ContractError(f"advantages must be finite, found otherwise in rollout {rollout['rollout_id']}")
    return TrainRow(
        rollout_id=rollout["rollout_id"],
        segment=rollout["segment"],
        group_id=rollout["group_id"],
        prompt_token_ids=np.array(rollout["prompt_token_ids"], np.int64),
        completion_token_ids=completion,
        trained_mask=trained_mask,
        advantages=advantages,
        behaviour_logprobs=None if behaviour is None else _floats(behaviour),
        returns=None if credit["returns"] is None else _floats(credit["returns"]),
        weight=credit["weight"],
        is_off_policy=is_off_policy,
        is_corrected=is_off_policy or (correct_engine and "engine" in json.loads(rollout["sampling"])),
        term=credit["term"],
        pair_id=credit["pair_id"],
        pair_role=credit["pair_role"],
        pair_margin=credit["pair_margin"] or 0.0,
    )


def _floats(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float32)
