"""Record prompts: texts and messages, answers, tools, ids, metadata; each fault with its code."""

from __future__ import annotations

import hashlib
import json

import pytest

from rft_core.data.faults import Fault, Faults
from tests.rft_core.data.examples.rows import assistant, read, read_all, rejection, system, tool, user

CALLED = assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])


def test_a_text_is_what_the_user_says():
    content = read({"prompt": " 1+1?\n", "answer": "2", "level": 3}, "prompts")
    assert content.kind == "prompt" and content.parts == {"prompt": [user(" 1+1?\n")]}
    assert (content.answer, content.tools, content.metadata) == ("2", None, '{"level":3}')
    assert content.label is content.margin is content.reward is content.turn_rewards is content.step_labels is None


def test_system_and_suffix_go_where_they_belong():
    value = {"prompt": [user("a"), assistant("b"), user("c")]}
    assert read(value, "prompts", system="Be brief.", suffix="!").parts["prompt"] == [
        system("Be brief."),
        user("a"),
        assistant("b"),
        user("c!"),
    ]
    own = {"prompt": [system("Own."), user("a")]}
    assert read(own, "prompts", system="Be brief.").parts["prompt"] == own["prompt"]
    developer = {"prompt": [{"role": "developer", "content": "d"}, user("a")]}
    assert read(developer, "prompts", system="Be brief.").parts["prompt"] == developer["prompt"]
    # The suffix follows the user's last words also where a tool speaks last.
    value = {"prompt": [user("a"), CALLED, tool("5")]}
    assert [message["content"] for message in read(value, "prompts", suffix="!").parts["prompt"]] == ["a!", "", "5"]


def test_a_rows_own_system_message_comes_before_the_recipes():
    assert read({"prompt": "a", "system": "row"}, "prompts", system="recipe").parts["prompt"][0] == system("row")
    for none in (None, " "):
        found = read({"prompt": "a", "system": none}, "prompts", system="recipe")
        assert found.parts["prompt"][0] == system("recipe")
    assert read({"prompt": [system("own"), user("a")], "system": "row"}, "prompts").parts["prompt"][0] == system("own")
    assert rejection({"prompt": "a", "system": 5}, "prompts") == (
        "content_not_text",
        "system must be a text, found int 5",
    )


def test_the_raw_row_is_not_changed():
    value = {"prompt": [user("a")], "tools": [{"name": "find", "x": None}]}
    before = json.dumps(value)
    read(value, "prompts", system="s", suffix="!")
    assert json.dumps(value) == before


def test_verl():
    value = {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": "2+2?", "role": "user"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": "train", "answer": "2+2=4 #### 4"},
    }
    content = read(value, "prompts", source="train.parquet")
    assert content.parts == {"prompt": [user("2+2?")]} and content.answer == "4"
    assert json.loads(content.metadata) == {name: item for name, item in value.items() if name != "prompt"}


def test_messages_in_a_cell_of_a_table():
    cell = json.dumps([system("s"), user("2+2?")])
    assert read({"prompt": cell, "answer": "4"}, "prompts", source="a.csv").parts["prompt"] == [
        system("s"),
        user("2+2?"),
    ]


