"""Conversations that someone gave, rendered and looked at: what is trained, and behind which prompt."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.data.examples import Content
from rft_core.data.faults import Faults, Rejected
from rft_core.data.masks import RenderedExample
from rft_core.data.prompts import RenderedPrompt, Renderer
from rft_core.data.settings import DataSettings


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict:
    return {"role": "assistant", "content": text, **fields}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def conversation(*messages: str | dict, kind: str = "demonstration", num_prompt: int = 1, **fields: Any) -> Content:
    """Texts are the user's and the assistant's in turn; the first `num_prompt` messages are the prompt."""
    made = [
        (assistant if index % 2 else user)(message) if isinstance(message, str) else message
        for index, message in enumerate(messages)
    ]
    return Content("row", kind, {"prompt": made[:num_prompt], "completion": made[num_prompt:]}, **fields)


def rendered(
    tokenizer, content: Content, stop_ids: frozenset[int] | None = None, **changes
) -> tuple[list[RenderedExample], list[str]]:
    """The examples, checked, and the reasons of the faults that the row survived."""
    chosen = DataSettings(**{"source": "sums.jsonl", **changes})
    faults = Faults(chosen.policies)
    examples = Renderer(tokenizer, chosen, stop_ids).render_example(content, faults)
    for example in examples:
        check_form(example)
    return examples, list(dict.fromkeys(fault.reason for fault in faults.found))


def check_form(example: RenderedExample) -> None:
    """Lengths agree (trl #5144), the turns cover the completion, the mask is true on the assistant's."""
    assert len(example.completion_mask) == len(example.completion_token_ids)
    assert example.prompt_token_ids and any(example.completion_mask)
    ends = [0, *(turn.end for turn in example.turns)]
    assert [turn.start for turn in example.turns] == ends[:-1] and ends[-1] == len(example.completion_mask)
    for turn in example.turns:
        assert set(example.completion_mask[turn.start : turn.end]) == {turn.role == "assistant"}


def trained_texts(tokenizer, examples: list[RenderedExample]) -> list[str]:
    """Each trained turn decoded behind the tokens before it: some tokenizers drop a space at a text's beginning."""
    texts = []
    for example in examples:
        ids = example.prompt_token_ids + example.completion_token_ids
        for turn in example.turns:
            if turn.role == "assistant":
                start, end = (len(example.prompt_token_ids) + place for place in (turn.start, turn.end))
                texts.append(tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[:start])) :])
    return texts


def reason_of(tokenizer, content: Content, stop_ids: frozenset[int] | None = None, **changes) -> str:
    with pytest.raises(Rejected) as caught:
        rendered(tokenizer, content, stop_ids, **changes)
    return caught.value.reason


def check_prompts(tokenizer, content: Content, examples: list[RenderedExample]) -> None:
    """Every trained turn stands behind the very ids that the data stage gives as the prompt of its history."""
    messages = [*content.parts["prompt"], *content.parts["completion"]]
    histories = [messages[:index] for index, message in enumerate(messages) if message["role"] == "assistant"]
    contents = [Content("row", "prompt", {"prompt": history}, tools=content.tools) for history in histories]
    renderer = Renderer(tokenizer, DataSettings(source="x", max_prompt_tokens=10**6))
    prompts = renderer.render_prompts(contents, [Faults({}) for _ in contents])
    expected = [prompt.token_ids for prompt in prompts if isinstance(prompt, RenderedPrompt)]
    found = [
        example.prompt_token_ids + example.completion_token_ids[: turn.start]
        for example in examples
        for turn in example.turns
        if turn.role == "assistant"
    ]
    assert found == expected[len(expected) - len(found) :]
