"""A policy whose weights are all 0, and servers that speak vLLM's protocol."""

from __future__ import annotations

import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.config import ModelSettings
from rft_core.engines.vllm import VllmEngine
from rft_core.policy import Policy
from rft_core.vllm_settings import VllmSettings
from tests.rft_core.engines.vllm import fake_server
from tests.rft_core.engines.vllm.fake_server import FakeServer
from tests.tiny import make_tiny_model

QUICK = {"backoff_seconds": 0.01, "retries": 2, "timeout_seconds": 20.0}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "model")


def load(folder: Path, **settings: Any) -> Policy:
    return Policy.load(ModelSettings(path=str(folder), device="cpu", dtype="float32", **settings), folder, 0)


@pytest.fixture
def blank(tiny: Path) -> Policy:
    """All logits are 0: every token has the logprob -log(259)."""
    policy = load(tiny)
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.zero_()
    return policy


@pytest.fixture
def serving() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(*arguments: Any, **settings: Any) -> FakeServer:
        server = FakeServer(*arguments, **settings)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        end(server)


def end(server: FakeServer) -> None:
    server.stuck.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def engine_at(tmp_path: Path, notes: list[str]) -> Iterator[Callable[..., VllmEngine]]:
    """An engine on running servers, or on one of its own where none is named."""
    engines: list[VllmEngine] = []

    def make(*servers: FakeServer, model: dict[str, Any] | None = None, **settings: Any) -> VllmEngine:
        urls = [server.url for server in servers]
        given = {"urls": urls, "weights_folder": str(tmp_path / "weights")} if urls else {}
        about = ModelSettings(path="x", device="cpu", dtype="float32", **(model or {}))
        engine = VllmEngine(
            VllmSettings(**{**QUICK, **given, **settings}), about, tmp_path / "run", "run", notes.append
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """An interpreter of an environment in which vllm is the fake server."""
    program = tmp_path / "python"
    module = fake_server.__file__
    program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift 2\nexec {sys.executable} -P {module} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)
