"""Messages in the shapes that chat logs come in -> checked messages {role, content, ...}, and their order.

Read as the same: OpenAI's (role, content) and ShareGPT's (from, value) names; the roles of `ROLES`; content as a text
or as a list of text parts, which are joined; tool calls as `tool_calls`, as OpenAI's older `function_call`, or as a
message of the role function_call whose content is the call's JSON. Every message that comes out has a known role and a
text as content ("" beside tool calls); the arguments of calls are objects, as chat templates want them. Null members,
which columnar files fill in, are left out; other members stay.

Whatever is wrong raises Rejected with a reason code, the place, and how to mend it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rft_core.data.faults import Rejected

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PLAIN_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAMES = ("role", "from", "content", "value")
_CALL_ROLES = ("function_call", "tool_call")
# Ways to spell a call in an assistant's text: Hermes, Qwen, Mistral, Llama; and ToolACE's [name(argument=1)].
_SPELLED_CALL = re.compile(
    r"<tool_call|<function|\[TOOL_CALLS\]|<\|python_tag\|>|\"arguments\"\s*:|^\s*\[.*\)\s*\]\s*$", re.DOTALL
)
_BEGINS_AS_MESSAGES = re.compile(r"\s*\[\s*\{\s*[\"'](?:role|from|content|value)[\"']\s*:")
_TURN_MARK = re.compile(r"\n\n(Human|Assistant):")


def shown(value: Any) -> str:
    """Kind and beginning of a value, for messages to people."""
    try:
        text = repr(value[:60]) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        text = "too large to show"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def read_messages(value: list[Any], name: str) -> list[Message]:
    """The messages of a list, each checked by itself; `name` is the field's, for what is told to people."""
    return [dict(raw) if _is_plain(raw) else _message(raw, f"{name}[{index}]") for index, raw in enumerate(value)]


def _is_plain(raw: Any) -> bool:
    """Whether it is {role, content} and no more, as we want it: most messages are, and there are millions."""
    return (
        isinstance(raw, dict)
        and len(raw) == 2
        and isinstance(raw.get("content"), str)
        and raw.get("role") in PLAIN_ROLES
    )


def check_order(messages: list[Message], name: str, before: list[Message] | None = None) -> None:
    """Raises Rejected(wrong_role_order) unless `messages` may follow `before`:

    - system and developer come first, at most one of each;
    - the assistant speaks after somebody else, and not first of all;
    - a tool answers a call of the assistant, or follows another tool's answer. A call is a member tool_calls, or
      spelled in the text as models do;
    - the user may always speak, also twice in a row, as in chats of several people.
    """
    sofar = list(before or ())
    for index, message in enumerate(messages):
        last = sofar[-1] if sofar else None
        if problem := _misplaced(message, last, sofar):
            found = ", ".join(item["role"] for item in (*sofar[-2:], message))
            raise Rejected("wrong_role_order", f"{name}[{index}]: {problem}; found {found}")
        sofar.append(message)


def _misplaced(message: Message, last: Message | None, sofar: list[Message]) -> str | None:
    role, before = message["role"], last["role"] if last else None
    if role in ("system", "developer"):
        heads = [item["role"] for item in sofar]
        is_in_place = role not in heads and all(head in ("system", "developer") for head in heads)
        return None if is_in_place else f"a {role} message comes first, and once"
    if role == "assistant" and before in (None, "assistant"):
        return "the assistant answers somebody: two turns in a row must be one message, and a chat begins with the user"
    if role == "tool" and before != "tool" and not (last and _has_call(last)):
        return "a tool's message must follow a tool call of the assistant"
    return None


def _has_call(message: Message) -> bool:
    is_spelled = "tool_calls" not in message and _SPELLED_CALL.search(message["content"]) is not None
    return message["role"] == "assistant" and ("tool_calls" in message or is_spelled)


def is_blank(message: Message) -> bool:
    """Whether an assistant's message says, thinks and does nothing."""
    thoughts = any(message.get(name) for name in REASONING_FIELDS)
    return not (message["content"].strip() or message.get("tool_calls") or thoughts)


def messages_of_text(text: str) -> list[Any] | None:
    """The list that a text spells in JSON where it is one of messages, as in a cell of a CSV file; else null.

    >>> messages_of_text('[{"role": "user", "content": "2+2?"}]')
    [{'role': 'user', 'content': '2+2?'}]
    >>> messages_of_text('[{"a": 1}] is a list of what?') is None
    True
    """
    if not _BEGINS_AS_MESSAGES.match(text):
        return None
    found = list_of_text(text)
    if found is None or not all(isinstance(item, dict) and not item.keys().isdisjoint(_NAMES) for item in found):
        return None
    return found


