"""One small good table per record, to be broken by tests one cell at a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from data_contracts.schemas import RECORDS

LINE = {"source": "sums.jsonl", "source_row": 1}
SOURCE = {**LINE, "dataset": "sums"}


def good_rows(record: str) -> list[dict[str, Any]]:
    """Two rows that differ in key and, where the record has alternatives, in kind."""
    first, second = _ROWS[record]
    return [dict(first), {**first, **second}]


def table_of(record: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, RECORDS[record].schema)


def broken(record: str, column: str, value: Any, row: int = 1) -> pa.Table:
    """The good table with one cell replaced."""
    rows = good_rows(record)
    assert column in rows[row], column
    rows[row][column] = value
    return table_of(record, rows)


_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts": (
        {
            "prompt_id": "sums-00001",
            "messages": '[{"content":"1+1?","role":"user"}]',
            "prompt_text": "user: 1+1?",
            "prompt_token_ids": [1, 2],
            "tools": None,
            "answer": "2",
            "metadata": "{}",
            "media": None,
            **SOURCE,
            "split": "train",
        },
        {"prompt_id": "sums-00002", "prompt_text": "user: 2+2?", "source_row": 2, "split": "heldout", "tools": "[]"},
    ),
    "examples": (
        {
            "example_id": "pairs-00001",
            "kind": "pair",
            "messages": '{"chosen":[],"prompt":[],"rejected":[]}',
            "tools": None,
            "answer": None,
            "label": None,
            "margin": 0.5,
            "reward": None,
            "turn_rewards": None,
            "step_labels": None,
            "metadata": "{}",
            **SOURCE,
            "split": "train",
        },
        {"example_id": "pairs-00002", "kind": "labelled", "label": False, "margin": None},
    ),
    "rollouts": (
        {
            "rollout_id": "step-00001/sums-00001/00",
            "segment": 0,
            "prompt_id": "sums-00001",
            "group_id": "step-00001/sums-00001",
            "rollout_index": 0,
            "step": 1,
            "round": 0,
            "purpose": "train",
            "origin": "policy",
            "policy_id": "ab" * 16,
            "policy_version": 0,
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [5, 6, 2],
            "completion_mask": [True, True, True],
            "behaviour_logprobs": [-0.5, -1.0, 0.0],
            "messages": "[]",
            "turns": [{"role": "assistant", "start": 0, "end": 3, "reward": None, "state_digest": None}],
            "step_ends": None,
            "environment_reward": None,
            "completion_text": "2",
            "finish_reason": "stop",
            "status": "completed",
            "error_reason": None,
            "sampling": '{"temperature":1.0}',
            "seed": 7,
        },
        {
            "rollout_id": "step-00001/sums-00001/01",
            "rollout_index": 1,
            "completion_token_ids": [],
            "completion_mask": [],
            "behaviour_logprobs": None,
            "turns": [],
            "finish_reason": "error",
            "status": "error",
            "error_reason": "engine_died",
        },
    ),
    "rewards": (
        {
            "rollout_id": "step-00001/sums-00001/00",
            "group_id": "step-00001/sums-00001",
            "reward": 0.0,
            "components": [("exact_match", 0.0)],
            "component_status": [("exact_match", "scored")],
            "status": "scored",
            "reason": None,
            "turn_rewards": None,
            "step_rewards": None,
            "grader_digest": "cd" * 16,
        },
        {
            "rollout_id": "step-00001/sums-00001/01",
            "reward": None,
            "components": [("exact_match", None)],
            "component_status": [("exact_match", "rollout_failed")],
            "status": "unscored",
            "reason": "rollout_failed",
        },
    ),
    "token_scores": (
        {
            "rollout_id": "step-00001/sums-00001/00",
            "segment": 0,
            "scorer": "old",
            "model_id": "ab" * 16,
            "values": [-0.5, -1.0, -0.1],
        },
        {"scorer": "reference"},
    ),
    "advantages": (
        {
            "rollout_id": "step-00001/sums-00001/00",
            "segment": 0,
            "group_id": "step-00001/sums-00001",
            "advantage": 0.7,
            "token_advantages": None,
            "returns": None,
            "weight": 1.0,
            "is_trained": True,
            "drop_reason": "none",
            "pair_id": None,
            "pair_role": None,
            "term": "own",
        },
        {
            "rollout_id": "step-00001/sums-00001/01",
            "advantage": 0.0,
            "is_trained": False,
            "drop_reason": "unscored",
        },
    ),
    "updates": (
        {
            "policy_version": 1,
            "optimizer_step": 1,
            "loss": -0.1,
            "policy_loss": -0.1,
            "value_loss": None,
            "distillation_loss": None,
            "entropy_coefficient": None,
            "kl": None,
            "uncorrected_tokens": 0,
            "entropy": 1.2,
            "clip_ratio_low": 0.0,
            "clip_ratio_high": 0.0,
            "clip_ratio_region": 0.0,
            "clip_ratio_dual": 0.0,
            "kl_coefficient": None,
            "ratio_max": 1.0,
            "sampling_ratio_mean": None,
            "effective_sample_size": None,
            "sampling_logp_difference_mean": None,
            "sampling_logp_difference_max": None,
            "grad_norm": 0.4,
            "learning_rate": 1e-5,
            "trained_rows": 8,
            "trained_tokens": 100,
            "off_policy_rows": 0,
            "forward_rows": 8,
            "skipped": None,
        },
        {"optimizer_step": 2, "loss": float("nan"), "grad_norm": float("inf"), "skipped": "non_finite"},
    ),
    "evaluations": (
        {
            "policy_id": "ab" * 16,
            "suite": "heldout",
            "metric": "greedy_accuracy",
            "step": 0,
            "policy_version": 0,
            "value": 0.5,
            "low": 0.4,
            "high": 0.6,
            "num_prompts": 10,
            "num_samples": 10,
        },
        {"metric": "pass@4", "num_samples": 40},
    ),
    "quarantine": (
        {**LINE, "reason": "not_json", "action": "rejected", "detail": "Expecting value at column 1", "raw": b"\xff"},
        {"source_row": 2, "reason": "duplicate_prompt", "detail": "the same prompt as row 1"},
    ),
    "prompt_stats": (
        {"prompt_id": "sums-00001", "attempts": 8.0, "passes": 2.0, "draws": 1, "last_step": 3},
        {"prompt_id": "sums-00002", "passes": 0.0},
    ),
}
