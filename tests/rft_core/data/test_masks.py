"""Given conversations -> rows to be: stop tokens, kinds of examples, lengths."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rft_core.data.examples import Content
from rft_core.data.masks import Turn
from tests.rft_core.data.chat_templates import CHATML, NO_END, SMOLLM2, STYLES, byte_tokenizer, piece_tokenizer
from tests.rft_core.data.given_conversations import assistant, conversation, reason_of, rendered, trained_texts, user

# Stop tokens


def test_a_turn_without_a_stop_token():
    """trl #1623, #931, #3083, #2059: a model that was never shown an end token never ends."""
    tokenizer = STYLES["no_end"]()
    content = conversation("a", "b ", "c", "d")
    assert reason_of(tokenizer, content) == "missing_eos"
    examples, faults = rendered(tokenizer, content, policies={"missing_eos": "repair"})
    assert faults == ["missing_eos"]
    assert trained_texts(tokenizer, examples) == [" b <|im_end|>", " d<|im_end|>"]
    # The model sees the history as the template has it, so without the token that was added.
    assert examples[1].prompt_text == "user: a\n\nassistant: b \n\nuser: c\n\nassistant:"


def test_no_stop_token_can_be_added_where_there_is_none():
    tokenizer = byte_tokenizer(NO_END, eos_token=None, pad_token=None)
    assert reason_of(tokenizer, conversation("a", "b"), policies={"missing_eos": "repair"}) == "missing_eos"


@pytest.mark.parametrize(("style", "end"), [("smollm2", "<|im_end|>"), ("inst", "</s>")])
def test_an_end_token_in_the_text_is_not_doubled(style, end):
    """trl #3318, PR #4908."""
    tokenizer = STYLES[style]()
    plain, _ = rendered(tokenizer, conversation("a", "yes", "b", "c"))
    doubled = conversation("a", f"yes{end}", "b", f"c{end}{end}\n")
    examples, faults = rendered(tokenizer, doubled)
    assert (examples, faults) == (plain, ["doubled_eos"])  # their content too: it is mended
    assert reason_of(tokenizer, doubled, policies={"doubled_eos": "reject"}) == "doubled_eos"
    assert reason_of(tokenizer, conversation("a", f"b{end}c")) == "special_token_in_text"
    assert reason_of(tokenizer, conversation("a", f"b{end}c"), policies={"special_token_in_text": "keep"}) == (
        "mask_not_exact"
    )


def test_an_end_token_in_the_text_is_the_one_where_the_template_writes_none():
    tokenizer = STYLES["no_end"]()
    examples, faults = rendered(tokenizer, conversation("a", "b<|im_end|>"))
    assert trained_texts(tokenizer, examples) == [" b<|im_end|>"] and faults == []
    examples, faults = rendered(tokenizer, conversation("a", "b<|im_end|><|im_end|>"))
    assert trained_texts(tokenizer, examples) == [" b<|im_end|>"] and faults == ["doubled_eos"]


def test_a_template_that_writes_its_end_token_twice():
    tokenizer = byte_tokenizer(SMOLLM2.replace("'<|im_end|>' + '\n'", "'<|im_end|><|im_end|>' + '\n'"))
    examples, faults = rendered(tokenizer, conversation("a", "b"))
    assert trained_texts(tokenizer, examples) == ["b<|im_end|>"] and faults == ["doubled_eos"]


def test_end_tokens_that_only_the_model_folder_names():
    template = NO_END.replace("'\n\n'", "'\n<|stop|>'")
    tokenizer = byte_tokenizer(template, special=CHATML, added=("<|stop|>",))
    assert reason_of(tokenizer, conversation("a", "b")) == "missing_eos"
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    examples, _ = rendered(tokenizer, conversation("a", "b", "c", "d"), frozenset({stop}))
    assert trained_texts(tokenizer, examples) == [" b\n<|stop|>", " d\n<|stop|>"]


