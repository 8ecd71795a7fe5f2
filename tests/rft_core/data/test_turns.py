"""What is trained of a given conversation: exactly the assistant's texts with their end tokens, each behind the prompt
that the model would see. Expected texts are written by hand, or come from the library's own generation markers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft_core.data.examples import Content
from rft_core.data.faults import Faults
from rft_core.data.masks import Turn
from rft_core.data.prompts import Renderer, load_tokenizer
from rft_core.data.settings import DataSettings
from tests.rft_core.data.chat_templates import SMOLLM2, STYLES, byte_tokenizer, piece_tokenizer
from tests.rft_core.data.given_conversations import (
    assistant,
    check_prompts,
    conversation,
    reason_of,
    rendered,
    tool,
    trained_texts,
    user,
)

CASES = Path(__file__).parents[2] / "cases" / "pipeline_cases.jsonl"
# What surrounds the assistant's text in what is trained, by style. Others end a turn with <|im_end|>.
AROUND = {"no_system": ("", "<|end|>"), "inst": (" ", " </s>"), "inst_first_space": (" ", " </s>")}
WHOLE = sorted(set(STYLES) - {"no_end", "begins_reasoning"})


@pytest.mark.parametrize("style", WHOLE)
def test_all_turns_or_the_last_are_trained_each_with_its_end_token(style):
    tokenizer = STYLES[style]()
    before, after = AROUND.get(style, ("", "<|im_end|>"))
    content = conversation("1+1?", "2 é🎈", "Why?", "yes.\n\nIt is.", "Then?", "Ok")
    expected = [before + text + after for text in ("2 é🎈", "yes.\n\nIt is.", "Ok")]
    examples, faults = rendered(tokenizer, content)
    assert trained_texts(tokenizer, examples) == expected and faults == []
    check_prompts(tokenizer, content, examples)
    [example] = examples
    assert [turn.role for turn in example.turns] == ["assistant", "user", "assistant", "user", "assistant"]
    masked = [
        i for i, is_trained in zip(example.completion_token_ids, example.completion_mask, strict=True) if is_trained
    ]
    if style not in AROUND or style == "no_system":
        assert tokenizer.decode(masked) == "".join(expected)
    [last], _ = rendered(tokenizer, content, train_on="last_turn")
    assert trained_texts(tokenizer, [last]) == expected[-1:] and last.turns == (
        Turn("assistant", 0, len(last.completion_mask)),
    )
    check_prompts(tokenizer, content, [last])
    assert example.prompt_token_ids + example.completion_token_ids == last.prompt_token_ids + last.completion_token_ids


def test_the_mask_is_that_of_the_librarys_own_markers():
    """trl #4879: without markers the library's mask is all zero; ours needs none and is the same."""
    tokenizer = STYLES["marked"]()
    content = conversation("a", "b c", "d", "ans\n", "e", " f")
    [example], _ = rendered(tokenizer, content)
    marked = tokenizer.apply_chat_template(
        [*content.parts["prompt"], *content.parts["completion"]], return_assistant_tokens_mask=True, return_dict=True
    )
    ids = example.prompt_token_ids + example.completion_token_ids
    size = len(ids)
    assert marked["input_ids"][:size] == ids
    assert marked["assistant_masks"][:size] == [0] * len(example.prompt_token_ids) + [
        int(flag) for flag in example.completion_mask
    ]
    assert not any(marked["assistant_masks"][size:])  # nothing but the newline behind the last end token


def test_tr_01_multi_turn_mask():
    case = next(case for case in map(json.loads, CASES.read_text().splitlines()) if case["id"].startswith("tr-01"))
    messages = [{"role": role, "content": text} for role, text in case["input"]["segments"]]
    content = conversation(*messages, num_prompt=2, kind="trajectory", turn_rewards=[0.0, 0.5, 1.0])
    tokenizer = STYLES["smollm2"]()
    [example], _ = rendered(tokenizer, content)
    assert trained_texts(tokenizer, [example]) == ["4<|im_end|>", "<call>mul(4,3)</call><|im_end|>", "12<|im_end|>"]
    assert [(turn.role, turn.reward) for turn in example.turns] == [
        ("assistant", 0.0),
        ("user", None),
        ("assistant", 0.5),
        ("tool", None),
        ("assistant", 1.0),
    ]
    [last], _ = rendered(tokenizer, content, train_on="last_turn")
    assert trained_texts(tokenizer, [last]) == ["12<|im_end|>"] and last.turns[0].reward == 1.0


