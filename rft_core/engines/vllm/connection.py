"""One vLLM server over HTTP, for everything but completions: health, weights, sleep, and logprobs of given tokens.

Only endpoints of vLLM's own documentation are used. Those for weights need VLLM_SERVER_DEV_MODE=1, and for adapters
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, in the server's environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from rft_core.vllm_settings import VllmSettings

WORTH_A_RETRY = frozenset({408, 409, 425, 429})
INTERNAL_ERROR = 500  # of a call, again and again; a server that is starting or ending says 502 or 503
MAX_BACKOFF_SECONDS = 60.0
CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 10.0
SAID_CHARACTERS = 300


class ServerGone(Exception):
    """No answer after all retries. Says which server and why."""


class Refused(Exception):
    """An answer that another try will not change."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"status {status}, {said}" if said else f"status {status}")
        self.status = status


class Connection:
    """`key` goes into each request and into no message."""

    def __init__(self, url: str, key: str | None, settings: VllmSettings) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.settings = settings

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", headers=self.headers, timeout=HEALTH_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def version(self) -> str | None:
        """None where the server does not say."""
        try:
            return str(self._call("GET", "/version")["version"])
        except (Refused, KeyError, TypeError):
            return None

    def base_model(self) -> str:
        """The name of the model that it was started with; adapters have a parent."""
        models = self._call("GET", "/v1/models")["data"]
        return str(next(model["id"] for model in models if model.get("parent") is None))

    def load_weights(self, folder: Path) -> None:
        """In place, with nothing at work and nothing cached. Raises Refused, ServerGone."""
        self._call("POST", "/pause?mode=abort", may_lack=True)
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._call("POST", "/collective_rpc", body)
            self._call("POST", "/reset_prefix_cache")
        finally:
            self._call("POST", "/resume", may_lack=True)

    def load_adapter(self, name: str, folder: Path) -> None:
        try:
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except Refused as refused:
            if "already been loaded" not in str(refused):  # by a try whose answer was lost
                raise

    def unload_adapter(self, name: str) -> None:
        """Also one that is not there."""
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as refused:
            if refused.status not in (400, 404):
                raise

    def sleep(self, level: int) -> None:
        """Free the GPU: level 1 keeps the weights in main memory, level 2 nowhere."""
        self._call("POST", f"/sleep?level={level}")

    def wake(self, *tags: str) -> None:
        self._call("POST", "/wake_up" + ("?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""))

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        """Of all tokens but the first, at temperature 1; NaN where it tells none. Raises Refused."""
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self.complete(body)
        try:
            told = answer["choices"][0]["prompt_logprobs"][1:]
            return [_logprob_of(one, token_id) for one, token_id in zip(told, token_ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(200, f"no prompt_logprobs of {len(token_ids)} tokens") from error

    def complete(self, body: dict[str, Any]) -> Any:
        return self._call("POST", "/v1/completions", body)

    def _call(self, method: str, path: str, body: Any = None, may_lack: bool = False) -> Any:
        """The JSON of the answer, None where it is none. With `may_lack` a server that has no such path is fine."""
        reason, status = "", None
        for delay in delays(self.settings):
            time.sleep(delay)
            try:
                answer = httpx.request(
                    method, self.url + path, json=body, headers=self.headers, timeout=self.settings.timeout_seconds
                )
            except httpx.TransportError as error:
                reason, status = describe(error), None
                continue
            if answer.is_success:
                try:
                    return answer.json() if answer.content else None
                except ValueError:
                    reason = f"no JSON: {said(answer.text)!r}"
                    continue
            if answer.status_code == 404 and may_lack:
                return None
            if answer.status_code < 500 and answer.status_code not in WORTH_A_RETRY:
                raise Refused(answer.status_code, said(answer.text))
            status, reason = answer.status_code, f"status {answer.status_code}, {said(answer.text)}"
        if status == INTERNAL_ERROR and self.is_healthy():
            raise Refused(status, reason.partition(", ")[2])
        raise ServerGone(f"{self.url}{path.partition('?')[0]} gave no answer: {reason}")


def delays(settings: VllmSettings) -> Iterator[float]:
    """Seconds before each try; the first is at once."""
    yield 0.0
    for attempt in range(settings.retries):
        yield min(settings.backoff_seconds * 2**attempt, MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1.0)


def said(text: str) -> str:
    """The message of an error's body, in one short line."""
    try:
        body = httpx.Response(200, text=text).json()
    except ValueError:
        body = None
    fault = body.get("error", body) if isinstance(body, dict) else text
    message = fault.get("message") if isinstance(fault, dict) else fault
    line = " ".join(str(message or text).split())
    return line if len(line) <= SAID_CHARACTERS else line[: SAID_CHARACTERS - 3] + "..."


def describe(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _logprob_of(told: dict[str, dict[str, float]] | None, token_id: int) -> float:
    entry = (told or {}).get(str(token_id))
    value = entry.get("logprob") if entry else None
    return float("nan") if value is None else float(value)