def test_a_pad_token_in_the_stop_list_ends_no_turn():
    """transformers #48016; Qwen2.5 lists it too."""
    kept = {"special_token_in_text": "keep"}
    content = conversation("a", "b<|endoftext|>")
    for template, found in ((SMOLLM2, ["b<|endoftext|><|im_end|>"]), (NO_END, "missing_eos")):
        tokenizer = byte_tokenizer(template, pad_token="<|endoftext|>")
        stop_ids = frozenset({tokenizer.pad_token_id, tokenizer.eos_token_id})
        if template is NO_END:
            assert reason_of(tokenizer, content, stop_ids, policies=kept) == found
        else:
            assert trained_texts(tokenizer, rendered(tokenizer, content, stop_ids, policies=kept)[0]) == found
    # Where the template ends its turns with it, it is the end token whatever it is called.
    tokenizer = byte_tokenizer(
        NO_END.replace("message.content", "message.content + pad_token"), pad_token="<|endoftext|>"
    )
    assert trained_texts(tokenizer, rendered(tokenizer, conversation("a", "b"))[0]) == [" b<|endoftext|>"]


def test_the_end_token_is_trained_when_it_is_the_pad_token_too():
    """trl #1623, PR #4970: a mask made from the pad id leaves out every EOS."""
    for style in ("smollm2", "marked"):
        tokenizer = STYLES[style]()
        assert tokenizer.pad_token_id == tokenizer.eos_token_id
        [example], _ = rendered(tokenizer, conversation("a", "b"))
        assert example.completion_token_ids[-1] == tokenizer.eos_token_id and example.completion_mask[-1]


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_turn_that_says_nothing_has_nothing_to_train(text):
    tokenizer = STYLES["smollm2"]()
    assert reason_of(tokenizer, conversation("a", text, "b", "c")) == "no_trained_token"
    # In a trajectory it is what the policy did.
    examples, _ = rendered(tokenizer, conversation("a", text, "b", "c", kind="trajectory"))
    assert trained_texts(tokenizer, examples) == [text + "<|im_end|>", "c<|im_end|>"]
    # But for calls that the template leaves out.
    calls = conversation(user("a"), assistant("", tool_calls=[{"name": "find"}]), kind="trajectory")
    assert reason_of(tokenizer, calls, policies={"left_out_by_template": "keep"}) == "no_trained_token"


# Kinds of examples


def pair(chosen: str, rejected: str) -> Content:
    parts = {"prompt": [user("Greet me.")], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]}
    return Content("row", "pair", parts)


def test_a_pair_is_one_prompt_and_two_completions():
    """trl PR #6433: a beginning that both sides share is part of both."""
    tokenizer = STYLES["smollm2"]()
    (chosen, rejected), _ = rendered(tokenizer, pair("Hello there", "Hello you"))
    assert (chosen.part, rejected.part) == ("chosen", "rejected")
    assert trained_texts(tokenizer, [chosen, rejected]) == ["Hello there<|im_end|>", "Hello you<|im_end|>"]
    assert chosen.prompt_token_ids == rejected.prompt_token_ids


def test_sides_that_are_equal_within_the_limit():
    tokenizer = STYLES["smollm2"]()
    content = pair("The same words", "The same ways")
    size = len(rendered(tokenizer, content)[0][0].prompt_token_ids)
    cut = {"max_tokens": size + 10, "policies": {"too_long": "repair"}}
    assert reason_of(tokenizer, content, **cut) == "identical_after_truncation"
    assert reason_of(STYLES["no_system"](), pair("Same", " Same\n")) == "identical_after_truncation"
    cut["policies"] |= {"identical_after_truncation": "keep"}
    examples, faults = rendered(tokenizer, content, **cut)
    assert [example.text for example in examples] == ["The same w"] * 2 and all(e.is_truncated for e in examples)
    assert faults == ["too_long", "identical_after_truncation"]


def test_steps_end_where_their_text_ends():
    tokenizer = STYLES["smollm2"]()
    steps = ["First: 1+1=2.", "Then.\n\n", "ans 4"]
    content = Content("row", "stepwise", {"prompt": [user("a")], "steps": steps}, step_labels=[1.0, 1.0, 0.0])
    [example], _ = rendered(tokenizer, content)
    assert trained_texts(tokenizer, [example]) == ["First: 1+1=2.\nThen.\n\nans 4<|im_end|>"]
    assert example.part == "steps" and example.step_ends is not None
    ends = [0, *(end + 1 for end in example.step_ends)]
    spans = [example.completion_token_ids[start:end] for start, end in pairwise(ends)]
    assert [tokenizer.decode(span) for span in spans] == ["First: 1+1=2.\n", "Then.\n\n", "ans 4"]
    assert ends[-1] == len(example.completion_token_ids) - 1  # then the end token


