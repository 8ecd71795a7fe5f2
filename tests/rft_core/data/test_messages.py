"""Messages of every shape -> one shape; what is wrong with one is named with its place."""

from __future__ import annotations

import json

import pytest

from rft_core.data.faults import Rejected
from rft_core.data.messages import (
    ROLES,
    check_order,
    dialogue_of_text,
    is_blank,
    messages_of_text,
    read_messages,
    refuse_broken_messages,
    shown,
)

CALL = {"type": "function", "function": {"name": "find", "arguments": {"names": ["ann lee", "bo ray"], "exact": True}}}


def read(*raw: object) -> list[dict]:
    return read_messages(list(raw), "messages")


def fault(*raw: object) -> tuple[str, str]:
    with pytest.raises(Rejected) as caught:
        read(*raw)
    return caught.value.reason, str(caught.value)


def said(*roles: str) -> list[dict]:
    """Messages of these roles; `call` is the assistant's with a call, `spelled` one that spells its call as text."""
    kinds = {
        "call": {"role": "assistant", "content": "", "tool_calls": [CALL]},
        "spelled": {"role": "assistant", "content": '<tool_call>{"name": "find"}</tool_call>'},
    }
    return [kinds.get(role, {"role": role, "content": "x"}) for role in roles]


def test_plain_messages_stay_and_are_copies():
    raw = {"role": "user", "content": " 2+2? "}
    [message] = read(raw)
    assert message == raw and message is not raw


def test_sharegpt_names_and_roles_are_mapped():
    assert read(
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u", "weight": None},
        {"from": "gpt", "value": "a", "weight": 1},
        {"role": None, "content": None, "from": "User", "value": "v"},
    ) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "weight": 1},
        {"role": "user", "content": "v"},
    ]


def test_every_role_ends_as_one_of_five():
    assert set(ROLES.values()) == {"system", "developer", "user", "assistant", "tool"}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image_url": None}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "2+2?"}]


def test_null_members_are_left_out_and_others_stay():
    raw = {"role": "assistant", "content": "4", "name": None, "tool_calls": None, "thinking": "2 and 2"}
    assert read(raw) == [{"role": "assistant", "content": "4", "thinking": "2 and 2"}]


@pytest.mark.parametrize("content", [None, ""])
def test_calls_keep_their_values_and_get_a_text_as_content(content):
    # ds-05-numpy-after-parquet: the list in the arguments stays a list, `type` is not made up.
    calls = [{"function": CALL["function"]}]
    assert read({"role": "assistant", "content": content, "tool_calls": calls}) == [
        {"role": "assistant", "content": "", "tool_calls": calls}
    ]


