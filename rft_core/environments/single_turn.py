"""One prompt, one completion."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pyarrow as pa

from data_contracts.errors import ContractError
from data_contracts.schemas import ROLLOUTS, canonical_json
from rft_core.engines import Completion, Engine, Progress, Request
from rft_core.environments.plan import RolloutPlan

STATUS_OF_FINISH = {"stop": "completed", "length": "truncated", "error": "error"}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # a tokenizer may decode to one; Arrow and JSON cannot hold it
UNDECODABLE = (ValueError, TypeError, IndexError, KeyError, OverflowError)  # UnicodeError is a ValueError


def roll_out(
    engine: Engine, prompts_block: pa.Table, plan: RolloutPlan, tokenizer: Any, progress: Progress | None = None
) -> pa.Table:
    """group_size rollouts of every prompt of the block: record `rollouts`, ordered by prompt and index.

    Rows fail alone, with the engine's error_reason or `undecodable_tokens`, `empty_completion`, `non_finite_logprobs`.
    An engine that returns another number of completions, or values that are none, raises ContractError.
    """
    prompts = prompts_block.select(["prompt_id", "messages", "prompt_token_ids"]).to_pylist()
    members = [(prompt, index) for prompt in prompts for index in range(plan.group_size)]
    requests = [
        Request(
            tuple(prompt["prompt_token_ids"]),
            plan.seed(prompt["prompt_id"], index),
            plan.group_id(prompt["prompt_id"]),
        )
        for prompt, index in members
    ]
    completions = engine.generate(requests, plan.sampling, progress) if requests else []
    if len(completions) != len(requests):
        raise ContractError(f"the engine must return {len(requests)} completions, got {len(completions)}")
    sampling = plan.sampling_json
    rows = [
        _row(prompt, index, request.seed, completion, plan, sampling, tokenizer)
        for (prompt, index), request, completion in zip(members, requests, completions, strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS.schema)
    expected = prompts_block.num_rows * plan.group_size
    if table.num_rows != expected:
        raise ContractError(
            f"{prompts_block.num_rows} prompts x {plan.group_size} must give {expected} rollouts, got {table.num_rows}"
        )
    return table


def _row(
    prompt: dict[str, Any],
    index: int,
    seed: int,
    completion: Completion,
    plan: RolloutPlan,
    sampling: str,
    tokenizer: Any,
) -> dict[str, Any]:
    completion, text = _checked(completion, tokenizer)
    messages = json.loads(prompt["messages"])
    num_tokens = len(completion.token_ids)
    is_error = completion.finish_reason == "error"
    if not is_error:
        messages = [*messages, {"role": "assistant", "content": text}]
    return {
        "rollout_id": plan.rollout_id(prompt["prompt_id"], index),
        "segment": 0,
        "prompt_id": prompt["prompt_id"],
        "group_id": plan.group_id(prompt["prompt_id"]),
        "rollout_index": index,
        "step": plan.step,
        "round": plan.round,
        "purpose": plan.purpose,
        "origin": "policy",
        "policy_id": plan.policy.policy_id,
        "policy_version": plan.policy.version,
        "prompt_token_ids": prompt["prompt_token_ids"],
        "completion_token_ids": completion.token_ids,
        "completion_mask": [True] * num_tokens,
        "behaviour_logprobs": completion.logprobs,
        "messages": canonical_json(messages),
        "turns": [] if is_error else [{"role": "assistant", "start": 0, "end": num_tokens}],
        "completion_text": text,
        "finish_reason": completion.finish_reason,
        "status": STATUS_OF_FINISH[completion.finish_reason],
        "error_reason": completion.error_reason,
        "sampling": sampling,
        "seed": seed,
    }


def _checked(completion: Completion, tokenizer: Any) -> tuple[Completion, str]:
    """The completion and its text, or its failure and an empty text."""
    if completion.finish_reason not in STATUS_OF_FINISH:
        raise ContractError(f"finish_reason must be one of {list(STATUS_OF_FINISH)}, got {completion.finish_reason!r}")
    if completion.finish_reason == "error":
        return Completion.failed(completion.error_reason or "unknown"), ""
    if completion.logprobs is not None and len(completion.logprobs) != len(completion.token_ids):
        raise ContractError(
            f"an engine must give one logprob per token, got {len(completion.logprobs)} for {len(completion.token_ids)}"
        )
    if not completion.token_ids:
        return Completion.failed("empty_completion"), ""
    if completion.logprobs is not None and not all(math.isfinite(logprob) for logprob in completion.logprobs):
        return Completion.failed("non_finite_logprobs"), ""
    try:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    except UNDECODABLE:
        return Completion.failed("undecodable_tokens"), ""
    return completion, LONE_SURROGATE.sub("\ufffd", text)
