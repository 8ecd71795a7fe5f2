"""Whose weights a server holds: how they get there, and what is measured."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rft_core.config import ModelSettings
from rft_core.engines import Request, Sampling
from rft_core.engines.vllm.weights import Fingerprint, Publisher, logprobs_of
from rft_core.errors import SettingsError, WrongWeights
from rft_core.policy import Policy
from tests.rft_core.engines.vllm.conftest import load
from tests.rft_core.engines.vllm.fake_server import levels

OLD, NEW = "a" * 64, "b" * 64
SAMPLING = Sampling(1.0, 1.0, 0, 4)
REQUESTS = [Request((1, 50, 60), seed, "g") for seed in range(4)]
UPDATE = ["/pause?mode=abort", "/collective_rpc", "/reset_prefix_cache", "/resume"]


class Computed:
    """The logprobs of a server that computes: by the weights of the folder that it holds."""

    def __init__(self) -> None:
        self.policies: dict[str, Policy] = {}
        # transformers changes global state while it loads a model, a policy its module's attention while it computes.
        self.lock = threading.Lock()

    def __call__(self, weights: str, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
        with self.lock:
            if weights not in self.policies:
                self.policies[weights] = load(weights)
            return logprobs_of(self.policies[weights], prompt, completion, temperature).tolist()


def shift(policy: Policy, by: float) -> None:
    with torch.no_grad():
        for number, master in enumerate(policy.master):
            master.add_(by * torch.randn(master.shape, generator=torch.Generator().manual_seed(number)))
    policy.write_compute()


@pytest.fixture
def policy(tiny):
    return load(tiny)


def test_an_update_goes_through_a_folder_and_changes_what_the_server_tells(serving, engine_at, tiny, policy, tmp_path):
    server = serving(str(tiny), Computed())
    engine = engine_at(server)
    engine.serve(policy, OLD)
    before = engine.generate(REQUESTS, SAMPLING)
    shift(policy, 0.05)
    server.told.clear()
    engine.serve(policy, NEW)
    assert server.paths()[:4] == UPDATE
    assert server.weights == str(tmp_path / "weights/run" / NEW)
    after = engine.generate(REQUESTS, SAMPLING)
    for request, old, new in zip(REQUESTS, before, after, strict=True):
        expected = logprobs_of(policy, list(request.prompt_token_ids), new.token_ids, 1.0)
        np.testing.assert_allclose(new.logprobs, expected, atol=1e-5)
        assert old.token_ids == new.token_ids and not np.allclose(old.logprobs, new.logprobs, atol=1e-3)
    assert [folder.name for folder in (tmp_path / "weights/run").iterdir()] == [NEW]  # no other is kept
    engine.close()
    assert not (tmp_path / "weights/run").exists()


def test_the_same_policy_is_measured_and_not_loaded_again(serving, engine_at, tiny, policy):
    server = serving(str(tiny), Computed())
    engine = engine_at(server)
    engine.serve(policy, OLD)
    server.told.clear()
    engine.serve(policy, OLD)
    assert server.paths() == ["/v1/completions"]


def test_a_server_with_other_weights_is_refused(serving, engine_at, tiny, policy):
    server = serving(str(tiny), Computed())
    server.ignores_reloads = True
    shift(policy, 0.3)
    with pytest.raises(WrongWeights, match=r"must hold the weights of policy aaaaaaaaaaaa: .* found "):
        engine_at(server).serve(policy, OLD)


@pytest.mark.parametrize("by", [1e-5, 1e-4])
def test_a_small_update_that_was_not_taken_over_is_refused(serving, engine_at, tiny, policy, by):
    """It moves logprobs by less than the tolerance: what tells is that the server's did not move at all."""
    server = serving(str(tiny), Computed())
    engine = engine_at(server)
    engine.serve(policy, OLD)
    before = Fingerprint.of(policy, OLD)
    shift(policy, by)
    assert before.gap(Fingerprint.of(policy, NEW).logprobs) < 0.02
    server.ignores_reloads = True
    with pytest.raises(WrongWeights, match="still those of policy aaaaaaaaaaaa, to the bit"):
        engine.serve(policy, NEW)
    server.ignores_reloads = False
    engine.serve(policy, NEW)


def test_an_update_that_was_lost_once_is_made_again(serving, engine_at, tiny, policy):
    server = serving(str(tiny), Computed())
    engine = engine_at(server)
    engine.serve(policy, OLD)
    shift(policy, 0.05)
    server.faults["/collective_rpc"] = [(200, "{}")]
    engine.serve(policy, NEW)
    assert server.weights.endswith(NEW)


def test_logprobs_that_are_none_are_refused(serving, engine_at, blank):
    server = serving("base", lambda *_: [float("nan")] * len(_[2]))
    with pytest.raises(WrongWeights, match="found inf"):
        engine_at(server).serve(blank, OLD)