def test_reasoning_that_leaves_the_history_makes_segments():
    tokenizer = STYLES["strips_reasoning"]()
    turns = ["<think>\none\n</think>\n\n2", "<think>\ntwo\n</think>\n\n4"]
    content = conversation("1+1?", turns[0], "2+2?", turns[1])
    first, second = rendered(tokenizer, content)[0]
    assert trained_texts(tokenizer, [first, second]) == [turn + "<|im_end|>" for turn in turns]
    assert (first.segment, second.segment) == (0, 1)
    assert second.prompt_text == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    check_prompts(tokenizer, content, [first, second])
    [last], _ = rendered(tokenizer, content, train_on="last_turn")
    assert (last.prompt_token_ids, last.completion_token_ids) == (second.prompt_token_ids, second.completion_token_ids)
    assert last.segment == 0


def test_reasoning_stays_while_the_policy_calls_tools():
    """As Qwen3: what it thought since the last question is still in its history."""
    tokenizer = STYLES["strips_reasoning"]()
    turns = ["<think>a</think>call", "<think>b</think>done"]
    examples, _ = rendered(tokenizer, conversation("q", turns[0], tool("12"), turns[1], kind="trajectory"))
    assert len(examples) == 1
    assert trained_texts(tokenizer, examples) == [turn + "<|im_end|>" for turn in turns]


def test_reasoning_that_the_generation_prompt_begins():
    """As DeepSeek-R1, whose template shows no reasoning even in the last turn."""
    tokenizer = STYLES["begins_reasoning"]()
    content = conversation("1+1?", "<think>\none\n</think>\n\n2", "2+2?", "<think>\n</think>4")
    examples, _ = rendered(tokenizer, content)
    assert [example.prompt_text for example in examples] == [
        "<s><|user|>1+1?<|assistant|><think>\n",
        "<s><|user|>1+1?<|assistant|>\n\n2</s><|user|>2+2?<|assistant|><think>\n",
    ]
    assert trained_texts(tokenizer, examples) == ["one\n</think>\n\n2</s>", "</think>4</s>"]
    check_prompts(tokenizer, content, examples)
    # A turn without reasoning is none that the model could write after this prompt.
    assert reason_of(tokenizer, conversation("1+1?", "2")) == "mask_not_exact"


def test_tool_calls_are_trained_and_results_are_not():
    tokenizer = STYLES["tools"]()
    call = {"type": "function", "function": {"name": "mul", "arguments": {"by": [4, 3]}}}
    tools = [{"type": "function", "function": {"name": "mul"}}]
    content = conversation(
        user("4*3?"),
        {"role": "assistant", "tool_calls": [call]},
        tool("12"),
        tool("again 12"),
        assistant("12"),
        user("Bye"),
        tools=tools,
        kind="trajectory",
    )
    [example], faults = rendered(tokenizer, content)
    assert faults == [] and '<tools>\n{"type"' in example.prompt_text
    # The generation prompt ends with the newline that stands before a call.
    assert trained_texts(tokenizer, [example]) == [
        '<tool_call>\n{"name": "mul", "arguments": {"by": [4, 3]}}\n</tool_call><|im_end|>',
        "12<|im_end|>",
    ]
    assert [turn.role for turn in example.turns] == ["assistant", "tool", "assistant"]
    check_prompts(tokenizer, content, [example])


def test_joins_that_change_tokens_make_segments():
    """With the next turn known, "a: " + "ans" has one token for " ans": no model ever sees that before it writes.

    rllm #272, #352 (other ids for the same text), trl #6105, #5213 (prompt and completion cut elsewhere).
    """
    tokenizer = STYLES["space_at_the_end"]()
    content = conversation("a", "ans", "b", "yes", "c", "ans")
    examples, _ = rendered(tokenizer, content)
    assert [len(example.turns) for example in examples] == [1, 3]
    assert trained_texts(tokenizer, examples) == ["ans<|im_end|>", "yes<|im_end|>", "ans<|im_end|>"]
    check_prompts(tokenizer, content, examples)
    newline = conversation("a", "\n\nans", "b", "yes")  # "assistant\n" + "\n\nans": the first two newlines are one
    examples, _ = rendered(STYLES["smollm2"](), newline)
    assert len(examples) == 2
    check_prompts(STYLES["smollm2"](), newline, examples)


def test_a_join_that_tokens_can_not_express():
    """These pieces put a space before every text, so what the model would write after "assistant: " can't be said."""
    template = STYLES["space_at_the_end"]().chat_template.replace("<|im_end|>", "</s>")
    assert reason_of(piece_tokenizer(template), conversation("a", "yes")) == "mask_not_exact"
    # Without that habit it can.
    tokenizer = piece_tokenizer(template, is_legacy=False)
    examples, _ = rendered(tokenizer, conversation("a", "yes"))
    assert trained_texts(tokenizer, examples) == ["yes</s>"]


