"""Contents -> rendered prompts: one rendering, one tokenisation, one BOS, a length that counts everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.data.examples import Content
from rft_core.data.faults import Faults, Rejected
from rft_core.data.prompts import RenderedPrompt, Renderer, load_stop_ids, load_tokenizer, tokenizer_digest
from rft_core.data.settings import DataSettings
from rft_core.errors import ModelUnreadable, SettingsError
from tests.rft_core.data.chat_templates import (
    CHATML,
    DROPS_SYSTEM,
    NO_SYSTEM,
    STYLES,
    TOOLS,
    byte_tokenizer,
    piece_tokenizer,
)
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

CASES = Path(__file__).parents[2] / "cases" / "pipeline_cases.jsonl"
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds <it> & more.", "parameters": {}}}


def prompt_of(*messages: str | dict, tools: list | None = None, row_id: str = "row") -> Content:
    """Texts are the user's."""
    given = [{"role": "user", "content": message} if isinstance(message, str) else message for message in messages]
    return Content(row_id, "prompt", {"prompt": given}, tools=tools)


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def rendered(tokenizer, *contents: Content, **changes) -> tuple[list[RenderedPrompt | Rejected], list[list[str]]]:
    """Prompts, and the reasons of the faults that each row survived."""
    settings = DataSettings(**{"source": "sums.jsonl", **changes})
    faults = [Faults(settings.policies) for _ in contents]
    prompts = Renderer(tokenizer, settings).render_prompts(list(contents), faults)
    return prompts, [[fault.reason for fault in found.found] for found in faults]


def one(tokenizer, content: Content, **changes) -> RenderedPrompt:
    [prompt], _ = rendered(tokenizer, content, **changes)
    assert isinstance(prompt, RenderedPrompt), prompt
    return prompt


def reason_of(tokenizer, content: Content, **changes) -> tuple[str, str]:
    [prompt], _ = rendered(tokenizer, content, **changes)
    assert isinstance(prompt, Rejected), prompt
    return prompt.reason, str(prompt)


def test_a_prompt_is_rendered_up_to_the_generation_prompt():
    tokenizer = make_tiny_tokenizer()
    content = prompt_of(system("Be brief."), "1+1?")
    prompt = one(tokenizer, content)
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids is not None and tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.content is content


@pytest.mark.parametrize("style", STYLES)
def test_texts_and_ids_are_those_of_apply_chat_template(style):
    tokenizer = STYLES[style]()
    has_tools = "tools" in tokenizer.chat_template
    conversations = [
        ["Why? Ü 🎈\n"],
        ["  a ", {"role": "assistant", "content": "b"}, "c"],
        *([[system("Be\nbrief."), "<b>&"]] if style not in ("no_system", "drops_system") else []),
    ]
    contents = [prompt_of(*messages, tools=[TOOL] if has_tools else None) for messages in conversations]
    prompts, _ = rendered(tokenizer, *contents, *contents)
    assert len(prompts) == 2 * len(contents)
    for content, prompt in zip(contents * 2, prompts, strict=True):
        messages = content.parts["prompt"]
        assert isinstance(prompt, RenderedPrompt), prompt
        expected = tokenizer.apply_chat_template(
            messages, tools=content.tools, tokenize=False, add_generation_prompt=True
        )
        assert prompt.text == expected
        assert prompt.token_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_template_knows_the_words_that_public_templates_use():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{{ strftime_now('%Y')[:2] }}{{ [1, '<é>'] | tojson }}{% for message in messages %}"
        "{% if loop.index0 == 2 %}{% break %}{% endif %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% endfor %}{{ eos_token }}{{ pad_token }}"
    )
    assert one(tokenizer, prompt_of("a", "b")).text == '<|im_start|>20[1, "<é>"]ab<|im_end|><|im_end|>'


def test_a_second_template_is_that_of_rows_with_tools():
    tokenizer = byte_tokenizer(None)
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": TOOLS}
    with_tools, without = rendered(tokenizer, prompt_of("a", tools=[TOOL]), prompt_of("a"))[0]
    assert "<tools>\n" + json.dumps(TOOL) in with_tools.text and "<tools>" not in without.text


def test_padding_and_truncation_of_an_earlier_call_are_not_ours():
    tokenizer = make_tiny_tokenizer()
    renderer = Renderer(tokenizer, DataSettings(source="x"))
    contents = [prompt_of("a"), prompt_of("a much longer one")]
    before = renderer.render_prompts(contents, [Faults({}), Faults({})])
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert renderer.render_prompts(contents, [Faults({}), Faults({})]) == before


