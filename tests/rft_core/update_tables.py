"""Rollouts and credit for the tests of update and checkpoint: small, ragged, the same at every call."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from data_contracts.refs import PolicyRef
from data_contracts.schemas import ADVANTAGES, ROLLOUTS, canonical_json

ROOT = PolicyRef("root", 0)


def tables(
    num_groups: int = 3, group_size: int = 4, seed: int = 0, policy_id: str = "root", behaviour: float | None = None
) -> tuple[pa.Table, pa.Table]:
    """(rollouts, advantages): completions of 2 to 12 tokens, one of them without loss on its third token, one rollout
    not trained, one with advantage 0. `behaviour` is the logprob that every token is said to have been sampled with."""
    generator = np.random.default_rng(seed)
    rollouts, advantages = [], []
    for group in range(num_groups):
        prompt = generator.integers(3, 259, 5 + 3 * group).tolist()
        for index in range(group_size):
            completion = generator.integers(3, 259, generator.integers(2, 13)).tolist()
            mask = [True] * len(completion)
            if (group, index) == (0, 1):
                completion, mask = [9, 8, 7, 6], [True, True, False, True]
            rollouts.append(_rollout(group, index, prompt, completion, mask, policy_id, behaviour))
            is_trained = (group, index) != (1, 0)
            credit = 0.0 if not is_trained or (group, index) == (2, 1) else float(generator.normal())
            advantages.append(_credit(rollouts[-1], credit, is_trained))
    return pa.Table.from_pylist(rollouts, ROLLOUTS.schema), pa.Table.from_pylist(advantages, ADVANTAGES.schema)


def with_returns(rollouts: pa.Table, advantages: pa.Table, seed: int = 5) -> pa.Table:
    """Advantages with returns of each token, NaN where the policy wrote none; rows that are not trained have none."""
    generator = np.random.default_rng(seed)
    returns = []
    for mask, is_trained in zip(rollouts["completion_mask"].to_pylist(), advantages["is_trained"], strict=True):
        values = np.where(mask, generator.normal(0.5, 1.0, len(mask)), np.nan).tolist()
        returns.append(values if is_trained.as_py() else None)
    return replaced(advantages, "returns", returns)


def _rollout(group, index, prompt, completion, mask, policy_id, behaviour) -> dict:
    return {
        "rollout_id": f"step-00001/p{group}/{index:02d}",
        "segment": 0,
        "prompt_id": f"p{group}",
        "group_id": f"step-00001/p{group}",
        "rollout_index": index,
        "step": 1,
        "round": 0,
        "purpose": "train",
        "origin": "policy",
        "policy_id": policy_id,
        "policy_version": 0,
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "completion_mask": mask,
        "behaviour_logprobs": None if behaviour is None else [behaviour] * len(completion),
        "messages": "[]",
        "turns": [],
        "completion_text": "",
        "finish_reason": "stop",
        "status": "completed",
        "sampling": canonical_json({"temperature": 1.0}),
        "seed": 0,
    }


def _credit(rollout: dict, advantage: float, is_trained: bool) -> dict:
    return {
        "rollout_id": rollout["rollout_id"],
        "segment": 0,
        "group_id": rollout["group_id"],
        "advantage": advantage,
        "weight": 1.0,
        "is_trained": is_trained,
        "drop_reason": "none" if is_trained else "unscored",
        "term": "own",
    }


def replaced(table: pa.Table, column: str, values: list) -> pa.Table:
    """The table with other values in one column."""
    index = table.schema.get_field_index(column)
    return table.set_column(index, table.schema.field(column), pa.array(values, table.schema.field(column).type))
