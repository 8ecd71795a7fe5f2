"""Prompts, completions and whole conversations of a row, as checked lists of messages."""

from __future__ import annotations

from typing import Any, Literal

from rft_core.data.examples.reading import Reading
from rft_core.data.faults import Rejected
from rft_core.data.messages import Message, check_order, is_blank, read_messages, refuse_broken_messages, shown

# Which of the assistant's turns must say something.
Spoken = Literal["all", "last", "any"]


def raw_prompt(reading: Reading) -> list[Message]:
    """The row's prompt as it is, a text as the user's message. Raises Rejected: missing_field, empty_prompt,
    prompt_not_text, and what messages may be wrong in."""
    value = reading.needed("prompt")
    if value is None:
        raise Rejected("empty_prompt", "prompt must be a text or a list of messages, found null")
    if isinstance(value, str):
        if not value.strip():
            raise Rejected("empty_prompt", f"prompt must hold more than white space, found {shown(value)}")
        refuse_broken_messages(value, "prompt", "prompt_not_text")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise Rejected("prompt_not_text", f"prompt must be a text or a list of messages, found {shown(value)}")
    if not value:
        raise Rejected("empty_prompt", "prompt must hold at least one message, found an empty list")
    messages = read_messages(value, "prompt")
    check_order(messages, "prompt")
    return messages


def checked_prompt(reading: Reading, messages: list[Message], name: str = "prompt") -> list[Message]:
    """A prompt that the assistant can answer, with the system message and the suffix that belong to it.

    A system message goes before messages that have none, the suffix to the last message of the user. Raises Rejected:
    last_not_user, empty_prompt.
    """
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        advice = "; a row with the assistant's answer is a demonstration" if last["role"] == "assistant" else ""
        raise Rejected(
            "last_not_user", f"{name} must end with a message of the user or a tool, found {last['role']}{advice}"
        )
    return _dressed(reading, messages, name)


def _dressed(reading: Reading, messages: list[Message], name: str) -> list[Message]:
    last = messages[-1]
    if last["role"] == "user" and not last["content"].strip():
        raise Rejected("empty_prompt", f"the last message of {name} must hold text, found {shown(last['content'])}")
    messages = list(messages)
    if suffix := reading.settings.suffix:
        asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if asked:
            message = messages[asked[-1]]
            messages[asked[-1]] = {**message, "content": message["content"] + suffix}
    if messages[0]["role"] not in ("system", "developer") and (system := reading.system()) is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def raw_side(reading: Reading, name: str) -> str | list[Message]:
    """A completion as it is: a text, or messages. Raises Rejected: missing_field, empty_completion,
    completion_not_text, and what messages may be wrong in."""
    value = reading.needed(name)
    if value is None:
        raise Rejected("empty_completion", f"{name} must be a text or messages, found null")
    if isinstance(value, str):
        if not value.strip():
            raise Rejected("empty_completion", f"{name} must hold more than white space, found {shown(value)}")
        refuse_broken_messages(value, name, "completion_not_text")
        return value
    if not isinstance(value, list | dict):
        raise Rejected("completion_not_text", f"{name} must be a text or messages, found {shown(value)}")
    if not value:
        raise Rejected("empty_completion", f"{name} must hold at least one message, found none")
    return read_messages(value if isinstance(value, list) else [value], name)


def is_whole(messages: list[Message]) -> bool:
    """Whether they are a conversation from its beginning, not the assistant's part alone."""
    return messages[0]["role"] not in ("assistant", "tool")


def after_prompt(side: str | list[Message], prompt: list[Message], name: str, reason: str) -> list[Message]:
    """The assistant's part of a side: all of it, or what follows the prompt where the side is a whole conversation.

    Raises Rejected(reason) when a whole conversation begins otherwise than the prompt.
    """
    if isinstance(side, str):
        return [{"role": "assistant", "content": side}]
    if not is_whole(side):
        return side
    for head in (prompt, without_system(prompt)):
        if head and side[: len(head)] == head:
            return side[len(head) :]
    raise Rejected(
        reason, f"{name} must begin with the assistant's message or with the whole prompt, found {side[0]['role']}"
    )


def without_system(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


def checked_completion(
    completion: list[Message], prompt: list[Message], name: str, spoken: Spoken = "all"
) -> list[Message]:
    """A completion in a right order after its prompt, with turns of the assistant that say something.

    Raises Rejected: empty_completion, wrong_role_order, no_assistant_turn.
    """
    if not completion:
        raise Rejected("empty_completion", f"{name} must hold a message after the prompt, found none")
    check_order(completion, name, prompt)
    _check_spoken(completion, name, 0, spoken)
    return completion


def _check_spoken(messages: list[Message], name: str, start: int, spoken: Spoken) -> None:
    turns = [index for index in range(start, len(messages)) if messages[index]["role"] == "assistant"]
    if not turns:
        found = ", ".join(message["role"] for message in messages)
        raise Rejected("no_assistant_turn", f"{name} must hold the assistant's message to learn from, found {found}")
    blank = [index for index in turns if is_blank(messages[index])]
    wrong = {
        "all": blank,
        "last": [index for index in blank if index == turns[-1]],
        "any": blank if len(blank) == len(turns) else [],
    }
    if wrong[spoken]:
        index = wrong[spoken][0]
        found = shown(messages[index]["content"])
        raise Rejected("empty_completion", f"{name}[{index}] must hold text or tool calls, found {found}")


def prompt_and_completion(reading: Reading, spoken: Spoken = "all") -> dict[str, Any]:
    """{prompt, completion} of a row that gives both. Raises Rejected."""
    prompt = raw_prompt(reading)
    dressed = checked_prompt(reading, prompt)
    completion = after_prompt(raw_side(reading, "completion"), prompt, "completion", "wrong_role_order")
    return {"prompt": dressed, "completion": checked_completion(completion, prompt, "completion", spoken)}


def conversation(reading: Reading, spoken: Spoken = "all", *, is_last_turn_alone: bool = False) -> dict[str, Any]:
    """{prompt, completion} of a row that gives one list of messages.

    The completion begins with the assistant's first message; with `is_last_turn_alone`, after the user's last one. A
    prompt may be a system message alone, as where the assistant opens a game. Raises Rejected.
    """
    value = reading.needed("messages")
    if value is None or value == []:
        raise Rejected("no_assistant_turn", f"messages must hold a message of the assistant, found {shown(value)}")
    if not isinstance(value, list):
        raise Rejected("bad_message", f"messages must be a list of messages, found {shown(value)}")
    messages = read_messages(value, "messages")
    check_order(messages, "messages")
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else 0
    if is_last_turn_alone and "user" in roles:
        start = max(start, len(roles) - roles[::-1].index("user"))
    _check_spoken(messages, "messages", start, spoken)
    return {"prompt": _dressed(reading, messages[:start], "the prompt"), "completion": messages[start:]}
