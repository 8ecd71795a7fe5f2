"""Conversations as the tokens of a model that scores: its own tokenizer, its own chat template.

Text that spells one of the model's special tokens would end a turn or begin one. It gets a space inside, so that what a
completion says never becomes structure; the row's status says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_core.data.encoding import Encoder, pattern_of
from rft_core.data.prompts import load_tokenizer
from rft_core.data.templates import ChatTemplate, TemplateRefused, with_system_in_first_user
from rft_core.errors import SettingsError
from rft_core.rewards.model_rows import TAKEN_APART, NotScorable
from rft_core.rewards.model_settings import ScoringModelSettings

NO_LIMIT = 1 << 30  # what tokenizers name as their limit when they know none is beyond this


class ModelText:
    """`section` names the settings in messages. `separator` must not be spelled by a text either.

    Raises ModelUnreadable for a folder without a tokenizer, SettingsError when there is no template to render by.
    """

    def __init__(
        self, folder: Path, settings: ScoringModelSettings, template: str | None, section: str, separator: str = ""
    ) -> None:
        self._settings, self._section = settings, section
        self._tokenizer = load_tokenizer(folder, template)
        self.encoder = Encoder(self._tokenizer)
        has_template = self._tokenizer.chat_template is not None
        if settings.render == "chat" and not has_template:
            raise SettingsError(
                f"{section}.render is chat, but the model in {folder} has no chat template: set "
                f"{section}.chat_template to a Jinja file, or render to plain"
            )
        self.is_chat = has_template and settings.render != "plain"
        self._template = ChatTemplate(self._tokenizer) if self.is_chat else None
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        spelled = separator.strip() if len(separator.strip()) > 1 else ""  # one character is a part of any text
        self._special = tuple(special)
        self._control = pattern_of({*special, *self._tokenizer.all_special_tokens, spelled})
        self.pad_token_id: int | None = self._tokenizer.pad_token_id
        first = {self._tokenizer.bos_token_id, self._tokenizer.cls_token_id} - {None}
        self._is_first = first.__contains__

    def conversation(
        self, messages: list[dict[str, Any]], append_eos: bool = False, to_stop_token: bool = False
    ) -> tuple[list[int], str | None]:
        """(ids, note) of a whole conversation, which ends with the completion; with `to_stop_token` without the white
        space that a template writes behind the last turn's stop token. Raises NotScorable."""
        safe, note = self._safe(messages)
        if self._template is not None:
            text = self._rendered(self._template, safe, with_generation_prompt=False)
            is_ended = to_stop_token and text.rstrip().endswith(self._special)
            return self.encoder.encode(text.rstrip() if is_ended else text), note
        *prompt, completion = safe
        end = (self._tokenizer.eos_token or "") if append_eos else ""
        text = self._joined(prompt) + (completion.get("content") or "") + end
        return self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"], note

    def prompt(self, messages: list[dict[str, Any]], add_bos: bool) -> tuple[list[int], str | None]:
        """(ids, note) of what a completion follows. Raises NotScorable."""
        safe, note = self._safe(messages)
        if self._template is not None:
            return self.encoder.encode(self._rendered(self._template, safe, with_generation_prompt=True)), note
        ids = self.encoder.begin(self._joined(safe)).ids
        bos = self._tokenizer.bos_token_id
        return ([bos, *ids] if add_bos and bos is not None and ids[:1] != [bos] else ids), note

    def harmless(self, text: str) -> str:
        """The text without special tokens and separators. Raises NotScorable when they stay."""
        if self._control is None or self._control.search(text) is None:
            return text
        text = self._control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        if found := self._control.search(text):
            raise NotScorable(f"the text must not spell a special token of the model, found {found[0]!r}")
        return text

    def fit(self, ids: list[int], limit: int | None) -> tuple[list[int], int]:
        """(ids, how many were cut) within the limit, by the recipe's rule. Raises NotScorable."""
        if not ids:
            raise NotScorable("the conversation has no tokens")
        limit = self._settings.max_tokens or limit
        if limit is None or len(ids) <= limit:
            return ids, 0
        if self._settings.too_long == "unscored":
            raise NotScorable(
                f"{len(ids)} tokens as the model sees them, at most {limit} are scored ({self._section}.max_tokens)"
            )
        kept = ids[len(ids) - limit :]
        if self._is_first(ids[0]) and limit > 1:
            kept = [ids[0], *kept[1:]]
        return kept, len(ids) - limit

    def limit(self, config: Any) -> int | None:
        """Most tokens that model and tokenizer allow; null where neither says."""
        text_config = config.get_text_config()
        named = [getattr(text_config, "max_position_embeddings", None), self._tokenizer.model_max_length]
        return min((count for count in named if count and 0 < count < NO_LIMIT), default=None)

    def _safe(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        safe = [
            {**message, "content": self.harmless(message["content"])} if message.get("content") else message
            for message in messages
        ]
        return safe, TAKEN_APART if safe != messages else None

    def _joined(self, messages: list[dict[str, Any]]) -> str:
        return "\n".join(message.get("content") or "" for message in messages) + self._settings.after_prompt

    def _rendered(self, template: ChatTemplate, messages: list[dict[str, Any]], with_generation_prompt: bool) -> str:
        try:
            return template.render(messages, None, with_generation_prompt)
        except TemplateRefused as refusal:
            moved = with_system_in_first_user(messages)
            if moved is None:
                raise _refused(messages, refusal) from None
        try:
            return template.render(moved, None, with_generation_prompt)
        except TemplateRefused as refusal:
            raise _refused(messages, refusal) from None


def _refused(messages: Sequence[dict[str, Any]], refusal: TemplateRefused) -> NotScorable:
    roles = ", ".join(message["role"] for message in messages)
    return NotScorable(f"the model's chat template refused messages with roles {roles}: {refusal}")