def test_characters_that_the_tokenizer_does_not_know():
    """A turn of unknown tokens is not the turn."""
    tokenizer = byte_tokenizer(SMOLLM2, unk_token="<|endoftext|>")
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    del inner["model"]["vocab"]["z"]
    inner["model"]["unk_token"] = "<|endoftext|>"
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer).from_str(json.dumps(inner)).model
    assert reason_of(tokenizer, conversation("a", "xyz")) == "mask_not_exact"
    assert reason_of(tokenizer, Content("row", "demonstration", {"text": "xyz"}), render="plain") == "mask_not_exact"
    assert trained_texts(tokenizer, rendered(tokenizer, conversation("z?", "xy"))[0]) == ["xy<|im_end|>"]


TEXTS = st.one_of(
    st.text(min_size=1, max_size=30),
    st.text(alphabet=" \n\tans:.é🎈<|_'", min_size=1, max_size=12),  # such as meet at joins
).filter(lambda text: text.strip() and "▁" not in text)


@pytest.mark.parametrize("style", WHOLE)
@given(texts=st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_texts(style, texts):
    """Every turn is trained once, whole, behind the prompt of its history."""
    tokenizer = STYLES[style]()
    before, after = AROUND.get(style, ("", "<|im_end|>"))
    content = conversation(*texts)
    for train_on in ("all_turns", "last_turn"):
        examples, _ = rendered(tokenizer, content, train_on=train_on)
        expected = [before + (text.strip() if style in AROUND else text) + after for text in texts[1::2]]
        assert trained_texts(tokenizer, examples) == expected[-1 if train_on == "last_turn" else 0 :]
        check_prompts(tokenizer, content, examples)


@pytest.fixture(scope="session")
def real_tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2, None)


@pytest.mark.slow
@given(texts=st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_texts_of_the_real_model(real_tokenizer, texts):
    """It lacks tokens for some bytes of rare characters: a turn that loses a character is not trained."""
    content = conversation(*texts)
    if any(real_tokenizer.decode(real_tokenizer(text)["input_ids"]) != text for text in texts[1::2]):
        assert reason_of(real_tokenizer, content) == "mask_not_exact"
        return
    examples, _ = rendered(real_tokenizer, content)
    assert trained_texts(real_tokenizer, examples) == [text + "<|im_end|>" for text in texts[1::2]]
    check_prompts(real_tokenizer, content, examples)


@pytest.mark.slow
def test_masks_of_the_real_model(real_tokenizer):
    content = conversation("What is 2+2?", "4", "Times 3?", " It is\n\n12. ", "Sure?", "Yes 🎈")
    [example], faults = rendered(real_tokenizer, content)
    trained = [i for i, flag in zip(example.completion_token_ids, example.completion_mask, strict=True) if flag]
    assert real_tokenizer.decode(trained) == "4<|im_end|> It is\n\n12. <|im_end|>Yes 🎈<|im_end|>" and faults == []
    messages = [*content.parts["prompt"], *content.parts["completion"]]
    whole = real_tokenizer.apply_chat_template(messages)["input_ids"]
    assert example.prompt_token_ids + example.completion_token_ids == whole[:-1]  # but for the last newline
    [last], _ = rendered(real_tokenizer, content, train_on="last_turn")
    assert real_tokenizer.decode(last.completion_token_ids) == "Yes 🎈<|im_end|>"
    prompt = real_tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert last.prompt_token_ids == prompt


def test_a_long_conversation_is_tokenised_once(monkeypatch):
    """trl #6250. Not once a turn: the characters given to the tokenizer grow with the text, not with its square."""
    renderer = Renderer(STYLES["smollm2"](), DataSettings(source="x"))
    encoder = renderer._examples.encoder
    given: list[int] = []
    encode_all = encoder.encode_all
    monkeypatch.setattr(encoder, "encode_all", lambda texts: given.extend(map(len, texts)) or encode_all(texts))
    content = conversation(*["word " * 20] * 80)
    [example] = renderer.render_example(content, Faults({}))
    assert len(example.turns) == 79
    assert sum(given) < 2 * len(encoder.decode(example.completion_token_ids))


def test_joined_texts_merge_in_the_tokenizer_of_the_tests():
    tokenizer = byte_tokenizer(None)
    assert [len(tokenizer(text)["input_ids"]) for text in ("\n\n", " ans", "ans")] == [1, 1, 1]