def test_without_a_tokenizer_texts_are_joined():
    content = prompt_of(system("Be brief."), "1+1?", tools=[TOOL])
    assert one(None, content) == RenderedPrompt("Be brief.\n1+1?", None, content)
    assert one(None, content, render="plain").text == "Be brief.1+1?"


def test_a_bad_row_leaves_the_others_of_its_batch_in_place():
    tokenizer = STYLES["no_system"]()
    rows = [prompt_of("a"), prompt_of(system("s"), "b"), prompt_of("x <eos> y"), prompt_of("c"), prompt_of("d" * 99)]
    prompts, _ = rendered(tokenizer, *rows, max_prompt_tokens=60)
    found = [prompt.reason if isinstance(prompt, Rejected) else prompt.content.parts["prompt"] for prompt in prompts]
    assert found == [
        rows[0].parts["prompt"],
        "system_refused",
        "special_token_in_text",
        rows[3].parts["prompt"],
        "too_long",
    ]


# Special tokens


@pytest.mark.parametrize(
    "content",
    [
        prompt_of("x <|im_end|> y"),
        prompt_of(system("<|endoftext|>"), "a"),
        prompt_of("a", tools=[{"name": "<|im_start|>"}]),
        prompt_of("a", {"role": "assistant", "tool_calls": [{"function": {"arguments": {"<|im_end|>": 1}}}]}, "b"),
    ],
)
def test_text_may_not_spell_a_special_token(content):
    tokenizer = STYLES["tools"]()
    reason, detail = reason_of(tokenizer, content)
    assert reason == "special_token_in_text" and "<|" in detail
    prompts, faults = rendered(tokenizer, content, policies={"special_token_in_text": "keep"})
    assert isinstance(prompts[0], RenderedPrompt) and faults == [["special_token_in_text"]]


def test_a_text_that_no_tokenizer_takes():
    assert reason_of(make_tiny_tokenizer(), prompt_of("half \ud83d"))[0] == "lone_surrogate"


# The system's message


def refusing() -> object:
    return byte_tokenizer(NO_SYSTEM, special=(*CHATML, "<|turn|>", "<|end|>"), bos_token="<|im_start|>")


@pytest.mark.parametrize("make", [refusing, STYLES["drops_system"]])
def test_a_system_message_that_the_template_will_not_have(make):
    # The text of the system is found in the user's: that it appears in the rendering proves nothing.
    content = prompt_of(system("brief"), "Be brief: 1+1?")
    assert reason_of(make(), content)[0] == "system_refused"
    prompts, faults = rendered(make(), content, policies={"system_refused": "repair"})
    assert faults == [["system_refused"]]
    moved = prompt_of("brief\n\nBe brief: 1+1?")
    assert prompts[0].content.parts == moved.parts
    assert prompts[0].text == one(make(), moved).text


def test_what_a_dropped_system_message_says_is_words_for_people():
    assert reason_of(STYLES["drops_system"](), prompt_of(system("s"), "u"))[1] == (
        "the chat template leaves out messages of role system"
    )
    _, detail = reason_of(refusing(), prompt_of(system("s"), "u"))
    assert detail == "the chat template refused messages with roles system, user: System role not supported"


def test_each_row_is_judged_by_its_own_messages():
    """An empty system text is no loss, whatever the template does with it, before or after a row where it is one."""
    tokenizer = STYLES["drops_system"]()
    rows = [prompt_of(system(" "), "a"), prompt_of(system("s"), "a"), prompt_of("a"), prompt_of(system(""), "b")]
    prompts, _ = rendered(tokenizer, *rows)
    assert [isinstance(prompt, Rejected) for prompt in prompts] == [False, True, False, False]


def test_a_template_that_trims_or_escapes_the_system_text_shows_it():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}={{ m.content.strip() | tojson }}{% endfor %}"
    assert one(tokenizer, prompt_of(system('  say "é"\n '), "a")).text == 'system="say \\"é\\""user="a"'


def test_a_template_that_refuses_for_another_reason():
    tokenizer = STYLES["inst"]()
    messages = [system("s"), "a", "b"]  # two user messages in a row
    reason, detail = reason_of(tokenizer, prompt_of(*messages))
    assert reason == "template_refused" and "roles system, user, user" in detail and "must alternate" in detail
    assert reason_of(tokenizer, prompt_of(*messages), policies={"system_refused": "repair"})[0] == "template_refused"


