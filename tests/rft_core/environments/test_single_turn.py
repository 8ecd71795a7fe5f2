"""Blocks, identities and the rollouts table of one-turn conversations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError
from data_contracts.refs import PolicyRef
from data_contracts.schemas import PROMPTS, ROLLOUTS
from data_contracts.validation import check_table
from rft_core.engines import Completion, Progress, Request, Sampling
from rft_core.environments import RolloutPlan, plan_blocks, roll_out

PLAN = RolloutPlan(
    step=12,
    round=0,
    purpose="train",
    group_size=2,
    sampling=Sampling(1.0, 1.0, 0, 16),
    run_seed=7,
    policy=PolicyRef("ab" * 16, 11),
    id_prefix="step-00012",
)
MADE = Completion([72, 105, 0], [-0.5, -0.25, -1.0], "stop")


class LetterTokenizer:
    """One token a character; 0 is special; 1 decodes to half a character, which no text file can hold."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join("\ud83d" if token == 1 else chr(token) for token in token_ids if token != 0)


class RecordingEngine:
    """Returns what it was given, and remembers what it was asked."""

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        self.requests: list[Request] = []

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        self.requests.extend(requests)
        return self.completions


def prompts(*ids: str) -> pa.Table:
    rows = [
        {
            "prompt_id": prompt_id,
            "messages": json.dumps([{"role": "user", "content": f"question {prompt_id}"}]),
            "prompt_text": f"question {prompt_id}",
            "prompt_token_ids": [65 + index, 66],
            "answer": "4",
            "metadata": "{}",
            "source": "test",
            "source_row": index,
            "dataset": "test",
            "split": "train",
        }
        for index, prompt_id in enumerate(ids)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS.schema)


def rolled(completions: list[Completion], table: pa.Table, plan: RolloutPlan = PLAN) -> list[dict[str, Any]]:
    found = roll_out(RecordingEngine(completions), table, plan, LetterTokenizer())
    check_table(found, "rollouts")
    return found.to_pylist()


def test_blocks_keep_the_order_and_lose_nothing() -> None:
    table = prompts(*"abcdefg")
    blocks = plan_blocks(table, 3)
    assert [block.num_rows for block in blocks] == [3, 3, 1]
    assert pa.concat_tables(blocks).equals(table)
    assert plan_blocks(table.slice(0, 0), 3) == []
    with pytest.raises(ContractError, match="'b' 2 times"):
        plan_blocks(prompts("a", "b", "b"), 3)


def test_a_row_by_hand() -> None:
    row = rolled([MADE, MADE], prompts("gsm-1"))[1]
    assert row == {
        "rollout_id": "step-00012/gsm-1/01",
        "segment": 0,
        "prompt_id": "gsm-1",
        "group_id": "step-00012/gsm-1",
        "rollout_index": 1,
        "step": 12,
        "round": 0,
        "purpose": "train",
        "origin": "policy",
        "policy_id": "ab" * 16,
        "policy_version": 11,
        "prompt_token_ids": [65, 66],
        "completion_token_ids": [72, 105, 0],
        "completion_mask": [True, True, True],
        "behaviour_logprobs": [-0.5, -0.25, -1.0],
        "messages": '[{"content":"question gsm-1","role":"user"},{"content":"Hi","role":"assistant"}]',
        "turns": [{"role": "assistant", "start": 0, "end": 3, "reward": None, "state_digest": None}],
        "step_ends": None,
        "environment_reward": None,
        "completion_text": "Hi",
        "finish_reason": "stop",
        "status": "completed",
        "error_reason": None,
        "sampling": '{"max_completion_tokens":16,"temperature":1.0,"top_k":0,"top_p":1.0}',
        "seed": PLAN.seed("gsm-1", 1),
    }


def test_schema_is_the_records_own() -> None:
    table = roll_out(RecordingEngine([MADE] * 4), prompts("a", "b"), PLAN, LetterTokenizer())
    assert table.schema.equals(ROLLOUTS.schema, check_metadata=True)
    empty = roll_out(RecordingEngine([]), prompts(), PLAN, LetterTokenizer())
    assert (empty.num_rows, empty.schema) == (0, table.schema)


