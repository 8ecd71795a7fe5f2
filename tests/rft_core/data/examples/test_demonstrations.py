"""Record demonstrations: conversations, prompts with completions, plain texts; where the completion begins."""

from __future__ import annotations

import json

import pytest

from tests.rft_core.data.examples.rows import assistant, read, rejection, system, tool, user

CALL = {"function": {"name": "find", "arguments": {"names": ["ann lee", "bo ray"], "exact": True}}}


def parts(value: dict, **rest) -> dict:
    content = read(value, "demonstrations", **rest)
    assert content.kind == "demonstration"
    return content.parts


@pytest.mark.parametrize(
    ("messages", "num_prompt"),
    [
        ([user("a"), assistant("b")], 1),
        ([system("s"), user("a"), assistant("b")], 2),
        ([user("a"), assistant("b"), user("c"), assistant("d")], 1),
        ([user("a"), user("b"), assistant("c")], 2),
        ([system("s"), assistant("a"), user("b"), assistant("c")], 1),
        ([user("a"), assistant("b"), user("c")], 1),
        ([user("a"), assistant("", tool_calls=[CALL]), tool("5"), assistant("b")], 1),
    ],
)
def test_the_completion_begins_with_the_assistants_first_message(messages, num_prompt):
    assert parts({"messages": messages}) == {"prompt": messages[:num_prompt], "completion": messages[num_prompt:]}


def test_sharegpt():
    value = {
        "system": "s",
        "conversations": [
            {"from": "human", "value": "Who?"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"names": ["ann"]}}'},
            {"from": "observation", "value": "Ann Lee"},
            {"from": "gpt", "value": "Ann."},
        ],
        "tools": '[{"name": "find"}]',
        "topic": "people",
    }
    content = read(value, "demonstrations")
    call = {"name": "find", "arguments": {"names": ["ann"]}}
    assert content.parts == {
        "prompt": [system("s"), user("Who?")],
        "completion": [assistant("", tool_calls=[call]), tool("Ann Lee"), assistant("Ann.")],
    }
    assert content.tools == [{"name": "find"}] and content.metadata == '{"topic":"people"}'


def test_calls_of_ds_05_stay_plain():
    """Case ds-05-numpy-after-parquet."""
    row = {
        "id": "n1",
        "messages": [user("Find these."), assistant("", tool_calls=[CALL])],
        "tools": [{"name": "find"}],
    }
    content = read(row, "demonstrations", source="rows.parquet")
    assert content.row_id == "n1" and content.tools == [{"name": "find"}]
    assert content.parts == {"prompt": [user("Find these.")], "completion": [assistant("", tool_calls=[CALL])]}
    assert json.loads(json.dumps(content.parts)) == content.parts


def test_alpaca():
    value = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert parts(value) == {"prompt": [user("Add.\n1 and 2")], "completion": [assistant("3")]}
    value["history"] = [["Hi", "Hello"]]
    assert parts(value) == {
        "prompt": [user("Hi"), assistant("Hello"), user("Add.\n1 and 2")],
        "completion": [assistant("3")],
    }


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("2+2?", "4"),
        ([user("2+2?")], "4"),
        ("2+2?", [assistant("4")]),
        ([user("2+2?")], [assistant("4")]),
        # The whole conversation as completion: what follows the prompt.
        ("2+2?", [user("2+2?"), assistant("4")]),
        ([system("s"), user("2+2?")], [user("2+2?"), assistant("4")]),
        ("2+2?", assistant("4")),
        ("2+2?", {"from": "gpt", "value": "4"}),
    ],
)
def test_prompt_and_completion_in_every_mixture(prompt, completion):
    found = parts({"prompt": prompt, "completion": completion}, like={"prompt": "a", "completion": "b"})
    assert found["completion"] == [assistant("4")] and found["prompt"][-1] == user("2+2?")


def test_texts_lose_no_character():
    found = parts({"prompt": "The sky is ", "completion": " blue.\n"})
    assert found == {"prompt": [user("The sky is ")], "completion": [assistant(" blue.\n")]}


