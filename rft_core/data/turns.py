"""The text of each turn of the assistant in a conversation, and the prompt that the model sees before it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rft_core.data.encoding import Encoder, pattern_of, squeezed
from rft_core.data.examples import Message
from rft_core.data.faults import Faults, Rejected
from rft_core.data.templates import REASONING_FIELDS, Template, TemplateRefused, Tools, word_not_in


class StopTokens:
    """The tokens that end a turn: the tokenizer's EOS, those that the model folder names, and the template's own.

    A pad token among those of the model folder is none, unless it is the EOS or the template's: no turn ends with it.
    `is_written` says whether the template writes one after a turn.
    """

    def __init__(self, encoder: Encoder, template: Template, given: frozenset[int]) -> None:
        tokenizer = encoder.tokenizer
        after = _text_after_a_turn(template).lstrip()
        own = {tokenizer.eos_token_id}
        if encoder.special is not None and (found := encoder.special.match(after)):
            own.add(tokenizer.convert_tokens_to_ids(found.group()))
        ids = own | (given - {tokenizer.pad_token_id})
        self.texts = {token_id: text for token_id, text in encoder.added.items() if token_id in ids}
        self.pattern = pattern_of(set(self.texts.values())) or re.compile("(?!)")
        self.is_written = self.pattern.match(after) is not None
        one = f"(?:{self.pattern.pattern})"
        self._at_end = re.compile(rf"{one}(?:\s*{one})*\s*\Z")

    def split(self, text: str) -> tuple[str, list[str]]:
        """A text without the stop tokens that it spells at its end, and those."""
        found = self._at_end.search(text)
        return (text[: found.start()], self.pattern.findall(found.group())) if found else (text, [])


@dataclass(frozen=True)
class Conversation:
    """Messages that the template shows. `faults` are met on the way; `whole` is the rendering of all messages.

    `may_be_silent`: a turn without a word is what the policy did, and not a hole in the data.
    """

    template: Template
    encoder: Encoder
    stops: StopTokens
    messages: list[Message]
    tools: Tools
    faults: Faults
    whole: str
    may_be_silent: bool = False

    def prompt(self, index: int) -> str:
        """What the model sees before it writes message `index`."""
        return self._rendered(self.messages[:index], with_generation_prompt=True)

    def turn(self, index: int, prompt: str) -> str:
        """What the model writes as message `index` after the prompt, up to and with the first stop token.

        Raises Rejected: missing_eos, no_trained_token, mask_not_exact.
        """
        message = self.messages[index]
        shown, content = self._shown(index, prompt)
        body, _ = self.stops.split(content)
        reasoning = next((message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)), "")
        if squeezed(reasoning) not in squeezed(shown):
            self._meet_once("left_out_by_template", "the chat template leaves out reasoning")
        found = self.stops.pattern.search(shown)
        own = shown if found is None else shown[: found.start()]
        is_silent = self.may_be_silent and not (body.strip() or reasoning or message.get("tool_calls"))
        if not own.strip() and not is_silent:
            self.faults.meet("no_trained_token", f"message {index} must say something, found its stop token alone")
        if found is None:
            return self._with_stop_token(shown, body)
        if squeezed(body) not in squeezed(own):
            raise Rejected("mask_not_exact", f"a turn must not spell the stop token {found.group()} before its end")
        if shown.startswith(found.group(), found.end()):
            self._meet_once("doubled_eos", f"the chat template writes {found.group()} twice after a turn")
        return shown[: found.end()]

    def _shown(self, index: int, prompt: str) -> tuple[str, str]:
        """What the template adds to the prompt for message `index`, and the message's text within.

        Where it rewrites the turn itself (drops the reasoning of the last turn too, or begins the turn within the
        generation prompt), the model writes what was given, in the place where the template puts a plain word.
        """
        message = self.messages[index]
        content = message.get("content") or ""
        full = self.whole if index + 1 == len(self.messages) else self._rendered(self.messages[: index + 1])
        if full.startswith(prompt):
            shown = full[len(prompt) :]
            if content in shown or squeezed(content) in squeezed(shown):
                return shown, content
        word = word_not_in(full + prompt)
        plain = self._rendered([*self.messages[:index], {**message, "content": word}])
        before, _, after = plain.partition(word)
        begun = prompt[len(before) :]
        if plain.count(word) != 1 or message.get("tool_calls") or not prompt.startswith(before):
            raise Rejected(
                "mask_not_exact", f"the chat template must show message {index} as it is, after the generation prompt"
            )
        if not content.startswith(begun):
            raise Rejected(
                "mask_not_exact", f"message {index} must begin with {begun!r}, as the generation prompt ends"
            )
        return content[len(begun) :] + after, content[len(begun) :]

    def _with_stop_token(self, shown: str, body: str) -> str:
        eos = self.encoder.eos_token
        detail = f"a trained turn must end with a stop token, found {shown[-20:]!r}"
        if eos is None:
            raise Rejected("missing_eos", f"{detail}, and the tokenizer has no EOS token")
        self._meet_once("missing_eos", detail)
        end = shown.rfind(body) + len(body) if body and body in shown else len(shown.rstrip())
        return shown[:end] + eos

    def _meet_once(self, reason: str, detail: str) -> None:
        """What every turn of a conversation has is one fault of its row."""
        if all(fault.reason != reason for fault in self.faults.found):
            self.faults.meet(reason, detail)

    def _rendered(self, messages: list[Message], with_generation_prompt: bool = False) -> str:
        try:
            text = self.template.render(messages, self.tools, with_generation_prompt)
        except TemplateRefused as refusal:
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise Rejected(
                "template_refused", f"the chat template refused {roles} at the beginning: {refusal}"
            ) from None
        return self.encoder.with_one_bos(text)


def _text_after_a_turn(template: Template) -> str:
    """Empty where the template refuses a plain conversation."""
    word = word_not_in("")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]
    for messages in (turns, [{"role": "system", "content": "a"}, *turns]):
        try:
            return template.render(messages, None, False).partition(word)[2]
        except TemplateRefused:
            continue
    return ""