def test_a_server_that_tells_raw_logprobs_is_refused(serving, engine_at, tiny, policy):
    computed = Computed()
    server = serving(str(tiny), lambda weights, prompt, completion, _: computed(weights, prompt, completion, 1.0))
    with pytest.raises(SettingsError, match="--logprobs-mode processed_logprobs"):
        engine_at(server).serve(policy, OLD)


@pytest.mark.parametrize(
    ("path", "status"), [("/collective_rpc", 404), ("/collective_rpc", 500), ("/reset_prefix_cache", 404)]
)
def test_a_server_that_takes_no_weights_is_refused_with_what_it_needs(serving, engine_at, blank, path, status):
    server = serving("base")
    server.faults[path] = [(status, "Not Found")] * 3  # as many as there are tries
    with pytest.raises(SettingsError, match=rf"status {status}, Not Found.*VLLM_SERVER_DEV_MODE=1"):
        engine_at(server).serve(blank, OLD)
    assert server.paths()[-1] == "/resume"


def test_a_server_that_lost_the_weights_during_a_block_makes_it_again(serving, engine_at, tiny, policy, notes):
    """Someone else's restart: it answers as before, by the weights that it was started with."""
    server = serving(str(tiny), Computed())
    engine = engine_at(server)
    shift(policy, 0.3)
    engine.serve(policy, OLD)
    expected = engine.generate(REQUESTS, SAMPLING)
    server.weights = str(tiny)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert any("4 rows are made again" in note for note in notes)


def test_adapters_are_loaded_under_names_of_their_own(serving, engine_at, tiny, tmp_path):
    policy = load(tiny, lora_rank=4)
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.zero_()  # tied: every token is as likely, with any adapter
    server = serving("base")
    engine = engine_at(server, model={"lora_rank": 4})
    engine.serve(policy, OLD)
    engine.generate(REQUESTS, SAMPLING)
    engine.serve(policy, NEW)
    assert server.adapters == {f"policy-{NEW[:16]}": str(tmp_path / "weights/run" / NEW)}
    assert {body["model"] for body in server.rows()} == {f"policy-{OLD[:16]}"}
    assert "/collective_rpc" not in server.paths()
    assert {file.name for file in (tmp_path / "weights/run" / NEW).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_an_adapter_that_the_server_lost_is_loaded_again(serving, engine_at, tiny):
    policy = load(tiny, lora_rank=4)
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.zero_()
    server = serving("base")
    engine = engine_at(server, model={"lora_rank": 4})
    engine.serve(policy, OLD)
    server.adapters.clear()
    assert all(row.finish_reason != "error" for row in engine.generate(REQUESTS, SAMPLING))


@pytest.mark.parametrize("merged", [False, True])
def test_published_weights_are_the_policys(tiny, tmp_path, merged):
    """In its compute type; under LoRA with the adapter in them."""
    settings = {"lora_rank": 4} if merged else {}
    policy = load(tiny, **settings)
    shift(policy, 0.05)
    folder = Publisher(tmp_path / "served", merged=merged, untied=False).publish(policy, NEW)
    again = load(folder)
    assert Fingerprint.of(policy, NEW).gap(Fingerprint.of(again, NEW).logprobs) < 1e-5
    assert (folder / "tokenizer.json").is_file()


def test_published_weights_are_in_the_compute_type(tiny, tmp_path):
    settings = ModelSettings(path=str(tiny), device="cpu", dtype="bfloat16")
    policy = Policy.load(settings, tiny, 0)
    folder = Publisher(tmp_path / "served", merged=False, untied=False).publish(policy, NEW)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_a_tied_head_is_written_on_its_own_for_a_server_that_packs_it(tiny, policy, tmp_path):
    folder = Publisher(tmp_path / "served", merged=False, untied=True).publish(policy, NEW)
    (head,) = load_file(folder / "head.safetensors").items()
    assert head[0] == "lm_head.weight" and torch.equal(head[1], policy.module.get_input_embeddings().weight)
    assert '"tie_word_embeddings": false' in (folder / "config.json").read_text()


def test_a_folder_of_a_killed_process_is_cleared(tmp_path):
    (tmp_path / "served/old").mkdir(parents=True)
    Publisher(tmp_path / "served", merged=False, untied=False)
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(("model", "level"), [({}, 2), ({"lora_rank": 4}, 1)])
def test_a_server_sleeps_while_the_policy_trains(serving, engine_at, tiny, model, level):
    policy = load(tiny, **model)
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.zero_()
    server = serving("base")
    engine = engine_at(server, model=model, while_training="sleep")
    engine.serve(policy, OLD)
    engine.rest()
    engine.rest()
    assert levels(server) == [level]
    server.told.clear()
    engine.serve(policy, OLD)
    woken = ["/wake_up"] if level == 1 else ["/wake_up?tags=weights", *UPDATE, "/wake_up?tags=kv_cache"]
    assert server.paths()[: len(woken)] == woken


def test_sleep_is_refused_where_there_is_none(engine_at):
    with pytest.raises(SettingsError, match="no sleep on a CPU"):
        engine_at(while_training="sleep")
