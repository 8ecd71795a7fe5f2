"""Completions that the data set gives: examples -> rollouts with origin dataset. Nothing is sampled."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from data_contracts.errors import ContractError
from data_contracts.schemas import ROLLOUTS, canonical_json
from rft_core.data.examples import Content
from rft_core.data.faults import Faults, Rejected
from rft_core.data.masks import RenderedExample
from rft_core.data.prompts import Renderer
from rft_core.data.settings import DataSettings
from rft_core.environments.plan import RolloutPlan

DATASET = "dataset"  # stands for the policy that wrote them: it is not known
# Index of a completion in its group, by the part of the example that it is.
INDEX_OF_PART = {"completion": 0, "text": 0, "steps": 0, "chosen": 0, "rejected": 1}


def given_rollouts(examples: pa.Table, plan: RolloutPlan, renderer: Renderer, data: DataSettings) -> pa.Table:
    """The completions of a block of examples: record `rollouts`, ordered by example, part and segment.

    The chosen and the rejected completion of a pair are one group. The data stage rendered every example once to check
    it, so one that cannot be rendered now raises ContractError.
    """
    sampling = canonical_json({})
    rows = []
    for example in examples.to_pylist():
        faults = Faults(data.policies)
        try:
            rendered = renderer.render_example(content_of(example), faults)
        except Rejected as rejected:
            raise ContractError(
                f"example {example['example_id']} passed the data stage and must be rendered here alike, found "
                f"{rejected.reason}: {rejected}"
            ) from rejected
        rows += [_row(example["example_id"], part, plan, sampling) for part in rendered]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS.schema)


def content_of(example: dict[str, Any]) -> Content:
    """A row of record examples as what it says."""
    direct = ("answer", "label", "margin", "reward", "turn_rewards", "step_labels", "metadata")
    return Content(
        row_id=example["example_id"],
        kind=example["kind"],
        parts=json.loads(example["messages"]),
        tools=json.loads(example["tools"]) if example["tools"] is not None else None,
        **{name: example[name] for name in direct},
    )


def _row(example_id: str, rendered: RenderedExample, plan: RolloutPlan, sampling: str) -> dict[str, Any]:
    index = INDEX_OF_PART[rendered.part]
    turns = [
        {"role": turn.role, "start": turn.start, "end": turn.end, "reward": turn.reward} for turn in rendered.turns
    ]
    return {
        "rollout_id": plan.rollout_id(example_id, index),
        "segment": rendered.segment,
        "prompt_id": example_id,
        "group_id": plan.group_id(example_id),
        "rollout_index": index,
        "step": plan.step,
        "round": plan.round,
        "purpose": plan.purpose,
        "origin": "dataset",
        "policy_id": DATASET,
        "policy_version": 0,
        "prompt_token_ids": rendered.prompt_token_ids,
        "completion_token_ids": rendered.completion_token_ids,
        "completion_mask": rendered.completion_mask,
        "messages": canonical_json(_messages(rendered)),
        "turns": turns,
        "step_ends": rendered.step_ends,
        "completion_text": rendered.text,
        "finish_reason": "given",
        "status": "truncated" if rendered.is_truncated else "completed",
        "sampling": sampling,
        "seed": plan.seed(example_id, index),
    }


def _messages(rendered: RenderedExample) -> list[dict[str, Any]]:
    parts = rendered.content.parts
    if rendered.part == "text":
        return [{"role": "assistant", "content": parts["text"]}]
    said = parts[rendered.part]
    if rendered.part == "steps":
        said = [{"role": "assistant", "content": "\n".join(said)}]
    return [*parts["prompt"], *said]
