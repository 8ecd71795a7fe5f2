"""The chat template of a tokenizer: rendered in batches, and asked what it refuses or leaves out.

Rendering goes through the function that `apply_chat_template` itself calls, so both give the same text for every
template; what is saved is the handling around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2

from rft_core.data.examples import Message
from rft_core.data.faults import Faults
from rft_core.errors import ModelUnreadable

SYSTEM_ROLES = ("system", "developer")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
Tools = list[dict[str, Any]] | None
# What a template raises when it does not like messages: its own words, or a mistake in a type.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class TemplateRefused(Exception):
    """The template raised on a conversation; the message is what it said."""


class Template(Protocol):
    def render(self, messages: list[Message], tools: Tools, with_generation_prompt: bool) -> str:
        """Raises TemplateRefused."""
        ...


class ChatTemplate:
    """Raises ModelUnreadable when the tokenizer has no template, jinja2.TemplateSyntaxError when it is not Jinja."""

    def __init__(self, tokenizer: Any) -> None:
        # Here, since data without a tokenizer are read without loading the library.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        try:
            self._text = tokenizer.get_chat_template()
            self._text_with_tools = tokenizer.get_chat_template(tools=[])
        except ValueError as error:
            raise ModelUnreadable(
                "the tokenizer has no chat template; set model.chat_template to one, or data.render to plain"
            ) from error
        self._special_tokens = dict(tokenizer.special_tokens_map)
        for text in (self._text, self._text_with_tools):
            self._render([], chat_template=text)  # compiles it, once for all later calls

    def render(self, messages: list[Message], tools: Tools, with_generation_prompt: bool) -> str:
        try:
            return self._rendered([messages], tools, with_generation_prompt)[0]
        except _REFUSALS as error:
            raise TemplateRefused(str(error)) from error

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | TemplateRefused]:
        """Texts with the generation prompt and without tools, in order; a refusal stands in the place of its text."""
        try:
            return list(self._rendered(conversations, None, True))
        except _REFUSALS:
            return [self._text_or_refusal(messages) for messages in conversations]

    def _text_or_refusal(self, messages: list[Message]) -> str | TemplateRefused:
        try:
            return self.render(messages, None, True)
        except TemplateRefused as refusal:
            return refusal

    def _rendered(self, conversations: list[list[Message]], tools: Tools, with_generation_prompt: bool) -> list[str]:
        texts, _ = self._render(
            conversations,
            tools=tools,
            chat_template=self._text_with_tools if tools else self._text,
            add_generation_prompt=with_generation_prompt,
            **self._special_tokens,
        )
        return texts


@dataclass(frozen=True)
class PlainTemplate:
    """Texts joined as they are; `end` follows each text of the assistant."""

    end: str = ""
    separator: str = ""

    def render(self, messages: list[Message], tools: Tools, with_generation_prompt: bool) -> str:
        return self.separator.join(
            (message.get("content") or "") + (self.end if message["role"] == "assistant" else "")
            for message in messages
        )

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | TemplateRefused]:
        return [self.render(messages, None, True) for messages in conversations]


@dataclass(frozen=True)
class Omissions:
    """What a template leaves out: roles of messages whose text is not in the rendering, and fields."""

    roles: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


class Admission:
    """Lets conversations in that the template shows whole. Omissions are looked for once for each shape of
    conversation (roles, fields, tools): a template that shows one text of a role shows the next one too.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self._omissions: dict[tuple[Any, ...], Omissions] = {}

    def admit(
        self,
        messages: list[Message],
        tools: Tools,
        faults: Faults,
        with_generation_prompt: bool,
        outcome: str | TemplateRefused | None = None,
    ) -> tuple[list[Message], str]:
        """The messages and their rendering; the system's text moves into the first user message where the template
        won't have it and the recipe says repair. `outcome` is their rendering where it is known.

        Raises Rejected with system_refused, template_refused, or left_out_by_template.
        """
        found = self._outcome(messages, tools, with_generation_prompt) if outcome is None else outcome
        text, problem = self._judge(messages, tools, with_generation_prompt, found)
        if problem is not None:
            moved = with_system_in_first_user(messages)
            reason = "template_refused"
            if moved is not None:
                found = self._outcome(moved, tools, with_generation_prompt)
                text, later_problem = self._judge(moved, tools, with_generation_prompt, found)
                if later_problem is None:
                    reason = "system_refused"
            faults.meet(reason, problem)
            assert moved is not None, "a row without a system message can't be repaired"
            messages = moved
        if fields := self._find_omissions(messages, tools, with_generation_prompt, text).fields:
            faults.meet("left_out_by_template", f"the chat template leaves out {', '.join(fields)}")
        return messages, text

    def _outcome(self, messages: list[Message], tools: Tools, with_generation_prompt: bool) -> str | TemplateRefused:
        try:
            return self.template.render(messages, tools, with_generation_prompt)
        except TemplateRefused as refusal:
            return refusal

    def _judge(
        self, messages: list[Message], tools: Tools, with_generation_prompt: bool, outcome: str | TemplateRefused
    ) -> tuple[str, str | None]:
        """The text, and what is wrong with it in words."""
        if isinstance(outcome, TemplateRefused):
            roles = ", ".join(message["role"] for message in messages) or "none"
            return "", f"the chat template refused messages with roles {roles}: {outcome}"
        omitted = self._find_omissions(messages, tools, with_generation_prompt, outcome).roles
        texts = [message for message in messages if message["role"] in omitted and _text_of(message).strip()]
        if texts:
            roles = ", ".join(sorted({message["role"] for message in texts}))
            return outcome, f"the chat template leaves out messages of role {roles}"
        return outcome, None

    def _find_omissions(
        self, messages: list[Message], tools: Tools, with_generation_prompt: bool, text: str
    ) -> Omissions:
        shape = (bool(tools), with_generation_prompt, *[(message["role"], *message) for message in messages])
        if shape not in self._omissions:
            self._omissions[shape] = Omissions(
                self._omitted_roles(messages, tools, with_generation_prompt, text),
                tuple(self._omitted_fields(messages, tools, with_generation_prompt, text)),
            )
        return self._omissions[shape]

    def _omitted_roles(
        self, messages: list[Message], tools: Tools, with_generation_prompt: bool, text: str
    ) -> tuple[str, ...]:
        """Found by putting a word of its own in the place of each text, the assistant's apart."""
        word = word_not_in(text)
        words = {index: f"{word}{index}x" for index, message in enumerate(messages) if message["role"] != "assistant"}
        marked = [
            {**message, "content": words[index]} if index in words and "content" in message else message
            for index, message in enumerate(messages)
        ]
        try:
            shown = self.template.render(marked, tools, with_generation_prompt)
        except TemplateRefused:  # it reads more into a text than that it is one
            return ()
        return tuple({messages[index]["role"] for index, own in words.items() if own not in shown})

    def _omitted_fields(
        self, messages: list[Message], tools: Tools, with_generation_prompt: bool, text: str
    ) -> Iterable[str]:
        """Found by leaving the field out: the text is the same."""
        without_calls = [_without(message, ("tool_calls",)) for message in messages]
        for field, is_present, rest in (
            ("tools", bool(tools), (messages, None)),
            ("tool_calls", without_calls != messages, (without_calls, tools)),
        ):
            try:
                if is_present and self.template.render(*rest, with_generation_prompt) == text:
                    yield field
            except TemplateRefused:  # so the template reads the field
                continue


def with_system_in_first_user(messages: list[Message]) -> list[Message] | None:
    """Messages without system roles, their texts put before the first user message; null where either is missing.

    >>> with_system_in_first_user([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    [{'role': 'user', 'content': 'Be brief.\\n\\n2+2?'}]
    """
    system = [_text_of(message) for message in messages if message["role"] in SYSTEM_ROLES]
    rest = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    first = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if not system or first is None:
        return None
    text = "\n\n".join([*filter(str.strip, system), _text_of(rest[first])])
    return [*rest[:first], {**rest[first], "content": text}, *rest[first + 1 :]]


def word_not_in(text: str) -> str:
    """A word of letters, which no template escapes, that a text does not hold."""
    word = "probe"
    while word in text:
        word += "q"
    return word


def _text_of(message: Message) -> str:
    return message.get("content") or ""


def _without(message: Message, fields: tuple[str, ...]) -> Message:
    return {name: value for name, value in message.items() if name not in fields}