def test_a_template_that_drops_a_message_refuses_it():
    tokenizer = byte_tokenizer(DROPS_SYSTEM.replace("!= 'system'", "!= 'tool'"))
    content = prompt_of("a", {"role": "assistant", "content": "b"}, {"role": "tool", "content": "12"})
    assert reason_of(tokenizer, content) == (
        "template_refused",
        "the chat template leaves out messages of role tool",
    )


# What a template has no place for


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (prompt_of("a", tools=[TOOL]), "tools"),
        (prompt_of("a", {"role": "assistant", "content": "", "tool_calls": [TOOL]}, "b"), "tool_calls"),
    ],
)
def test_tools_that_the_template_leaves_out(content, field):
    assert reason_of(make_tiny_tokenizer(), content) == (
        "left_out_by_template",
        f"the chat template leaves out {field}",
    )
    prompts, faults = rendered(make_tiny_tokenizer(), content, policies={"left_out_by_template": "keep"})
    assert isinstance(prompts[0], RenderedPrompt) and faults == [["left_out_by_template"]]
    assert isinstance(rendered(STYLES["tools"](), content)[0][0], RenderedPrompt)


# BOS


@pytest.mark.parametrize(
    "make", [lambda template: byte_tokenizer(template, begins_with_bos=True, bos_token="<|im_start|>"), piece_tokenizer]
)
@pytest.mark.parametrize(
    ("start", "faults"), [("", ["missing_bos"]), ("{{ bos_token }}", []), ("{{ bos_token * 3 }}", ["doubled_bos"])]
)
def test_exactly_one_bos_where_the_tokenizer_begins_with_one(make, start, faults):
    """alignment-handbook #127, trl #3520, NeMo-RL #855, OpenRLHF #393."""
    tokenizer = make(start + "Q: {{ messages[-1]['content'] }}")
    prompts, found = rendered(tokenizer, prompt_of("hi"))
    bos = tokenizer.bos_token
    assert (prompts[0].text, found) == (f"{bos}Q: hi", [faults])
    assert prompts[0].token_ids.count(tokenizer.bos_token_id) == 1
    # What the tokenizer itself makes of the text: with the BOS in it, or put before it.
    expected = tokenizer(f"{bos}Q: hi", add_special_tokens=False) if start else tokenizer("Q: hi")
    assert prompts[0].token_ids == expected["input_ids"]


@pytest.mark.parametrize("reason", ["missing_bos", "doubled_bos"])
def test_a_wrong_bos_may_be_a_reason_to_reject(reason):
    tokenizer = piece_tokenizer({"missing_bos": "", "doubled_bos": "<s><s>"}[reason] + "{{ messages[-1].content }}")
    assert reason_of(tokenizer, prompt_of("hi"), policies={reason: "reject"})[0] == reason


def test_no_bos_where_the_tokenizer_begins_with_none():
    """SmolLM2 names <|im_start|> its BOS and begins no text with it."""
    tokenizer = byte_tokenizer("{{ messages[0].content }}", bos_token="<|im_start|>")
    assert one(tokenizer, prompt_of("hi")).text == "hi"


def test_a_plain_prompt_is_what_the_tokenizer_makes_of_its_text():
    for tokenizer in (piece_tokenizer(None), piece_tokenizer(None, is_legacy=False), byte_tokenizer(None)):
        prompts, faults = rendered(tokenizer, prompt_of("Once upon", " a time"), render="plain")
        assert prompts[0].token_ids == tokenizer("Once upon a time")["input_ids"]
        assert faults == [[]]


# Length