def test_plain_and_conversational_rows_mix():
    # A first row of the one kind says nothing about the others.
    like = {"prompt": "a"}
    assert read({"prompt": [user("b")]}, "prompts", like=like).parts == {"prompt": [user("b")]}
    assert read({"prompt": "b"}, "prompts", like={"prompt": [user("a")]}).parts == {"prompt": [user("b")]}


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        ({"question": "x"}, "missing_field", "the row must have the field prompt, found question; data.fields says"),
        ({"prompt": None}, "empty_prompt", "prompt must be a text or a list of messages, found null"),
        ({"prompt": ""}, "empty_prompt", "found str ''"),
        ({"prompt": " \n\u00a0"}, "empty_prompt", "must hold more than white space"),
        ({"prompt": []}, "empty_prompt", "at least one message"),
        ({"prompt": [user(" ")]}, "empty_prompt", "the last message of prompt must hold text, found str ' '"),
        ({"prompt": 5}, "prompt_not_text", "found int 5"),
        ({"prompt": {"role": "user", "content": "x"}}, "prompt_not_text", "found dict"),
        ({"prompt": "[{'role': 'user', 'content': 'a'}]"}, "prompt_not_text", "write the cell with json.dumps"),
        ({"prompt": ["x"]}, "bad_message", "prompt[0] must be an object"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "unknown_role", "the role of prompt[0]"),
        ({"prompt": [user("x"), system("y")]}, "wrong_role_order", "prompt[1]: a system message comes first"),
        (
            {"prompt": [user("x"), assistant("y")]},
            "last_not_user",
            "prompt must end with a message of the user or a tool, found assistant; a row with the assistant's answer",
        ),
        ({"prompt": [system("x")]}, "last_not_user", "found system"),
        ({"prompt": [{"role": "user", "content": None}]}, "content_not_text", "the content of prompt[0]"),
        ({"prompt": "x", "tools": "find"}, "bad_tools", "tools must be a list of objects, or its JSON text"),
        ({"prompt": "x", "tools": ["find"]}, "bad_tools", "found list ['find']"),
        ({"prompt": "x", "tools": {"name": "find"}}, "bad_tools", "found dict"),
        ({"prompt": "x", "id": True}, "bad_id", "id must be a text or an integer, found bool True"),
        ({"prompt": "x", "id": ["a"]}, "bad_id", "found list ['a']"),
        ({"prompt": "x", "level": float("nan")}, "fields_not_json", "level must be a JSON value, found float nan"),
        ({"prompt": "x", "answer": float("inf")}, "fields_not_json", "answer must be a JSON value, found float inf"),
        ({"prompt": "x", "when": {1, 2}}, "fields_not_json", "when must be a JSON value, found set {1, 2}"),
        ({"prompt": "a \ud800"}, "lone_surrogate", "prompt must be valid Unicode, found half of a pair: '\\ud800'"),
        ({"prompt": "x", "note": ["\udfff"]}, "lone_surrogate", "note must be valid Unicode"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(value, reason, told):
    found, detail = rejection(value, "prompts", like={"prompt": "x", "tools": [], "id": "a", "answer": "b"})
    assert found == reason and told in detail


def test_lists_that_are_too_deep_are_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert rejection({"prompt": "a", "x": deep}, "prompts")[0] == "fields_not_json"
    assert rejection({"prompt": deep}, "prompts")[0] == "fields_not_json"


@pytest.mark.parametrize("tools", [None, [], "", "[]", " [] "])
def test_no_tools(tools):
    assert read({"prompt": "a", "tools": tools}, "prompts").tools is None


def test_tools_may_be_spelled_in_json_and_lose_their_nulls():
    tools = [{"type": "function", "function": {"name": "find", "strict": None}}]
    for given in (tools, json.dumps(tools), " " + json.dumps(tools)):
        found = read({"prompt": "a", "tools": given}, "prompts").tools
        assert found == [{"type": "function", "function": {"name": "find"}}]


# ds-01-answer-int-and-string: one column of texts, whatever the file holds.
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("5", "5"),
        ("12b", "12b"),
        (42, "42"),
        (3.5, "3.5"),
        (42.0, "42.0"),
        (True, "true"),
        (["a", 1], '["a",1]'),
        ({"b": None, "a": 2}, '{"a":2,"b":null}'),
        ("", ""),
        (None, None),
    ],
)
def test_an_answer_becomes_text(given, text):
    faults = Faults({})
    assert read({"prompt": "a", "answer": given}, "prompts", faults=faults).answer == text
    assert [fault.reason for fault in faults.found] == ["answer_not_text"] * (not isinstance(given, str | None))


def test_a_converted_answer_is_noted_or_refused_as_the_recipe_says():
    faults = Faults({})
    read({"prompt": "a", "answer": 42}, "prompts", faults=faults)
    detail = "answer must be a text, found int 42; as text it is '42'"
    assert faults.found == [Fault("answer_not_text", detail, "repaired")]
    assert rejection({"prompt": "a", "answer": 42}, "prompts", policies={"answer_not_text": "reject"}) == (
        "answer_not_text",
        detail,
    )


def test_ids_of_ds_09():
    """Case ds-09-duplicate-ids: 1 and '1' are the same id; a null id becomes one of the content, whatever the row."""
    rows = [
        {"id": 1, "prompt": "2+2?", "answer": "4"},
        {"id": "1", "prompt": "2+3?", "answer": "5"},
        {"id": "k", "prompt": "9-1?", "answer": "8"},
        {"id": "k", "prompt": "9-1?", "answer": "8"},
        {"id": None, "prompt": "7-1?", "answer": "6"},
    ]
    ids = [read(value, "prompts", row=number, source="sums.jsonl").row_id for number, value in enumerate(rows, 1)]
    digits = hashlib.sha256(b'{"answer":"6","prompt":"7-1?"}').hexdigest()[:12]
    assert ids == ["1", "1", "k", "k", f"sums-{digits}"]
    assert read(rows[4], "prompts", row=99, source="sums.jsonl").row_id == ids[4]


def test_a_content_id_follows_what_the_row_says_and_nothing_else():
    value = {"question": "7-1?", "answer": "6", "level": 1}
    first = read(value, "prompts").row_id
    assert read({"prompt": "7-1?", "answer": "6", "level": 2}, "prompts", system="s", suffix="!").row_id == first
    assert read({**value, "answer": "7"}, "prompts").row_id != first
    assert read(value, "prompts", source="reasoning_gym:chain_sum", row=3).row_id == "chain_sum-00003"


def test_a_row_gives_one_content():
    assert len(read_all({"prompt": "a"}, "prompts")) == 1
