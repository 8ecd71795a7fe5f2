"""Completions from servers that share the work: one request per row, so that each row has a seed of its own."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from rft_core.engines import Completion, Request, Sampling
from rft_core.engines.vllm.connection import (
    CONNECT_SECONDS,
    WORTH_A_RETRY,
    Connection,
    ServerGone,
    delays,
    describe,
    said,
)
from rft_core.errors import SettingsError

Note = Callable[[str], None]

# Whatever the server's own defaults are: a model folder's generation config may hold a repetition penalty.
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass
class Job:
    """Rows to be made, by their place among the requests; what is made of them; who made which."""

    waiting: deque[tuple[int, Request]]
    sampling: Sampling
    stop_token_ids: list[int]
    salt: str  # of the prefix cache: what another policy computed is never reused
    made: dict[int, Completion] = field(default_factory=dict)
    maker: dict[int, Connection] = field(default_factory=dict)
    gone: dict[Connection, str] = field(default_factory=dict)  # servers that gave up, with the reason
    noted: set[str] = field(default_factory=set)  # reasons that were told once


async def complete(job: Job, models: dict[Connection, str], note: Note, report: Callable[[int], None]) -> None:
    """Work on the rows that wait until there are none or every server is gone. `models` names what to ask each for."""
    try:
        async with AsyncExitStack() as opened, asyncio.TaskGroup() as group:
            for connection, model in models.items():
                workers = min(connection.settings.concurrency, len(job.waiting))
                client = await opened.enter_async_context(_client(connection, workers))
                for _ in range(workers):
                    group.create_task(_work(job, connection, client, model, note, report))
    except BaseExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None


def _client(connection: Connection, workers: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=workers, max_keepalive_connections=workers),
        timeout=httpx.Timeout(connection.settings.timeout_seconds, connect=CONNECT_SECONDS, pool=None),
        headers={**connection.headers, "Content-Type": "application/json"},
    )


async def _work(
    job: Job,
    connection: Connection,
    client: httpx.AsyncClient,
    model: str,
    note: Note,
    report: Callable[[int], None],
) -> None:
    while job.waiting and connection not in job.gone:
        index, request = job.waiting.popleft()
        body = orjson.dumps({"model": model, **row_body(request, job.sampling, job.stop_token_ids, job.salt)})
        try:
            made, detail = await _row(connection, client, body)
        except BaseException as error:
            job.waiting.append((index, request))
            if not isinstance(error, ServerGone):
                raise
            job.gone.setdefault(connection, str(error))
            return
        if detail and made.error_reason not in job.noted:
            job.noted.add(made.error_reason or "")
            note(f"vllm: a row failed with {made.error_reason}: {detail}")
        job.made[index], job.maker[index] = made, connection
        report(len(job.made))


def row_body(request: Request, sampling: Sampling, stop_token_ids: list[int], salt: str) -> dict[str, Any]:
    """A row's request, the model's name left out."""
    shape = {"temperature": sampling.temperature}
    if not sampling.is_greedy:
        shape |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
    return {
        "prompt": list(request.prompt_token_ids),
        "max_tokens": sampling.max_completion_tokens,
        **shape,
        **PLAIN,
        "seed": request.seed,
        "stop_token_ids": stop_token_ids,
        "logprobs": 0,  # of the sampled token and no other
        "return_token_ids": True,
        "add_special_tokens": False,
        "cache_salt": salt,
    }


async def _row(connection: Connection, client: httpx.AsyncClient, body: bytes) -> tuple[Completion, str | None]:
    """(what became of a row, the details of a failure). Raises ServerGone when it is not the row that fails."""
    reason, detail = "server_error", ""
    for delay in delays(connection.settings):
        await asyncio.sleep(delay)
        try:
            async with asyncio.timeout(connection.settings.timeout_seconds):
                answer = await client.post(f"{connection.url}/v1/completions", content=body)
        except (TimeoutError, httpx.TimeoutException):
            reason, detail = "server_timeout", f"no reply within {connection.settings.timeout_seconds:g} s"
            continue
        except httpx.TransportError as error:
            reason, detail = "server_error", describe(error)
            continue
        if answer.is_success:
            try:
                return read_completion(answer.content), None
            except ValueError as error:
                reason, detail = "unreadable_reply", str(error)
                continue
        detail = f"status {answer.status_code}, {said(answer.text)}"
        if answer.status_code == 404:  # it was restarted, and knows the adapter no more
            raise ServerGone(f"{connection.url} does not serve the policy: {detail}")
        if answer.status_code < 500 and answer.status_code not in WORTH_A_RETRY:
            return Completion.failed("server_refused"), detail
        reason = "server_error"
    if not await _is_healthy(connection, client):
        raise ServerGone(f"{connection.url} gave no answer: {detail}")
    return Completion.failed(reason), detail


async def _is_healthy(connection: Connection, client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get(f"{connection.url}/health", timeout=CONNECT_SECONDS)).status_code == 200
    except httpx.HTTPError:
        return False


def read_completion(content: bytes) -> Completion:
    """As completion_of, of an answer's bytes."""
    try:
        body = orjson.loads(content)
    except ValueError as error:
        raise ValueError(f"what came is no JSON: {content[:120]!r}") from error
    return completion_of(body)


def completion_of(body: Any) -> Completion:
    """Raises ValueError for what is no whole completion, SettingsError for a server that gives no token ids."""
    try:
        choice = body["choices"][0]
        token_ids, finish_reason = choice["token_ids"], choice["finish_reason"]
        logprobs = choice["logprobs"]["token_logprobs"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"what came is no completion ({type(error).__name__}: {error})") from error
    if token_ids is None:
        raise SettingsError("a vLLM server must give token ids (return_token_ids), found none: take vLLM 0.12 or newer")
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"finish_reason must be stop or length, got {finish_reason!r}")
    if len(logprobs) != len(token_ids):
        raise ValueError(f"a completion must have a logprob for each token, got {len(logprobs)} for {len(token_ids)}")
    return Completion(token_ids, [math.nan if value is None else value for value in logprobs], finish_reason)
