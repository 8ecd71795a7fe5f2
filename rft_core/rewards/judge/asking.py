"""Questions -> verdicts: each distinct question once, from the kept replies where they have it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from data_contracts.refs import digest_of
from rft_core.rewards.event_loop import wait_for
from rft_core.rewards.judge.client import Endpoint, NoCompletion
from rft_core.rewards.judge.prompts import Question, repaired
from rft_core.rewards.judge.replies import UnreadableReply, read_reply
from rft_core.rewards.judge_settings import JudgeSettings
from rft_core.rewards.rows import shortened
from rft_core.settings import secret

RAW_CHARACTERS = 160  # of a reply that could not be read, in the reason


class ReplyCache(Protocol):
    """Replies by what was asked. What can't be read any more counts as absent."""

    def get(self, key: str) -> str | None: ...
    def put(self, key: str, text: str) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """What the judge said, or null and `reason` says why; with a value `reason` holds the judge's own words.

    The counts are of all requests that it took, also for a kept reply, so that no table depends on what was kept; null
    where the endpoint did not say.
    """

    value: Any
    reason: str | None
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    fault: Literal["unanswered", "refused", "unreadable"] | None = None


class Judge:
    """A model at an endpoint, with the replies that it gave before."""

    def __init__(self, settings: JudgeSettings, replies: ReplyCache | None) -> None:
        self.settings = settings
        self.replies = replies
        self._sends_schema = settings.reply_schema == "auto"

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """In order. A question that occurs again costs nothing. Raises SettingsError, StorageUnavailable."""
        keys = [self._key(question) for question in questions]
        found: dict[str, Verdict] = {}
        missing: dict[str, Question] = {}
        for key, question in zip(keys, questions, strict=True):
            if key not in found and key not in missing:
                kept = self._kept(key, question)
                if kept is None:
                    missing[key] = question
                else:
                    found[key] = kept
        if missing:
            found |= wait_for(self._ask_missing(missing))
        verdicts = []
        for key in keys:
            verdicts.append(found[key])
            found[key] = replace(found[key], prompt_tokens=0, completion_tokens=0)
        return verdicts

    def _key(self, question: Question) -> str:
        settings = self.settings
        return digest_of(
            {
                "model": settings.model,
                "messages": question.messages,
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "extra_body": settings.extra_body,
                "schema": question.form.schema if settings.reply_schema == "auto" else None,
            }
        )

    def _kept(self, key: str, question: Question) -> Verdict | None:
        text = self.replies.get(key) if self.replies is not None else None
        if text is None:
            return None
        try:
            reply, *counts = json.loads(text)
            return Verdict(*read_reply(reply, question.form, question.candidates), *counts)
        except (ValueError, TypeError, UnreadableReply):
            return None

    async def _ask_missing(self, missing: dict[str, Question]) -> dict[str, Verdict]:
        verdicts: dict[str, Verdict] = {}
        waiting = iter(missing.items())
        async with Endpoint(self.settings, api_key(self.settings), self._sends_schema) as endpoint:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.settings.concurrency, len(missing))):
                        group.create_task(self._work(endpoint, waiting, verdicts))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                self._sends_schema = endpoint.sends_schema
        return verdicts

    async def _work(
        self, endpoint: Endpoint, waiting: Iterator[tuple[str, Question]], verdicts: dict[str, Verdict]
    ) -> None:
        for key, question in waiting:
            verdict, text = await self._verdict(endpoint, question)
            verdicts[key] = verdict
            if self.replies is not None and text is not None:
                kept = json.dumps([text, verdict.prompt_tokens, verdict.completion_tokens])
                await asyncio.to_thread(self.replies.put, key, kept)  # the disk must not hold up the other requests

    async def _verdict(self, endpoint: Endpoint, question: Question) -> tuple[Verdict, str | None]:
        """With the reply that could be read."""
        prompt_tokens: int | None = 0
        completion_tokens: int | None = 0
        messages, why = question.messages, ""
        for _ in range(2 if self.settings.repair else 1):
            reply = await endpoint.complete(messages, question.form.schema)
            if isinstance(reply, NoCompletion):
                reason = "; ".join(filter(None, (why, reply.reason)))
                return Verdict(None, reason, prompt_tokens, completion_tokens, fault=reply.kind), None
            prompt_tokens = _sum(prompt_tokens, reply.prompt_tokens)
            completion_tokens = _sum(completion_tokens, reply.completion_tokens)
            try:
                value, words = read_reply(reply.text, question.form, question.candidates)
            except UnreadableReply as error:
                messages = repaired(question, reply.text, str(error))
                note = f" ({reply.note})" if reply.note else ""
                why = f"the judge's reply {error}{note}: {shortened(reply.text or '', RAW_CHARACTERS)!r}"
            else:
                return Verdict(value, words, prompt_tokens, completion_tokens), reply.text
        return Verdict(None, why, prompt_tokens, completion_tokens, fault="unreadable"), None


def api_key(settings: JudgeSettings) -> str | None:
    """Raises SettingsError where the variable is not set."""
    return secret(settings.api_key_env, "judge.api_key_env")


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