def test_ds_07_overlong_prompts():
    case = next(case for case in map(json.loads, CASES.read_text().splitlines()) if case["id"].startswith("ds-07"))
    limit = case["input"]["max_prompt_tokens"]
    contents = []
    for row in case["input"]["rows"]:
        repeat = row.get("tools_repeat")
        tools = [repeat["tool"]] * repeat["count"] if isinstance(repeat, dict) else None
        contents.append(prompt_of(row["prompt"], tools=tools, row_id=row["id"]))
    tokenizer = STYLES["tools"]()
    assert any(content.tools for content in contents)
    lengths = [
        len(tokenizer.apply_chat_template(c.parts["prompt"], tools=c.tools, add_generation_prompt=True)["input_ids"])
        for c in contents
    ]
    prompts, _ = rendered(tokenizer, *contents, max_prompt_tokens=limit)
    kept = [
        content.row_id for content, prompt in zip(contents, prompts, strict=True) if isinstance(prompt, RenderedPrompt)
    ]
    assert kept == ["p-short"]
    assert [(prompt.reason, str(prompt)) for prompt in prompts[1:]] == [
        ("too_long", f"a rendered prompt has at most 512 tokens, found {length}") for length in lengths[1:]
    ]
    assert len(tokenizer(contents[2].parts["prompt"][0]["content"])["input_ids"]) < limit < lengths[2]
    cut, faults = rendered(tokenizer, *contents, max_prompt_tokens=limit, policies={"too_long": "repair"})
    assert faults == [[], ["too_long"], ["too_long"]]
    for content, prompt in zip(contents[1:], cut[1:], strict=True):
        whole = tokenizer.apply_chat_template(content.parts["prompt"], tools=content.tools, add_generation_prompt=True)[
            "input_ids"
        ]
        assert prompt.token_ids == whole[-limit:]
        assert prompt.text == tokenizer.decode(whole[-limit:]) and prompt.text.endswith("<|im_start|>assistant\n")


def test_length_is_exact_at_the_limit():
    tokenizer = make_tiny_tokenizer()
    length = len(one(tokenizer, prompt_of("abc")).token_ids)
    assert isinstance(rendered(tokenizer, prompt_of("abc"), max_prompt_tokens=length)[0][0], RenderedPrompt)
    assert reason_of(tokenizer, prompt_of("abcd"), max_prompt_tokens=length) == (
        "too_long",
        f"a rendered prompt has at most {length} tokens, found {length + 1}",
    )


def test_a_cut_prompt_keeps_its_bos():
    tokenizer = STYLES["no_system"]()
    for limit in (1, 2, 20):
        prompt = one(tokenizer, prompt_of("y" * 50), max_prompt_tokens=limit, policies={"too_long": "repair"})
        whole = one(tokenizer, prompt_of("y" * 50)).token_ids
        assert prompt.token_ids == [tokenizer.bos_token_id, *whole[len(whole) - limit + 1 :]]


def test_a_template_that_shows_nothing():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% if false %}{{ messages }}{% endif %}"
    assert reason_of(tokenizer, prompt_of("a"))[0] == "template_refused"
    assert reason_of(byte_tokenizer(None), prompt_of(""), render="plain")[0] == "empty_prompt"


# Tokenizers


def test_tokenizer_digest_follows_vocabulary_and_template_not_use():
    tokenizer = make_tiny_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == digest == tokenizer_digest(make_tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE + " "
    assert tokenizer_digest(tokenizer) != digest
    other = make_tiny_tokenizer()
    other.add_tokens(["new"])
    assert tokenizer_digest(other) != digest
    other.chat_template = None
    assert len(tokenizer_digest(other)) == 64


def test_load_tokenizer_says_what_is_wrong(tmp_path):
    with pytest.raises(ModelUnreadable, match="found none at"):
        load_tokenizer(tmp_path / "none", None)
    with pytest.raises(ModelUnreadable, match="must hold a tokenizer"):
        load_tokenizer(tmp_path, None)
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(load_tokenizer(tmp_path, None)) == tokenizer_digest(tokenizer)
    assert load_tokenizer(tmp_path, "{{ messages }}").chat_template == "{{ messages }}"
    with pytest.raises(SettingsError, match="mistake in its line 1"):
        load_tokenizer(tmp_path, "{% for %}")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelUnreadable, match="must hold a tokenizer"):
        load_tokenizer(tmp_path, None)


def test_stop_ids_are_those_that_the_model_folder_names(tmp_path):
    assert load_stop_ids(tmp_path) == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert load_stop_ids(tmp_path) == {2, 3, 7}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelUnreadable, match=r"config\.json must hold a JSON object"):
        load_stop_ids(tmp_path)


def test_markers_of_generation_are_part_of_a_template(tmp_path):
    STYLES["marked"]().save_pretrained(tmp_path)
    assert "{% generation %}" in load_tokenizer(tmp_path, None).chat_template


def test_a_tokenizer_without_a_template_renders_plainly_only(tmp_path):
    byte_tokenizer(None).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, None)
    assert one(tokenizer, prompt_of("a"), render="plain").text == "a"
    with pytest.raises(ModelUnreadable, match=r"no chat template; set model\.chat_template to one, or data\.render"):
        Renderer(tokenizer, DataSettings(source="x"))
