"""One endpoint: requests with retries, and what they cost. All use of the `openai` package is here.

Texts that come from the endpoint are cleaned of the key and of its address before anyone sees them.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from rft_core.errors import SettingsError
from rft_core.rewards.judge_settings import JudgeSettings
from rft_core.rewards.rows import shortened, valid_text

NO_CLIENT = "reward judge needs the package openai: pip install 'rft-pipeline[judge]', or pip install openai"
MISTAKES = {
    401: "judge.api_key_env must name a variable with a key that the endpoint accepts",
    403: "the key of judge.api_key_env must be allowed to use judge.model",
    404: "judge.model must be a model of the endpoint, and judge.url its address, which ends mostly in /v1",
}
NO_SUCH_MODEL = frozenset({"model_not_found", "invalid_model"})
FORM_REFUSED = frozenset({400, 422})
WORTH_A_RETRY = frozenset({408, 409, 425, 429})
MAX_BACKOFF_SECONDS = 60.0
MAX_WAIT_SECONDS = 120.0  # of a Retry-After; an endpoint that wants more is as good as down
SECRET_CHARACTERS = 8  # shorter "keys" stand in where a server wants none, and may occur in any text
GIVE_UP_AFTER = 8  # questions in a row without any answer: those that still wait are not asked


@dataclass(frozen=True)
class Completion:
    """Null text: the endpoint gave none. Null counts: it did not say."""

    text: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    note: str | None = None  # why the text may be cut or missing


@dataclass(frozen=True)
class NoCompletion:
    """unanswered: it may answer later. refused: this request never."""

    kind: Literal["unanswered", "refused"]
    reason: str


@dataclass(frozen=True)
class _Failure:
    """Of one attempt."""

    reason: str
    status: int | None = None  # null: no whole response
    wait_seconds: float | None = None
    is_mistake: bool = False


def check_client() -> None:
    """Raise SettingsError where the package is missing."""
    import importlib.util

    if importlib.util.find_spec("openai") is None:
        raise SettingsError(NO_CLIENT)


class Endpoint:
    """Used in one event loop, as an async context. `sends_schema` is false from a refusal on."""

    def __init__(self, settings: JudgeSettings, key: str | None, sends_schema: bool) -> None:
        import openai

        self.settings = settings
        self.sends_schema = sends_schema
        self._openai = openai
        self._key = key
        self._client = openai.AsyncOpenAI(
            base_url=settings.url,
            api_key=key or "none",
            max_retries=0,
            timeout=settings.timeout_seconds,
        )
        self._resume_at = 0.0  # by the loop's clock: until then the endpoint wants no request
        self._given_up = 0  # questions in a row without an answer
        self._last_reason = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def complete(self, messages: list[dict[str, str]], schema: dict[str, Any]) -> Completion | NoCompletion:
        """Raises SettingsError for what no retry and no other row would mend."""
        failure, attempts = None, 0
        while attempts <= self.settings.retries:
            if self._given_up >= GIVE_UP_AFTER:
                return NoCompletion("unanswered", f"not asked any more after {GIVE_UP_AFTER}: {self._last_reason}")
            await self._wait(failure, attempts)
            attempts += 1
            found = await self._attempt(messages, schema)
            if isinstance(found, Completion):
                self._given_up = 0
                return found
            failure = found
            if failure.is_mistake:
                raise SettingsError(failure.reason)
            if failure.status is not None and failure.status not in WORTH_A_RETRY and failure.status < 500:
                return NoCompletion("refused", f"the judge refused the request: {failure.reason}")
            if (failure.wait_seconds or 0) > MAX_WAIT_SECONDS:
                break
        assert failure is not None, "there is at least one attempt"
        self._given_up += 1
        self._last_reason = f"the judge gave no answer in {attempts} attempt{'s'[: attempts > 1]}: {failure.reason}"
        return NoCompletion("unanswered", self._last_reason)

    async def _wait(self, failure: _Failure | None, attempts: int) -> None:
        loop = asyncio.get_running_loop()
        delay = 0.0
        if failure is not None:
            backoff = min(self.settings.backoff_seconds * 2 ** (attempts - 1), MAX_BACKOFF_SECONDS)
            delay = backoff * random.uniform(0.5, 1.0)
            if failure.wait_seconds is not None:
                delay += failure.wait_seconds
                self._resume_at = max(self._resume_at, loop.time() + failure.wait_seconds)
        await asyncio.sleep(max(delay, self._resume_at - loop.time(), 0.0))

    async def _attempt(self, messages: list[dict[str, str]], schema: dict[str, Any]) -> Completion | _Failure:
        """With the schema where it may be sent; without it at once where the endpoint refuses it."""
        if not self.sends_schema:
            return await self._request(messages, None)
        found = await self._request(messages, schema)
        if isinstance(found, _Failure) and found.status in FORM_REFUSED and not found.is_mistake:
            plain = await self._request(messages, None)
            if isinstance(plain, Completion):
                self.sends_schema = False
            return plain
        return found

    async def _request(self, messages: list[dict[str, str]], schema: dict[str, Any] | None) -> Completion | _Failure:
        openai = self._openai
        body: dict[str, Any] = {"model": self.settings.model, "messages": messages}
        body |= {
            name: value for name in ("temperature", "max_tokens") if (value := getattr(self.settings, name)) is not None
        }
        if schema is not None:
            form = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):  # the client's own is from byte to byte
                raw = await self._client.chat.completions.with_raw_response.create(
                    **body, extra_body=self.settings.extra_body or None
                )
            return self._completion(raw.http_response.text)
        except (TimeoutError, openai.APITimeoutError):
            return _Failure(f"no reply within {self.settings.timeout_seconds:g} s")
        except openai.APIStatusError as error:
            return self._refusal(error.status_code, error.response.headers, error.response.text)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            return _Failure(self._clean(f"the connection failed ({type(cause).__name__}: {cause})", 200))

    def _completion(self, text: str) -> Completion | _Failure:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
            return _Failure(f"what came is no chat completion: {self._clean(text, 120)!r}")
        choice = body["choices"][0] if body["choices"] and isinstance(body["choices"][0], dict) else {}
        message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
        content, usage = message.get("content"), body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counts = [_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        note = None
        if choice.get("finish_reason") in ("length", "content_filter"):
            note = f"finish_reason {choice['finish_reason']}"
        elif isinstance(message.get("refusal"), str):
            note = self._clean(f"refusal: {message['refusal']}", 120)
        answer = valid_text(self._without_key(content)) if isinstance(content, str) else None
        return Completion(answer, *counts, note)

    def _refusal(self, status: int, headers: Mapping[str, str], text: str) -> _Failure:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = None
        fault = body.get("error", body) if isinstance(body, dict) else text
        said = fault.get("message") if isinstance(fault, dict) else fault
        said = self._clean(said if isinstance(said, str) else text, 200).strip()
        reason = f"status {status}" + (f", {said}" if said else "")
        code, field = (fault.get("code"), fault.get("param")) if isinstance(fault, dict) else (None, None)
        is_model = status in FORM_REFUSED and (str(code) in NO_SUCH_MODEL or field == "model")
        mistake = MISTAKES.get(404 if is_model else status)
        if mistake is not None:
            sentence = f"{mistake} (the model is {self.settings.model!r}); the endpoint says: {reason}"
            return _Failure(sentence, status, is_mistake=True)
        return _Failure(reason, status, retry_after(headers))

    def _clean(self, text: str, limit: int) -> str:
        """For tables, which hold no addresses."""
        place = urlsplit(self.settings.url or "").netloc
        return shortened(self._without_key(text).replace(place, "[judge]"), limit)

    def _without_key(self, text: str) -> str:
        is_secret = self._key is not None and len(self._key) >= SECRET_CHARACTERS
        return text.replace(self._key or "", "[key]") if is_secret else text


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after` (seconds or a date); null where neither can be read.

    >>> retry_after({"retry-after": "2.5"}), retry_after({"retry-after": "soon"})
    (2.5, None)
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * unit
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