def test_steps_that_were_all_cut_off_leave_nothing_to_learn():
    tokenizer = STYLES["smollm2"]()
    content = Content("row", "stepwise", {"prompt": [user("a")], "steps": ["0123456789", "y"]}, step_labels=[1.0, 0.0])
    [whole], _ = rendered(tokenizer, content)
    first = len(whole.prompt_token_ids) + whole.step_ends[0]
    repair = {"policies": {"too_long": "repair"}}
    assert reason_of(tokenizer, content, max_tokens=first, **repair) == "no_trained_token"
    [cut], _ = rendered(tokenizer, content, max_tokens=first + 1, **repair)
    assert cut.step_ends == whole.step_ends[:1]


def test_steps_with_an_end_token_in_the_text():
    tokenizer = STYLES["smollm2"]()
    plain = Content("row", "stepwise", {"prompt": [user("a")], "steps": ["x", "y"]})
    spelled = Content("row", "stepwise", {"prompt": [user("a")], "steps": ["x", "y<|im_end|>"]})
    assert rendered(tokenizer, spelled) == (rendered(tokenizer, plain)[0], ["doubled_eos"])


def test_steps_in_a_template_that_trims():
    tokenizer = STYLES["inst"]()
    content = Content("row", "stepwise", {"prompt": [user("a")], "steps": [" yes", "no \n"]})
    [example], _ = rendered(tokenizer, content)
    assert trained_texts(tokenizer, [example]) == [" yes\nno </s>"]
    assert example.step_ends is not None and len(set(example.step_ends)) == 2


@pytest.mark.parametrize("is_legacy", [True, False])
def test_a_plain_text_is_trained_behind_its_bos(is_legacy):
    tokenizer = piece_tokenizer(None, is_legacy)
    content = Content("row", "demonstration", {"text": "yes é"})
    [example], faults = rendered(tokenizer, content, render="plain")
    assert example.prompt_token_ids + example.completion_token_ids == [*tokenizer("yes é")["input_ids"], 2]
    assert example.prompt_token_ids == [1] and all(example.completion_mask) and faults == []
    assert (example.part, example.text) == ("text", "yes é")


def test_a_plain_text_without_a_bos_gives_its_first_token_to_the_prompt():
    tokenizer = byte_tokenizer(None)
    [example], _ = rendered(tokenizer, Content("row", "demonstration", {"text": "xyz"}), render="plain")
    assert tokenizer.decode(example.prompt_token_ids) == "x"
    assert tokenizer.decode(example.completion_token_ids) == "yz<|im_end|>" and all(example.completion_mask)
    [same], faults = rendered(tokenizer, Content("row", "demonstration", {"text": "xyz<|im_end|>"}), render="plain")
    assert (same.completion_token_ids, faults) == (example.completion_token_ids, [])
    twice = Content("row", "demonstration", {"text": "xyz<|im_end|><|im_end|>"})
    assert rendered(tokenizer, twice, render="plain") == ([same], ["doubled_eos"])


def test_a_plain_text_with_nothing_in_it():
    for text in (" ", "<|im_end|>"):
        content = Content("row", "demonstration", {"text": text})
        assert reason_of(byte_tokenizer(None), content, render="plain") == "no_trained_token"
    content = Content("row", "demonstration", {"text": "a"})
    assert reason_of(byte_tokenizer(None, eos_token=None, pad_token=None), content, render="plain") == "missing_eos"


def test_a_plain_completion_follows_its_prompt_as_it_is():
    tokenizer = piece_tokenizer(None)
    content = conversation("Once upon", " a time", " there was", " yes", num_prompt=1)
    examples, faults = rendered(tokenizer, content, render="plain")
    assert trained_texts(tokenizer, examples)[0] == " a time</s>" and faults == []
    assert examples[0].prompt_token_ids == tokenizer("Once upon")["input_ids"]
    empty = conversation(assistant("ans"), num_prompt=0)
    [example], _ = rendered(byte_tokenizer(None, merges=()), empty, render="plain")
    assert (len(example.prompt_token_ids), example.text) == (1, "ns")


def test_a_labelled_row_is_one_completion():
    content = conversation("a", "b", kind="labelled", label=True)
    [example], _ = rendered(STYLES["smollm2"](), content)
    assert example.part == "completion" and example.text == "b"


