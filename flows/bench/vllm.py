"""What our engine adds to vLLM: the same requests to the same server, by the engine and by a bare HTTP client.

Needs the model smollm2-135m below the artifact root, and an interpreter that has vllm: RFT_VLLM_PYTHON, else this one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft_core.config import ModelSettings, RolloutSettings
from rft_core.engines import ENGINES, Request, Sampling, Workplace, check_engine
from rft_core.errors import SettingsError
from rft_core.model_folder import resolve_model_path

MODEL = "smollm2-135m"
PROMPTS, GROUP_SIZE, TOKENS = 8, 8, 64
REPEATS = 5
QUESTION = "What is {number} + 17? Reply with only the number."


def run(root: Path) -> list[dict[str, Any]]:
    """Rows of `rft bench`; a single one without a figure where there is no vllm."""
    rollout = RolloutSettings(engine="vllm", vllm={"python": os.environ.get("RFT_VLLM_PYTHON")})
    try:
        check_engine(rollout)
    except SettingsError as missing:
        return [_row(f"not measured: {missing}", None, None, "")]
    with tempfile.TemporaryDirectory() as folder:
        return _measure(root, rollout, Path(folder))


def _measure(root: Path, rollout: RolloutSettings, folder: Path) -> list[dict[str, Any]]:
    from rft_core.policy import Policy

    path = resolve_model_path(MODEL, root)
    model = ModelSettings(path=str(path), device="cpu", dtype="bfloat16")
    policy = Policy.load(model, path, 0)
    place = Workplace(folder, "bench", model, lambda _: None, policy_id="bench")
    sampling = Sampling(1.0, 1.0, 0, TOKENS)
    requests = [_request(policy.tokenizer, number, index) for number in range(PROMPTS) for index in range(GROUP_SIZE)]
    try:
        engine: Any = ENGINES["vllm"](policy, rollout, place)
        bodies = [_body(engine, request, sampling) for request in requests]
        ways: tuple[Callable[[], Any], ...] = (
            lambda: engine.generate(requests, sampling),
            lambda: asyncio.run(_send(engine.servers[0].at, bodies)),
        )
        for way in ways:  # what is compiled or cached at first
            way()
        seconds = [[_seconds(way) for way in ways] for _ in range(REPEATS)]  # in turns: a machine's speed drifts
    finally:
        for kept in place.kept:
            kept.close()
    ours, peer = (statistics.median(times) for times in zip(*seconds, strict=True))
    return [_row("speed", len(requests) / ours, len(requests) / peer, "rows/s")]


def _request(tokenizer: Any, number: int, index: int) -> Request:
    messages = [{"role": "user", "content": QUESTION.format(number=number)}]
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Request(tuple(token_ids), 100 * number + index, str(number))


def _body(engine: Any, request: Request, sampling: Sampling) -> dict[str, Any]:
    from rft_core.engines.vllm.rows import row_body

    server = engine.servers[0]
    return {"model": server.model, **row_body(request, sampling, engine.stop_token_ids, server.holds)}


async def _send(connection: Any, bodies: list[dict[str, Any]]) -> None:
    """All at once, and nothing done with what comes back."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600, headers=connection.headers) as client:
        answers = await asyncio.gather(*(client.post(f"{connection.url}/v1/completions", json=body) for body in bodies))
    assert all(answer.status_code == 200 for answer in answers), answers


def _seconds(way: Callable[[], Any]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _row(metric: str, ours: float | None, peer: float | None, unit: str) -> dict[str, Any]:
    name = f"vllm: {PROMPTS * GROUP_SIZE} rows of {TOKENS} tokens"
    ratio = None if ours is None or peer is None else round(ours / peer, 3)
    figures = {key: None if value is None else round(value, 3) for key, value in (("ours", ours), ("peer", peer))}
    return {"name": name, "metric": metric, **figures, "ratio": ratio, "unit": unit}
