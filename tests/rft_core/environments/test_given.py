"""Given completions as rollouts: what is trained behind which prompt, ids, turns, steps, segments."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError
from data_contracts.refs import PolicyRef
from data_contracts.schemas import ROLLOUTS
from data_contracts.validation import check_table
from rft_core.data.examples import Content
from rft_core.data.faults import Faults
from rft_core.data.prompts import RenderedPrompt, Renderer
from rft_core.data.settings import DataSettings
from rft_core.engines import Sampling
from rft_core.environments import RolloutPlan, given_rollouts, plan_blocks
from rft_core.environments.given import content_of
from tests.rft_core.data.chat_templates import STYLES
from tests.rft_core.data.given_conversations import assistant, user
from tests.rft_core.given_examples import (
    demonstration,
    example,
    labelled,
    pair,
    stepwise,
    table_of,
    text,
    trajectory,
)
from tests.tiny import make_tiny_tokenizer

PLAN = RolloutPlan(
    step=3,
    round=0,
    purpose="train",
    group_size=8,
    sampling=Sampling(1.0, 1.0, 0, 16),
    run_seed=7,
    policy=PolicyRef("given", 0),
    id_prefix="step-00003",
)
TOKENIZER = make_tiny_tokenizer()
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": {}}}
# Its template drops what the assistant thought in earlier turns, so each turn stands behind another prompt.
FORGETS = (
    "{% for message in messages %}{% set said = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def rolled(*examples: dict, plan: RolloutPlan = PLAN, tokenizer=TOKENIZER, **settings) -> list[dict[str, Any]]:
    data = DataSettings(**{"source": "given.jsonl", "record": "demonstrations", **settings})
    table = given_rollouts(table_of(*examples), plan, Renderer(tokenizer, data), data)
    assert table.schema.equals(ROLLOUTS.schema, check_metadata=True)
    check_table(table, "rollouts")
    rows = table.to_pylist()
    for row in rows:
        assert (row["origin"], row["finish_reason"], row["policy_id"]) == ("dataset", "given", "dataset")
        assert row["behaviour_logprobs"] is None and row["sampling"] == "{}"
    return rows


def ids(said: str) -> list[int]:
    return TOKENIZER.encode(said, add_special_tokens=False)


def test_a_row_by_hand():
    [row] = rolled(demonstration("gsm-1"))
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert row == {
        "rollout_id": "step-00003/gsm-1/00",
        "segment": 0,
        "prompt_id": "gsm-1",
        "group_id": "step-00003/gsm-1",
        "rollout_index": 0,
        "step": 3,
        "round": 0,
        "purpose": "train",
        "origin": "dataset",
        "policy_id": "dataset",
        "policy_version": 0,
        "prompt_token_ids": ids(prompt),
        "completion_token_ids": ids("4<|im_end|>"),
        "completion_mask": [True, True],
        "behaviour_logprobs": None,
        "messages": '[{"content":"2+2?","role":"user"},{"content":"4","role":"assistant"}]',
        "turns": [{"role": "assistant", "start": 0, "end": 2, "reward": None, "state_digest": None}],
        "step_ends": None,
        "environment_reward": None,
        "completion_text": "4",
        "finish_reason": "given",
        "status": "completed",
        "error_reason": None,
        "sampling": "{}",
        "seed": PLAN.seed("gsm-1", 0),
    }


def test_both_completions_of_a_pair_are_one_group_with_chosen_first():
    rows = rolled(pair("a"), pair("b", "1+1?", "2", "11"), record="preferences")
    assert [(row["rollout_id"], row["group_id"], row["rollout_index"]) for row in rows] == [
        ("step-00003/a/00", "step-00003/a", 0),
        ("step-00003/a/01", "step-00003/a", 1),
        ("step-00003/b/00", "step-00003/b", 0),
        ("step-00003/b/01", "step-00003/b", 1),
    ]
    assert [row["completion_text"] for row in rows] == ["4", "five", "2", "11"]
    assert rows[0]["prompt_token_ids"] == rows[1]["prompt_token_ids"] != rows[2]["prompt_token_ids"]
    assert json.loads(rows[1]["messages"]) == [user("2+2?"), assistant("five")]
    assert len({row["seed"] for row in rows}) == 4


# The others need a completion that begins or ends as they do: see data/test_masks.py.
@pytest.mark.parametrize("style", [style for style in STYLES if style not in ("begins_reasoning", "no_end")])
def test_prompts_are_the_very_tokens_that_the_data_stage_gives(style):
    tokenizer = STYLES[style]()
    data = DataSettings(source="x")
    histories = [[user("2+2?")], [user("a"), assistant("b"), user("c")]]
    contents = [Content("row", "prompt", {"prompt": history}) for history in histories]
    prompts = Renderer(tokenizer, data).render_prompts(contents, [Faults({}) for _ in contents])
    examples = [
        example("p", "pair", {"prompt": history, "chosen": [assistant("x y")], "rejected": [assistant("z")]})
        for history in histories
    ]
    for prompt, given in zip(prompts, examples, strict=True):
        assert isinstance(prompt, RenderedPrompt)
        for row in rolled(given, tokenizer=tokenizer, record="preferences"):
            assert row["prompt_token_ids"] == prompt.token_ids


def test_tools_are_rendered_with_the_prompt():
    tokenizer = STYLES[next(style for style in STYLES if "tools" in STYLES[style]().chat_template)]()
    with_tools, without = (
        rolled(demonstration("a") | {"tools": tools}, tokenizer=tokenizer)[0] for tools in (json.dumps([TOOL]), None)
    )
    assert len(with_tools["prompt_token_ids"]) > len(without["prompt_token_ids"])
    assert with_tools["completion_token_ids"] == without["completion_token_ids"]


def test_turns_of_a_trajectory_carry_their_rewards_and_only_the_assistant_is_trained():
    [row] = rolled(trajectory("t", "ab", "c", turn_rewards=[0.5, -1.0]), record="trajectories")
    between = "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    assert row["completion_token_ids"] == ids("ab<|im_end|>" + between + "c<|im_end|>")
    first, middle, last = row["turns"]
    assert [(turn["role"], turn["reward"]) for turn in (first, middle, last)] == [
        ("assistant", 0.5),
        ("user", None),
        ("assistant", -1.0),
    ]
    assert (first["start"], first["end"], last["end"]) == (0, 3, len(row["completion_token_ids"]))
    trained = [token for token, flag in zip(row["completion_token_ids"], row["completion_mask"], strict=True) if flag]
    assert trained == ids("ab<|im_end|>c<|im_end|>")
    [last_only] = rolled(trajectory("t", "ab", "c"), record="trajectories", train_on="last_turn")
    assert last_only["completion_token_ids"] == ids("c<|im_end|>")


def test_a_template_that_forgets_cuts_a_conversation_into_segments():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = FORGETS
    rows = rolled(
        trajectory("t", "<think>x</think>ab", "<think>y</think>c"), tokenizer=tokenizer, record="trajectories"
    )
    assert [(row["rollout_id"], row["segment"]) for row in rows] == [("step-00003/t/00", 0), ("step-00003/t/00", 1)]
    assert len({row["group_id"] for row in rows}) == len({row["seed"] for row in rows}) == 1
    decoded = [tokenizer.decode(row["prompt_token_ids"]) for row in rows]
    assert "think" not in decoded[1] and decoded[1].endswith(
        "ab<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [row["completion_text"] for row in rows] == ["<think>x</think>ab", "<think>y</think>c"]


def test_steps_end_where_their_separators_do():
    [row] = rolled(stepwise("s", [1.0, 0.0], "ab", "cde"), record="stepwise")
    assert row["completion_token_ids"] == ids("ab\ncde<|im_end|>")
    assert row["step_ends"] == [2, 5]  # the line break, and the last letter: the stop token ends the turn, no step
    assert json.loads(row["messages"])[1] == assistant("ab\ncde")


def test_a_text_is_trained_but_for_its_first_token():
    [row] = rolled(text("t", "hello"), render="plain")
    assert (row["prompt_token_ids"], row["completion_token_ids"]) == (ids("h"), ids("ello<|im_end|>"))
    assert all(row["completion_mask"])
    assert json.loads(row["messages"]) == [assistant("hello")]


def test_labelled_completions_are_groups_of_their_own_whatever_their_prompt():
    rows = rolled(labelled("a", True), labelled("b", False, answer="5"), record="labelled")
    assert len({row["group_id"] for row in rows}) == 2
    assert rows[0]["prompt_token_ids"] == rows[1]["prompt_token_ids"]


def test_a_long_example_is_cut_and_says_so():
    limit = len(ids("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")) + 3
    [row] = rolled(demonstration("a", answer="abcdef"), max_tokens=limit, policies={"too_long": "repair"})
    assert (row["status"], row["finish_reason"], row["completion_token_ids"]) == ("truncated", "given", ids("abc"))


def test_an_example_that_cannot_be_rendered_now_names_itself():
    with pytest.raises(ContractError, match=r"example a passed the data stage.*too_long"):
        rolled(demonstration("a", answer="abcdef"), max_tokens=10)


def test_evaluation_rows_are_the_same_at_every_step():
    plan = replace(PLAN, purpose="evaluation", step=0, id_prefix="eval-given")
    [row] = rolled(demonstration("a"), plan=plan)
    assert (row["rollout_id"], row["purpose"], row["step"]) == ("eval-given/a/00", "evaluation", 0)
    assert rolled(demonstration("a"), plan=replace(plan, policy=PolicyRef("other", 9))) == [row]


def test_examples_come_back_as_they_were_said():
    rows = [
        pair("a", margin=0.5),
        labelled("b", False),
        trajectory("c", "x", "y", reward=2.0, turn_rewards=[1.0, None]),
        stepwise("d", [1.0], "x"),
        demonstration("e", tools=[TOOL], answer="4"),
    ]
    for row in rows:
        [stored] = table_of(row).to_pylist()
        content = content_of(stored)
        assert (content.row_id, content.kind) == (row["example_id"], row["kind"])
        assert content.parts == json.loads(row["messages"])
        assert content.tools == ([TOOL] if row["example_id"] == "e" else None)
        for name in ("label", "margin", "reward", "turn_rewards", "step_labels"):
            assert getattr(content, name) == row.get(name)


def test_blocks_are_cut_by_example():
    table = table_of(*(demonstration(name) for name in "abcde"))
    blocks = plan_blocks(table, 2, "example_id")
    assert [block["example_id"].to_pylist() for block in blocks] == [["a", "b"], ["c", "d"], ["e"]]
    data = DataSettings(source="given.jsonl", record="demonstrations")
    renderer = Renderer(TOKENIZER, data)
    parts = [given_rollouts(block, PLAN, renderer, data) for block in blocks]
    assert pa.concat_tables(parts).equals(given_rollouts(table, PLAN, renderer, data))
    with pytest.raises(ContractError, match="distinct example_id, got 'a' 2 times"):
        plan_blocks(pa.concat_tables([table, table]), 2, "example_id")
    assert given_rollouts(table.slice(0, 0), PLAN, renderer, data).num_rows == 0
