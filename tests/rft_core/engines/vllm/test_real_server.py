"""A real vLLM server on the tiny model: what it serves must be what the policy computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rft_core.config import ModelSettings, RolloutSettings
from rft_core.engines import ENGINES, Request, Sampling, Workplace
from rft_core.engines.vllm import VllmEngine
from rft_core.engines.vllm.weights import logprobs_of
from rft_core.policy import Policy
from tests.tiny import END_TOKEN_ID, make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAMPLING = Sampling(1.3, 1.0, 0, 24)
REQUESTS = [Request((1, 80, 90 + index // 8, 100), 7000 + index, str(index // 8)) for index in range(32)]
TOLERANCE = 1e-4  # nats in float32: both compute the same function, each sum in its own order


class Served:
    """A run of one engine."""

    def __init__(self, folder: Path, **model: object) -> None:
        # vLLM's kernels for a CPU take heads of 32 and more.
        path = make_tiny_model(folder / "model", head_dim=32)
        settings = ModelSettings(path=str(path), device="cpu", dtype="float32", **model)
        self.policy = Policy.load(settings, path, 0)
        python = os.environ["RFT_VLLM_PYTHON"]
        vllm = {"python": python, "arguments": ["--enforce-eager"], "backoff_seconds": 0.1}
        self.rollout = RolloutSettings(engine="vllm", vllm=vllm)
        self.notes: list[str] = []
        self.place = Workplace(folder / "engine", "run", settings, self.notes.append)
        self.log = folder / "engine/server.log"

    def engine(self, policy_id: str) -> VllmEngine:
        self.place.policy_id = policy_id
        engine = ENGINES["vllm"](self.policy, self.rollout, self.place)
        assert isinstance(engine, VllmEngine)
        return engine

    def update(self, by: float = 0.02) -> None:
        with torch.no_grad():
            for number, master in enumerate(self.policy.master):
                master.add_(by * torch.randn(master.shape, generator=torch.Generator().manual_seed(number)))
        self.policy.write_compute()

    def processes(self) -> list[psutil.Process]:
        guard = psutil.Process(self.place.kept[0].servers[0].managed.process_id)
        return [guard, *guard.children(recursive=True)]

    def end(self) -> None:
        processes = self.processes()
        for engine in self.place.kept:
            engine.close()
        assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """Nothing is compiled: that takes a minute, and serves three tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory, eager) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    served.engine("a" * 64)
    yield served
    served.end()


def check_logprobs(served: Served, completions, temperature: float, requests=REQUESTS) -> None:
    """Each token's logprob is what a forward pass over the whole row says."""
    for request, made in zip(requests, completions, strict=True):
        expected = logprobs_of(served.policy, list(request.prompt_token_ids), made.token_ids, temperature)
        np.testing.assert_allclose(made.logprobs, expected, atol=TOLERANCE)


def test_rows_are_of_the_policy(served):
    made = served.engine("a" * 64).generate(REQUESTS, SAMPLING)
    check_logprobs(served, made, SAMPLING.temperature)
    assert {row.finish_reason for row in made} == {"stop", "length"}
    for row in made:  # the stop token is part of the completion, as in the engine transformers
        stops = [place for place, token in enumerate(row.token_ids) if token == END_TOKEN_ID]
        assert stops == ([len(row.token_ids) - 1] if row.finish_reason == "stop" else [])
        assert row.finish_reason == "stop" or len(row.token_ids) == SAMPLING.max_completion_tokens


def test_a_seed_decides_a_row(served):
    engine = served.engine("a" * 64)
    made = engine.generate(REQUESTS, SAMPLING)
    assert engine.generate(REQUESTS, SAMPLING) == made
    assert engine.generate(REQUESTS[::-1], SAMPLING)[::-1] == made
    assert len({tuple(row.token_ids) for row in made}) == len(made)  # rows of a group differ


def test_greedy_rows_are_the_likeliest_tokens(served):
    (made,) = served.engine("a" * 64).generate(REQUESTS[:1], Sampling(0.0, 1.0, 0, 8))
    check_logprobs(served, [made], 1.0, REQUESTS[:1])
    ids = torch.tensor([[*REQUESTS[0].prompt_token_ids, *made.token_ids]])
    with torch.no_grad():
        likeliest = served.policy.module(ids).logits[0, 3:-1].argmax(-1).tolist()
    assert made.token_ids == likeliest


@pytest.mark.parametrize("truncated", [Sampling(1.0, 1.0, 5, 8), Sampling(1.0, 0.5, 0, 8)])
def test_logprobs_are_of_the_truncated_distribution(served, truncated):
    """The mass that truncation leaves out is shared among what stays: nothing is less likely than in the whole one."""
    made = served.engine("a" * 64).generate(REQUESTS, truncated)
    for request, row in zip(REQUESTS, made, strict=True):
        whole = logprobs_of(served.policy, list(request.prompt_token_ids), row.token_ids, 1.0)
        assert (np.array(row.logprobs) > whole + 0.05).all()


def test_rows_that_cannot_run_fail_alone(served):
    requests = [Request((), 0, "a"), Request((1, 5000), 0, "b"), Request((1,) * 2040, 0, "c"), REQUESTS[0]]
    made = served.engine("a" * 64).generate(requests, SAMPLING)
    reasons = [row.error_reason for row in made]
    assert reasons == ["empty_prompt", "token_out_of_vocabulary", "context_exceeded", None]


def test_more_prompt_tokens_at_once_than_one_pass_takes(served):
    """4,000 against vLLM's 2,048: where prompts are cut into chunks, rows with a seed end the server on a CPU."""
    requests = [Request((1, *range(80, 117), 3 + number, 4), number, str(number)) for number in range(100)]
    made = served.engine("a" * 64).generate(requests, Sampling(1.0, 1.0, 0, 4))
    check_logprobs(served, made, 1.0, requests)
    assert not any("no server answers" in note for note in served.notes)


def test_an_update_in_place_is_served_and_proven(served):
    """The very process goes on; a small update too is told from none."""
    engine = served.engine("a" * 64)
    before, processes = engine.generate(REQUESTS, SAMPLING), served.processes()
    for by, policy_id in ((0.02, "b" * 64), (1e-5, "c" * 64)):
        served.update(by)
        made = served.engine(policy_id).generate(REQUESTS, SAMPLING)
        check_logprobs(served, made, SAMPLING.temperature)
    assert made != before
    assert served.processes() == processes
    assert sum("holds policy" in note for note in served.notes) == 3


def test_a_dead_server_comes_back_with_the_policys_weights(served):
    served.update()
    engine = served.engine("d" * 64)
    expected = engine.generate(REQUESTS, SAMPLING)
    dead = served.processes()
    dead[1].kill()
    made = engine.generate(REQUESTS, SAMPLING)
    check_logprobs(served, made, SAMPLING.temperature)
    assert made == expected
    assert psutil.wait_procs(dead, timeout=5)[1] == []


def test_adapters_are_loaded_at_run_time(tmp_path, eager):
    served = Served(tmp_path, lora_rank=4)
    try:
        for policy_id in ("a" * 64, "b" * 64):
            made = served.engine(policy_id).generate(REQUESTS, SAMPLING)
            check_logprobs(served, made, SAMPLING.temperature)
            served.update(0.1)
        made = served.engine("c" * 64).generate(REQUESTS, SAMPLING)
        check_logprobs(served, made, SAMPLING.temperature)
    finally:
        served.end()