def test_a_call_without_content_member():
    [message] = read({"role": "assistant", "tool_calls": [CALL]})
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": [2]}', {"b": 1, "a": [2]}),
        ("", {}),
        ({"x": {"y": None, "z": 0}, "w": None}, {"x": {"z": 0}}),
    ],
)
def test_arguments_become_objects_without_the_nulls_of_columnar_files(arguments, expected):
    call = {"id": "c1", "function": {"name": "find", "arguments": arguments}, "index": None}
    [message] = read({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"] == [{"id": "c1", "function": {"name": "find", "arguments": expected}}]


def test_calls_of_other_shapes():
    flat = {"name": "find", "arguments": '{"a": 1}'}
    expected = {"name": "find", "arguments": {"a": 1}}
    as_text = json.dumps({"name": "find", "arguments": {"a": 1}})
    for raw in (
        {"role": "assistant", "content": None, "tool_calls": [flat]},
        {"role": "assistant", "content": None, "function_call": flat},
        {"from": "function_call", "value": as_text},
        {"from": "function_call", "value": f"[{as_text}]"},
    ):
        assert read(raw) == [{"role": "assistant", "content": "", "tool_calls": [expected]}]
    assert read({"role": "assistant", "content": "a", "tool_calls": []}) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("raw", "reason", "told"),
    [
        ("hello", "bad_message", "messages[0] must be an object with role and content, found str 'hello'"),
        ({"text": "x"}, "bad_message", "found dict {'text': 'x'}"),
        ([], "bad_message", "found list []"),
        ({"role": "robot", "content": "x"}, "unknown_role", "found str 'robot'"),
        ({"role": ["user"], "content": "x"}, "unknown_role", "found list ['user']"),
        ({"content": "x"}, "unknown_role", "must be one of system, developer, user, assistant, tool; found NoneType"),
        ({"role": "user"}, "content_not_text", "the content of messages[0] must be a text, found NoneType None"),
        ({"role": "user", "content": 5}, "content_not_text", "found int 5"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "content_not_text", "found dict"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "url": "y"}]},
            "content_not_text",
            "messages[0].content[1] must be {type: text, text: ...}, the one kind read; found a part of type 'image'",
        ),
        ({"role": "user", "content": ["x"]}, "content_not_text", "found str 'x'"),
        ({"role": "assistant", "content": None}, "content_not_text", "found NoneType None"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "bad_tools", "in a message of role user"),
        ({"role": "assistant", "content": "x", "tool_calls": CALL}, "bad_tools", "found dict"),
        ({"role": "assistant", "content": "x", "tool_calls": ["find"]}, "bad_tools", "tool_calls[0] must be an object"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}, "bad_tools", "with a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a: 1}"}]},
            "bad_tools",
            "the arguments of messages[0].tool_calls[0] must be an object or its JSON text, found str '{a: 1}'",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, "bad_tools", "found list [1]"),
        ({"from": "function_call", "value": "find(1)"}, "bad_tools", "its content must be JSON, found str 'find(1)'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(raw, reason, told):
    found, detail = fault(raw)
    assert found == reason and told in detail


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "assistant", "user", "assistant"],
        ["system", "user"],
        ["system", "developer", "user"],
        ["system", "assistant", "user"],
        ["user", "user", "assistant"],
        ["user", "call", "tool", "tool", "assistant"],
        ["user", "call", "tool", "call", "tool"],
        ["user", "spelled", "tool"],
        ["user", "call", "user"],
        ["user"],
        [],
    ],
)
def test_orders_that_chats_have(roles):
    check_order(said(*roles), "messages")


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        (["user", "system"], "messages[1]: a system message comes first, and once; found user, system"),
        (["system", "system"], "messages[1]: a system message comes first"),
        (["system", "user", "developer"], "messages[2]: a developer message comes first"),
        (["assistant"], "messages[0]: the assistant answers somebody"),
        (["user", "assistant", "assistant"], "messages[2]: the assistant answers somebody"),
        (["tool"], "messages[0]: a tool's message must follow a tool call"),
        (["user", "tool"], "messages[1]: a tool's message must follow a tool call"),
        (["user", "assistant", "tool"], "messages[2]: a tool's message must follow a tool call"),
        (["user", "call", "user", "tool"], "messages[3]: a tool's message must follow a tool call"),
    ],
)
def test_orders_that_no_chat_has(roles, told):
    with pytest.raises(Rejected) as caught:
        check_order(said(*roles), "messages")
    assert caught.value.reason == "wrong_role_order" and told in str(caught.value)


def test_the_order_goes_on_from_what_was_said_before():
    check_order(said("tool", "assistant"), "completion", said("user", "call"))
    with pytest.raises(Rejected, match=r"completion\[0\]: the assistant .*found user, assistant, assistant"):
        check_order(said("assistant"), "completion", said("user", "assistant"))


@pytest.mark.parametrize(
    "content",
    [
        "[get(a=1), put(b=2)]",
        "<function=find>",
        "[TOOL_CALLS] [...]",
        '<|python_tag|>{"name": "f"}',
        '{"arguments": 1}',
    ],
)
def test_ways_to_spell_a_call(content):
    check_order([*said("user"), {"role": "assistant", "content": content}, *said("tool")], "messages")


def test_blank_messages():
    assert is_blank({"role": "assistant", "content": " \n"})
    assert not is_blank({"role": "assistant", "content": "", "tool_calls": [CALL]})
    assert not is_blank({"role": "assistant", "content": "", "reasoning_content": "hm"})


def test_messages_in_a_cell():
    messages = [{"from": "human", "value": "a"}]
    assert messages_of_text(json.dumps(messages)) == messages
    assert messages_of_text(json.dumps(messages, indent=2)) == messages
    for text in ("[]", "[{}]", '[{"role": "user"}, 5]', '{"role": "user"}', "[{'role': 'user', 'content': 'a'}]"):
        assert messages_of_text(text) is None


def test_a_cell_that_python_wrote_is_no_text():
    for text in ("[{'role': 'user', 'content': 'a'}]", '[{"role": "user", "content": a}] '):
        with pytest.raises(Rejected, match=r"write the cell with json\.dumps, not str"):
            refuse_broken_messages(text, "prompt", "prompt_not_text")
    for text in ("[{'role': 'user'}, what is this?", "[1]", "", "What?"):
        refuse_broken_messages(text, "prompt", "prompt_not_text")


def test_a_dialogue_with_marks():
    text = "\n\nHuman: 2+2?\n\nAssistant: 4\nSure.\n\nHuman: 3+3?\n\nAssistant:"
    assert dialogue_of_text(text) == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4\nSure."},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": ""},
    ]
    for other in ("Human: a", "x\n\nHuman: a", "\n\nAssistant: a", "plain", ""):
        assert dialogue_of_text(other) is None


def test_values_are_shown_short_whatever_they_are():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown("a" * 200) == "str '" + "a" * 56 + "..."
    assert shown(10**5000) == "int too large to show" and shown(deep) == "list too large to show"
    assert shown([1, None]) == "list [1, None]"