def test_system_and_suffix_belong_to_the_prompt():
    value = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    assert parts(value, system="s", suffix="!") == {
        "prompt": [system("s"), user("a!")],
        "completion": [assistant("b"), user("c"), assistant("d")],
    }
    assert parts({"prompt": "a", "completion": "b"}, system="s", suffix="!")["prompt"] == [system("s"), user("a!")]


def test_a_plain_text_stays_as_it_is():
    assert parts({"text": " The sky is blue. "}, system="s", suffix="!") == {"text": " The sky is blue. "}


def test_an_earlier_turn_may_be_blank_where_the_last_alone_is_trained():
    value = {"messages": [user("a"), assistant(""), user("b"), assistant("c")]}
    assert rejection(value, "demonstrations") == (
        "empty_completion",
        "messages[1] must hold text or tool calls, found str ''",
    )
    assert parts(value, train_on="last_turn")["completion"] == value["messages"][1:]
    value["messages"][-1] = assistant(" ")
    assert rejection(value, "demonstrations", train_on="last_turn")[1].startswith("messages[3]")


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        ({"messages": None}, "no_assistant_turn", "must hold a message of the assistant, found NoneType None"),
        ({"messages": []}, "no_assistant_turn", "found list []"),
        ({"messages": "hello"}, "bad_message", "messages must be a list of messages, found str 'hello'"),
        ({"messages": [user("a")]}, "no_assistant_turn", "messages must hold the assistant's message"),
        ({"messages": [assistant("a")]}, "wrong_role_order", "messages[0]: the assistant answers somebody"),
        ({"messages": [user("a"), assistant("b"), assistant("c")]}, "wrong_role_order", "messages[2]"),
        ({"messages": [user(" "), assistant("b")]}, "empty_prompt", "the last message of the prompt must hold text"),
        ({"messages": [user("a"), {"role": "narrator", "content": "b"}]}, "unknown_role", "the role of messages[1]"),
        ({}, "missing_field", "the row must have prompt and completion, or messages or text, found no field"),
    ],
)
def test_bad_conversations(value, reason, told):
    found, detail = rejection(value, "demonstrations", like={"messages": [user("a"), assistant("b")]})
    assert found == reason and told in detail


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        ({"prompt": "a"}, "missing_field", "the row must have the field completion, found prompt"),
        ({"prompt": "a", "completion": None}, "empty_completion", "completion must be a text or messages, found null"),
        ({"prompt": "a", "completion": " "}, "empty_completion", "more than white space"),
        ({"prompt": "a", "completion": []}, "empty_completion", "at least one message"),
        ({"prompt": "a", "completion": {}}, "empty_completion", "at least one message"),
        ({"prompt": "a", "completion": [assistant("")]}, "empty_completion", "completion[0] must hold text"),
        ({"prompt": "a", "completion": [user("a")]}, "empty_completion", "a message after the prompt"),
        ({"prompt": "a", "completion": 4}, "completion_not_text", "found int 4"),
        ({"prompt": "a", "completion": "[{'role': 'assistant', 'content': 'b'}]"}, "completion_not_text", "json.dumps"),
        (
            {"prompt": "a", "completion": [user("z"), assistant("b")]},
            "wrong_role_order",
            "completion must begin with the assistant's message or with the whole prompt, found user",
        ),
        ({"prompt": "a", "completion": [tool("b"), assistant("c")]}, "wrong_role_order", "completion[0]: a tool's"),
        ({"prompt": [user("a"), assistant("b")], "completion": "c"}, "last_not_user", "found assistant"),
        ({"completion": "b"}, "missing_field", "the row must have the field prompt"),
    ],
)
def test_bad_completions(value, reason, told):
    found, detail = rejection(value, "demonstrations", like={"prompt": "a", "completion": "b"})
    assert found == reason and told in detail


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "empty_completion"),
        (" \n", "empty_completion"),
        (5, "completion_not_text"),
        ([user("a")], "completion_not_text"),
        ("[{'role': 'user', 'content': 'a'}]", "completion_not_text"),
    ],
)
def test_bad_texts(text, reason):
    assert rejection({"text": text}, "demonstrations", like={"text": "a"})[0] == reason
