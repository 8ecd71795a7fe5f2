"""Contents -> rendered text, tokens and masks. Nothing downstream renders or tokenises again what was done here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from data_contracts.refs import digest_of
from rft_core.data.encoding import Encoder
from rft_core.data.examples import Content, Message
from rft_core.data.faults import Faults, Rejected
from rft_core.data.masks import ExampleRenderer, RenderedExample
from rft_core.data.settings import DataSettings
from rft_core.data.templates import Admission, ChatTemplate, PlainTemplate, TemplateRefused
from rft_core.errors import ModelUnreadable, SettingsError


@dataclass(frozen=True)
class RenderedPrompt:
    """`text` up to and with the generation prompt, and its ids; null without a tokenizer. `content` is what was
    rendered: the row's own, or what a repair made of it. A prompt that was cut keeps its messages.
    """

    text: str
    token_ids: list[int] | None
    content: Content


class Renderer:
    """Renders and tokenises by one tokenizer, or joins texts plainly without one.

    `stop_ids` are the end tokens that the model folder names besides the tokenizer's own EOS. Raises ModelUnreadable
    when data.render is chat and the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any | None, settings: DataSettings, stop_ids: frozenset[int] | None = None) -> None:
        self.settings = settings
        self._encoder: Encoder | None = None
        is_chat = settings.render == "chat"
        if tokenizer is None:
            self._template: ChatTemplate | PlainTemplate = PlainTemplate(separator="\n" if is_chat else "")
            return
        self._encoder = Encoder(tokenizer)
        self._template = ChatTemplate(tokenizer) if is_chat else PlainTemplate(end=tokenizer.eos_token or "")
        self._admission = Admission(self._template)
        self._examples = ExampleRenderer(self._admission, self._encoder, settings, stop_ids or frozenset())

    def render_prompts(self, contents: list[Content], faults: list[Faults]) -> list[RenderedPrompt | Rejected]:
        """The prompts of contents in order, each with the faults of its row; a rejection stands in its row's place.

        Contents of one batch are rendered and tokenised together.
        """
        drafts = self._texts(contents, faults)
        if self._encoder is None:
            return [
                draft if isinstance(draft, Rejected) else RenderedPrompt(draft[1], None, draft[0]) for draft in drafts
            ]
        texts = [draft[1] for draft in drafts if not isinstance(draft, Rejected)]
        token_ids = iter(self._encoder.encode_all(texts) if texts else [])
        rendered: list[RenderedPrompt | Rejected] = []
        for draft, found in zip(drafts, faults, strict=True):
            if isinstance(draft, Rejected):
                rendered.append(draft)
                continue
            try:
                rendered.append(self._prompt(*draft, next(token_ids), found))
            except Rejected as rejection:
                rendered.append(rejection)
        return rendered

    def render_example(self, content: Content, faults: Faults) -> list[RenderedExample]:
        """The trained parts of what someone completed, one row per part and segment; none without a tokenizer.

        Raises Rejected.
        """
        return [] if self._encoder is None else self._examples.render(content, faults)

    def _texts(self, contents: list[Content], faults: list[Faults]) -> list[tuple[Content, str] | Rejected]:
        messages: list[list[Message]] = [content.parts["prompt"] for content in contents]
        without_tools = [index for index, content in enumerate(contents) if not content.tools]
        outcomes = self._template.render_prompts([messages[index] for index in without_tools])
        known = dict(zip(without_tools, outcomes, strict=True))
        drafts: list[tuple[Content, str] | Rejected] = []
        for index, (content, found) in enumerate(zip(contents, faults, strict=True)):
            try:
                drafts.append(self._admitted(content, messages[index], known.get(index), found))
            except Rejected as rejection:
                drafts.append(rejection)
        return drafts

    def _admitted(
        self, content: Content, messages: list[Message], outcome: str | TemplateRefused | None, faults: Faults
    ) -> tuple[Content, str]:
        if self._encoder is None:
            return content, self._template.render(messages, content.tools, True)
        for message in messages:
            self._encoder.check(message, faults)
        self._encoder.check(content.tools, faults)
        admitted, text = self._admission.admit(messages, content.tools, faults, True, outcome)
        if admitted is not messages:
            content = replace(content, parts={**content.parts, "prompt": admitted})
        return content, self._encoder.settle_bos(text, faults, is_expected=self.settings.render == "chat")

    def _prompt(self, content: Content, text: str, token_ids: list[int], faults: Faults) -> RenderedPrompt:
        assert self._encoder is not None
        tokens = self._encoder.begin(text, token_ids)
        text, ids = self._encoder.shown(tokens), tokens.ids
        if not ids:
            faults.meet("empty_prompt", "the rendered template must hold tokens, found none")
        limit = self.settings.max_prompt_tokens
        if len(ids) > limit:
            faults.meet("too_long", f"a rendered prompt has at most {limit} tokens, found {len(ids)}")
            text, ids = self._encoder.last(text, ids, limit)
        return RenderedPrompt(text, ids, content)


def load_tokenizer(folder: Path | str, chat_template: str | None) -> Any:
    """The tokenizer of a model folder. A chat template that it has, or is given, compiles.

    Raises ModelUnreadable when there is none, SettingsError when `chat_template` is not a Jinja template.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not folder.is_dir():
        raise ModelUnreadable(f"a model must be a folder, found none at {folder}; `rft fetch-model` gets one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ModelUnreadable(
            f"{folder} must hold a tokenizer (tokenizer.json, tokenizer_config.json); reading it failed: {error}"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:  # that of a base model; data.render says whether one is needed
        return tokenizer
    try:
        ChatTemplate(tokenizer)
    except jinja2.TemplateSyntaxError as error:
        kind = ModelUnreadable if chat_template is None else SettingsError
        raise kind(
            f"the chat template must be Jinja, found a mistake in its line {error.lineno}: {error.message}"
        ) from error
    return tokenizer


def load_stop_ids(folder: Path | str) -> frozenset[int]:
    """The end tokens that a model folder names in its generation config and its config. Raises ModelUnreadable."""
    named: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        try:
            found = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ModelUnreadable(f"{path} must hold a JSON object; reading it failed: {error}") from error
        named += found if isinstance(found, list) else [] if found is None else [found]
    return frozenset(named)


def tokenizer_digest(tokenizer: Any) -> str:
    """64 hex digits: vocabulary, rules, special tokens and the chat template. Not the folder, nor padding settings."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(fast.to_str()) if fast is not None else {"vocabulary": tokenizer.get_vocab()}
    for setting_of_last_call in ("padding", "truncation"):
        rules.pop(setting_of_last_call, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest_of({"rules": rules, "special": special, "chat_template": tokenizer.chat_template})