def list_of_text(text: str) -> list[Any] | None:
    """The list that a text spells in JSON; null where it spells something else or nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def refuse_broken_messages(text: str, name: str, reason: str) -> None:
    """Raises Rejected(reason) for a text that begins as messages do and ends as a list, but is not JSON."""
    if text[:1] in "[ \n\t" and _BEGINS_AS_MESSAGES.match(text) and text.rstrip().endswith("]"):
        raise Rejected(
            reason,
            f"{name} must be a text or messages; found a text that looks like a list of messages but is not JSON "
            f"(write the cell with json.dumps, not str): {shown(text)}",
        )


def dialogue_of_text(text: str) -> list[Message] | None:
    """The turns of a text in the marks of Anthropic's hh-rlhf; null for any other text.

    >>> [turn["role"] for turn in dialogue_of_text("\\n\\nHuman: Hi\\n\\nAssistant: Hello.")]
    ['user', 'assistant']
    """
    head, *turns = _TURN_MARK.split(text)
    if head.strip() or turns[:1] != ["Human"]:
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[mark], "content": said.strip()} for mark, said in zip(turns[::2], turns[1::2], strict=True)]


def _message(raw: Any, place: str) -> Message:
    if not isinstance(raw, dict) or raw.keys().isdisjoint(_NAMES):
        raise Rejected("bad_message", f"{place} must be an object with role and content, found {shown(raw)}")
    role_name = "role" if raw.get("role") is not None else "from"
    content_name = "content" if raw.get("content") is not None else "value"
    role = raw.get(role_name)
    known = ROLES.get(role) or ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise Rejected(
            "unknown_role", f"the role of {place} must be one of {', '.join(PLAIN_ROLES)}; found {shown(role)}"
        )
    rest = {
        name: value
        for name, value in raw.items()
        if value is not None and name not in ("role", "content", role_name, content_name)
    }
    content = raw.get(content_name)
    if isinstance(role, str) and role.strip().lower() in _CALL_ROLES and "tool_calls" not in rest:
        rest["tool_calls"], content = _spelled_calls(content, place), ""
    elif known == "assistant" and "function_call" in rest and "tool_calls" not in rest:
        rest["tool_calls"] = [rest.pop("function_call")]
    calls = _calls(rest.pop("tool_calls", None), known, place)
    if calls:
        rest["tool_calls"] = calls
    return {"role": known, "content": _text(content, place, has_calls=bool(calls)), **rest}


def _text(content: Any, place: str, has_calls: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and has_calls:
        return ""  # templates join contents as texts; none takes a null
    if isinstance(content, list):
        return "".join(_part_text(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    raise Rejected("content_not_text", f"the content of {place} must be a text, found {shown(content)}")


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = f"a part of type {part['type']!r}" if isinstance(part, dict) and "type" in part else shown(part)
    raise Rejected("content_not_text", f"{place} must be {{type: text, text: ...}}, the one kind read; found {kind}")


def _spelled_calls(content: Any, place: str) -> Any:
    """The calls of a message of ShareGPT's role function_call: its content is the JSON of one call, or of several."""
    try:
        found = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        raise Rejected("bad_tools", f"{place} is a call: its content must be JSON, found {shown(content)}") from None
    return found if isinstance(found, list) else [found]


def _calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list) or role != "assistant":
        found = shown(calls) if role == "assistant" else f"them in a message of role {role}"
        raise Rejected("bad_tools", f"{place}.tool_calls must be a list of the assistant's calls, found {found}")
    return [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call, {function: {name, arguments}} or {name, arguments}, with its arguments as an object."""
    call = without_nulls(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected(
            "bad_tools", f"{place} must be an object {{function: {{name, arguments}}}} with a name, found {shown(call)}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        found = shown(function.get("arguments"))
        raise Rejected("bad_tools", f"the arguments of {place} must be an object or its JSON text, found {found}")
    if "function" in call:
        return {**call, "function": {**function, "arguments": arguments}}
    return {**call, "arguments": arguments}


def without_nulls(value: Any) -> Any:
    """The value without null members of objects, at any depth: a columnar file gives every object all the members that
    some object has."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# Roles as files spell them -> ours. ShareGPT, LLaMA-Factory, Vicuna, Gemini, and OpenAI's older `function`.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