def test_the_system_message_moves_in_examples_too():
    tokenizer = STYLES["no_system"]()
    content = conversation({"role": "system", "content": "s"}, user("a"), assistant("b"), num_prompt=2)
    assert reason_of(tokenizer, content) == "system_refused"
    [example], faults = rendered(tokenizer, content, policies={"system_refused": "repair"})
    assert faults == ["system_refused"] and "s\n\na" in example.prompt_text
    mended = example.content
    assert mended.parts == {"prompt": [user("s\n\na")], "completion": [assistant("b")]}
    assert rendered(tokenizer, mended) == ([example], [])
    assert trained_texts(tokenizer, [example]) == ["b<|end|>"]


def test_reasoning_fields_that_the_template_leaves_out():
    content = conversation(user("a"), assistant("b", reasoning_content="because"))
    assert reason_of(STYLES["smollm2"](), content) == "left_out_by_template"
    assert rendered(STYLES["smollm2"](), content, policies={"left_out_by_template": "keep"})[1] == [
        "left_out_by_template"
    ]


def test_a_completion_without_a_turn_of_the_assistant():
    assert reason_of(STYLES["smollm2"](), conversation(user("a"), user("b"))) == "no_assistant_turn"


def test_a_history_that_the_template_refuses():
    """The conversation is fine as a whole, but no prompt can begin with the assistant."""
    tokenizer = byte_tokenizer(SMOLLM2)
    tokenizer.chat_template = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + SMOLLM2
    assert reason_of(tokenizer, conversation("a", "b")) == "template_refused"


def test_without_a_tokenizer_there_is_nothing_to_mask():
    assert rendered(None, conversation("a", "b")) == ([], [])


# Length


def test_an_example_that_is_too_long():
    tokenizer = STYLES["smollm2"]()
    content = conversation("a", "0123456789", "b", "c")
    [whole], _ = rendered(tokenizer, content)
    size, num_prompt = len(whole.prompt_token_ids + whole.completion_token_ids), len(whole.prompt_token_ids)
    assert rendered(tokenizer, content, max_tokens=size)[0] == [whole]
    assert reason_of(tokenizer, content, max_tokens=size - 1) == "too_long"
    repair = {"policies": {"too_long": "repair"}}
    # A completion keeps its first tokens: 4 of the first turn, then without its end token.
    [cut], faults = rendered(tokenizer, content, max_tokens=num_prompt + 4, **repair)
    assert (cut.text, cut.turns, cut.is_truncated, faults) == ("0123", (Turn("assistant", 0, 4),), True, ["too_long"])
    assert cut.prompt_token_ids == whole.prompt_token_ids
    assert reason_of(tokenizer, content, max_tokens=num_prompt, **repair) == "too_long"
    # A prompt keeps its last, which may leave room enough for the completion.
    [short], _ = rendered(tokenizer, content, max_tokens=size - 1, max_prompt_tokens=num_prompt - 1, **repair)
    assert short.prompt_token_ids == whole.prompt_token_ids[1:] and not short.is_truncated
    assert short.completion_token_ids == whole.completion_token_ids
    [cut], _ = rendered(tokenizer, content, max_tokens=10, max_prompt_tokens=6, **repair)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-6:] and cut.text == "0123"
    assert cut.prompt_text == tokenizer.decode(cut.prompt_token_ids)


def test_segments_are_cut_each_on_its_own():
    tokenizer = STYLES["strips_reasoning"]()
    content = conversation("a", "<think>" + "x" * 90 + "</think>2", "b", "c")
    cut = {"max_tokens": 90, "max_prompt_tokens": 90, "policies": {"too_long": "repair"}}
    first, second = rendered(tokenizer, content, **cut)[0]
    assert first.is_truncated and not second.is_truncated
    assert [(example.segment, example.text[:4]) for example in (first, second)] == [(0, "<thi"), (1, "c")]


def test_steps_beyond_the_limit_are_gone():
    tokenizer = STYLES["smollm2"]()
    content = Content("row", "stepwise", {"prompt": [user("a")], "steps": ["xy", "z", "w"]})
    [whole], _ = rendered(tokenizer, content)
    assert whole.step_ends == [2, 4, 5]  # x y \n | z \n | w | end
    limit = len(whole.prompt_token_ids) + 4
    [cut], _ = rendered(tokenizer, content, max_tokens=limit, policies={"too_long": "repair"})
    assert cut.step_ends == [2] and cut.text == "xy\nz"
