"""Preference pairs: a prompt, given or found, and two sides that follow it.

The sides of a row are told apart by their content, each row by itself. A side is the assistant's part alone (a text, or
messages that begin with the assistant), or a whole conversation (messages that begin otherwise). Where both are whole,
the prompt is their longest common beginning in messages, shortened until the assistant speaks next; a prompt that is
given as well must be found in it. Texts without a prompt are split after their longest common beginning in whole words:
a word is a run of characters that are not white space together with the white space before it, so no character is lost
and each side keeps the white space that it begins with.
"""

from __future__ import annotations

from rft_core.data.examples.reading import Reading
from rft_core.data.examples.turns import (
    after_prompt,
    checked_completion,
    checked_prompt,
    is_whole,
    raw_prompt,
    raw_side,
    without_system,
)
from rft_core.data.faults import Rejected
from rft_core.data.messages import Message, check_order, dialogue_of_text, shown

Side = str | list[Message]
CHOSEN, REJECTED = "chosen", "rejected"


def read_pair(reading: Reading) -> dict[str, list[Message]]:
    """{prompt, chosen, rejected} of a row. Raises Rejected."""
    chosen, rejected = raw_side(reading, CHOSEN), raw_side(reading, REJECTED)
    if reading.mapped.get("prompt") is None:
        prompt, chosen, rejected = _split(reading, chosen, rejected)
    else:
        prompt = raw_prompt(reading)
        if whole := _whole(chosen, rejected):
            prompt, chosen, rejected = _split_at(prompt, *whole)
        chosen = after_prompt(chosen, prompt, CHOSEN, "no_common_prompt")
        rejected = after_prompt(rejected, prompt, REJECTED, "no_common_prompt")
    dressed = checked_prompt(reading, prompt)
    for name, side in ((CHOSEN, chosen), (REJECTED, rejected)):
        checked_completion(side, prompt, name, "last")
    if _stripped(chosen) == _stripped(rejected):
        reading.faults.meet(
            "identical_sides", f"chosen and rejected must differ, found both {shown(chosen[-1]['content'].strip())}"
        )
    return {"prompt": dressed, CHOSEN: chosen, REJECTED: rejected}


def _whole(chosen: Side, rejected: Side) -> tuple[list[Message], list[Message]] | None:
    """Both sides where both are whole conversations, else null."""
    if isinstance(chosen, str) or isinstance(rejected, str) or not (is_whole(chosen) and is_whole(rejected)):
        return None
    return chosen, rejected


def _split(reading: Reading, chosen: Side, rejected: Side) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and sides of a row that gives no prompt."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        if "prompt" in reading.mapped:
            raise Rejected(
                "empty_prompt", "prompt must be a text or a list of messages, found null or none in this row"
            )
        if reading.settings.render == "chat":
            turns = dialogue_of_text(chosen), dialogue_of_text(rejected)
            if turns[0] and turns[1]:
                return _split_messages(turns[0], turns[1])
        return _split_words(chosen, rejected)
    whole = _whole(chosen, rejected)
    if whole is None:
        raise Rejected(
            "no_common_prompt",
            "without a prompt, chosen and rejected must both be texts, or conversations that begin with the user",
        )
    return _split_messages(*whole)


def _split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    end = 0
    while end < min(len(chosen), len(rejected)) and chosen[end] == rejected[end]:
        end += 1
    while end and not all(end < len(side) and side[end]["role"] == "assistant" for side in (chosen, rejected)):
        end -= 1
    if not end:
        raise Rejected(
            "no_common_prompt",
            "chosen and rejected must begin with the same messages, up to where the assistant speaks; found "
            f"{shown(chosen[0]['content'])} and {shown(rejected[0]['content'])}",
        )
    check_order(chosen[:end], CHOSEN)
    return chosen[:end], chosen[end:], rejected[end:]


def _split_at(
    prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Of two whole conversations and a prompt that they must hold: all of its messages in a row, its system aside.

    Some sets repeat one of the conversations as the prompt.
    """
    common, chosen_rest, rejected_rest = _split_messages(chosen, rejected)
    wanted = _stripped(without_system(prompt))
    there = _stripped(without_system(common))
    is_found = any(there[start : start + len(wanted)] == wanted for start in range(len(there)))
    if not is_found and wanted not in (_stripped(without_system(side)) for side in (chosen, rejected)):
        raise Rejected(
            "no_common_prompt",
            f"the prompt must be in the conversations chosen and rejected, found {shown(prompt[-1]['content'])} and "
            f"{shown(common[-1]['content'])}; data.fields {{prompt: ''}} leaves the prompt out",
        )
    if len(without_system(common)) == len(common):
        common = [message for message in prompt if message["role"] in ("system", "developer")] + common
    return common, chosen_rest, rejected_rest


def _split_words(chosen: str, rejected: str) -> tuple[list[Message], list[Message], list[Message]]:
    """
    >>> _split_words("The sky is blue.", "The sky is black.")[0]
    [{'role': 'user', 'content': 'The sky is'}]
    """
    end = _common_length(chosen, rejected)
    if not all(side[end : end + 1].strip() == "" for side in (chosen, rejected)):
        while end and not chosen[end - 1].isspace():
            end -= 1
    prompt = chosen[:end].rstrip()
    if not prompt:
        raise Rejected(
            "no_common_prompt",
            f"chosen and rejected must begin with the same words, found {shown(chosen)} and {shown(rejected)}; "
            "give the prompt in a field of its own",
        )
    sides = chosen[len(prompt) :], rejected[len(prompt) :]
    for name, side in zip((CHOSEN, REJECTED), sides, strict=True):
        if not side.strip():
            raise Rejected(
                "empty_completion", f"{name} must go on after the common prompt, found {shown(prompt)} alone"
            )
    return (
        [{"role": "user", "content": prompt}],
        [{"role": "assistant", "content": sides[0]}],
        [{"role": "assistant", "content": sides[1]}],
    )


def _common_length(one: str, other: str) -> int:
    """Characters that both begin with, found by halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _stripped(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message["content"].strip()} for message in messages]
