"""What the data set says of its own completions: examples and their rollouts -> rewards."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from data_contracts.errors import ContractError
from data_contracts.schemas import REWARDS

GIVEN = "given"  # the component, and the identity of this grader
MARGIN = f"{GIVEN}/margin"  # of a pair's chosen completion, as the data gives it


def given_rewards(rollouts: pa.Table, examples: pa.Table) -> pa.Table:
    """Record `rewards`: a demonstration 1; of a pair chosen 1 and rejected 0; a label 1 or 0; a trajectory's own, or
    the sum over its turns; steps the mean of their labels, with each label at its step's end. A pair's margin is a
    metric of its chosen completion.

    Raises ContractError for a rollout of no example.
    """
    by_id = {row["example_id"]: row for row in examples.to_pylist()}
    columns = ["rollout_id", "group_id", "prompt_id", "rollout_index", "segment", "turns", "step_ends"]
    rows = []
    for rollout in rollouts.select(columns).to_pylist():
        if rollout["segment"] > 0:
            continue
        example = by_id.get(rollout["prompt_id"])
        if example is None:
            raise ContractError(f"rollout {rollout['rollout_id']} must be of an example, found no such example_id")
        rows.append(_row(rollout, example))
    return pa.Table.from_pylist(rows, schema=REWARDS.schema)


def _row(rollout: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    reward = _reward(rollout, example)
    labels, ends = example["step_labels"], rollout["step_ends"]
    has_steps = labels is not None and ends is not None
    components = {GIVEN: reward}
    if example["margin"] is not None and rollout["rollout_index"] == 0:
        components[MARGIN] = example["margin"]
    return {
        "rollout_id": rollout["rollout_id"],
        "group_id": rollout["group_id"],
        "reward": reward,
        "components": list(components.items()),
        "component_status": [(GIVEN, "scored")],
        "status": "scored",
        "turn_rewards": example["turn_rewards"],
        # The last step's end may have been cut off with the end of a long example.
        "step_ends": ends if has_steps else None,
        "step_rewards": labels[: len(ends)] if has_steps else None,
        "grader_digest": GIVEN,
    }


def _reward(rollout: dict[str, Any], example: dict[str, Any]) -> float:
    kind = example["kind"]
    if kind == "pair":
        return 1.0 if rollout["rollout_index"] == 0 else 0.0
    if kind == "labelled":
        return float(example["label"])
    if kind == "stepwise":
        return sum(example["step_labels"]) / len(example["step_labels"])
    if kind == "trajectory":
        own, turns = example["reward"], example["turn_rewards"]
        return own if own is not None else float(sum(value for value in turns if value is not None))
    return 1.0
