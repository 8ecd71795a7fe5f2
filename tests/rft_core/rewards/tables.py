"""Small rollouts and prompts tables for the tests of rewards and evaluation."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from data_contracts.schemas import RECORDS, canonical_json


def prompts_table(*prompts: dict[str, Any]) -> pa.Table:
    """Rows from {prompt_id, answer, metadata, question}; the rest is filled."""
    rows = []
    for index, prompt in enumerate(prompts):
        question = prompt.get("question", "How many?")
        rows.append(
            {
                "prompt_id": prompt["prompt_id"],
                "messages": canonical_json([{"role": "user", "content": question}]),
                "prompt_text": f"<user>{question}<assistant>",
                "prompt_token_ids": [1, 2],
                "tools": None,
                "answer": prompt.get("answer"),
                "metadata": canonical_json(prompt.get("metadata", {})),
                "media": None,
                "source": "test",
                "source_row": index + 1,
                "dataset": "test",
                "split": "train",
            }
        )
    return pa.Table.from_pylist(rows, RECORDS["prompts"].schema)


def rollouts_table(*rollouts: dict[str, Any]) -> pa.Table:
    """Rows from {prompt_id, text, index, segment, status, error_reason, temperature, question, token_ids, mask}; the
    rest is filled.
    """
    rows = []
    for rollout in rollouts:
        prompt_id, index = rollout["prompt_id"], rollout.get("index", 0)
        status, text = rollout.get("status", "completed"), rollout.get("text", "")
        token_ids = rollout.get("token_ids", [3])
        question = {"role": "user", "content": rollout.get("question", "How many?")}
        rows.append(
            {
                "rollout_id": rollout.get("rollout_id", f"step-00001/{prompt_id}/{index:02d}"),
                "segment": rollout.get("segment", 0),
                "prompt_id": prompt_id,
                "group_id": f"step-00001/{prompt_id}",
                "rollout_index": index,
                "step": 1,
                "round": 0,
                "purpose": "train",
                "origin": "policy",
                "policy_id": "p0",
                "policy_version": 0,
                "prompt_token_ids": [1, 2],
                "completion_token_ids": token_ids,
                "completion_mask": rollout.get("mask", [True] * len(token_ids)),
                "behaviour_logprobs": [-0.5] * len(token_ids),
                "messages": canonical_json([question, {"role": "assistant", "content": text}]),
                "turns": [],
                "step_ends": None,
                "environment_reward": None,
                "completion_text": text,
                "finish_reason": "error" if status == "error" else "stop",
                "status": status,
                "error_reason": rollout.get("error_reason"),
                "sampling": canonical_json({"temperature": rollout.get("temperature", 1.0)}),
                "seed": 0,
            }
        )
    return pa.Table.from_pylist(rows, RECORDS["rollouts"].schema)