def test_requests_carry_group_and_seed() -> None:
    engine = RecordingEngine([MADE] * 4)
    table = roll_out(engine, prompts("a", "b"), PLAN, LetterTokenizer())
    assert [request.group for request in engine.requests] == ["step-00012/a"] * 2 + ["step-00012/b"] * 2
    assert [request.prompt_token_ids for request in engine.requests] == [(65, 66)] * 2 + [(66, 66)] * 2
    assert [request.seed for request in engine.requests] == table["seed"].to_pylist()
    assert len({request.seed for request in engine.requests}) == 4


def test_training_seeds_depend_on_the_step_and_evaluation_seeds_do_not() -> None:
    seeds = {PLAN.seed("a", 0), replace(PLAN, step=13).seed("a", 0), replace(PLAN, round=1).seed("a", 0)}
    seeds |= {replace(PLAN, run_seed=8).seed("a", 0), PLAN.seed("b", 0), PLAN.seed("a", 1)}
    assert len(seeds) == 6
    evaluation = replace(PLAN, purpose="evaluation", id_prefix="eval-00012-0")
    assert evaluation.seed("a", 0) == replace(evaluation, step=0).seed("a", 0)
    assert evaluation.seed("a", 0) not in seeds
    assert evaluation.seed("a", 0) != replace(evaluation, round=1).seed("a", 0)
    assert evaluation.rollout_id("a", 0) == "eval-00012-0/a/00"


def test_a_cut_completion_is_truncated() -> None:
    row = rolled([Completion([72, 105], [-1.0, -1.0], "length"), MADE], prompts("a"))[0]
    assert (row["finish_reason"], row["status"], row["error_reason"]) == ("length", "truncated", None)


def test_an_end_token_alone_is_a_completion() -> None:
    row = rolled([Completion([0], [-0.1], "stop"), MADE], prompts("a"))[0]
    assert (row["status"], row["completion_text"], row["completion_token_ids"]) == ("completed", "", [0])


def test_logprobs_may_be_unknown() -> None:
    assert rolled([Completion([72], None, "length"), MADE], prompts("a"))[0]["behaviour_logprobs"] is None


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (Completion([], [], "error", "context_exceeded"), "context_exceeded"),
        (Completion([72], [-1.0], "error", None), "unknown"),
        (Completion([], [], "length"), "empty_completion"),
        (Completion([72, -5], [-1.0, -1.0], "stop"), "undecodable_tokens"),  # chr(-5) raises
        (Completion([72], [math.nan], "stop"), "non_finite_logprobs"),
        (Completion([72], [-math.inf], "stop"), "non_finite_logprobs"),
    ],
)
def test_a_row_that_fails_leaves_the_others(completion: Completion, reason: str) -> None:
    failed, sound = rolled([completion, MADE], prompts("a"))
    assert (failed["finish_reason"], failed["status"], failed["error_reason"]) == ("error", "error", reason)
    for column in ("completion_token_ids", "completion_mask", "behaviour_logprobs", "turns"):
        assert failed[column] == []
    assert failed["completion_text"] == ""
    assert json.loads(failed["messages"]) == [{"role": "user", "content": "question a"}]
    assert sound["status"] == "completed"


def test_half_a_character_becomes_the_replacement_character() -> None:
    row = rolled([Completion([72, 1], [-1.0, -1.0], "length"), MADE], prompts("a"))[0]
    assert row["completion_text"] == "H\ufffd"
    assert json.loads(row["messages"])[1]["content"] == "H\ufffd"


@pytest.mark.parametrize(
    ("completions", "named"),
    [
        ([MADE], "2 completions, got 1"),
        ([MADE] * 3, "2 completions, got 3"),
        ([MADE, Completion([72], [-1.0, -2.0], "stop")], "one logprob per token, got 2 for 1"),
        ([MADE, Completion([72], [-1.0], "eos")], "finish_reason.*'eos'"),
    ],
)
def test_an_engine_that_breaks_its_contract_is_an_error(completions: list[Completion], named: str) -> None:
    with pytest.raises(ContractError, match=named):
        rolled(completions, prompts("a"))
