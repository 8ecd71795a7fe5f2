"""What a device computes, held against the CPU in float32. On the CPU itself it shows that the comparison works."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rft_core.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rft_core.config import ModelSettings
from rft_core.engines import Completion, Request, Sampling
from rft_core.engines.transformers import TransformersEngine
from rft_core.policy import Policy
from tests.rft_core.given_tables import labelled, pairs, tables_of, trajectories
from tests.rft_core.trainer import Trainer, gradient
from tests.rft_core.update_tables import tables
from tests.tiny import make_tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 24
# Largest difference of gradients, over the largest gradient: rounding of the compute type.
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder, device: str) -> Policy:
    return Policy.load(ModelSettings(path=str(folder), device=device, dtype="float32"), folder, seed=0)


def requests() -> list[Request]:
    """Groups of three, of ragged prompts."""
    generator = random.Random(5)
    prompts = [tuple(generator.randrange(3, 259) for _ in range(length)) for length in (9, 3, 14, 3)]
    return [Request(p, 10 * group + row, str(group)) for group, p in enumerate(prompts) for row in range(3)]


def generated(policy: Policy, sampling: Sampling) -> list[Completion]:
    return TransformersEngine(policy, batch_tokens=100).generate(requests(), sampling)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_those_of_plain_generate(folder, device):
    policy = load(folder, device)
    for request, completion in zip(requests(), generated(policy, Sampling(0.0, 1.0, 0, TOKENS)), strict=True):
        ids = torch.tensor([request.prompt_token_ids], device=device)
        with torch.no_grad():
            output = policy.module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
            )
        assert completion.token_ids == output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_and_their_logprobs_are_those_of_the_cpu(folder, device):
    """Seeds decide the draws on every device. The logprobs come from a pass over the whole text on the CPU."""
    sampling = Sampling(0.9, 1.0, 0, TOKENS)
    policy, on_cpu = load(folder, device), load(folder, "cpu")
    made = generated(policy, sampling)
    assert [completion.token_ids for completion in made] == [c.token_ids for c in generated(on_cpu, sampling)]
    for request, completion in zip(requests(), made, strict=True):
        prompt = list(request.prompt_token_ids)
        with torch.no_grad():
            logits = on_cpu.module(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.9).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
        np.testing.assert_allclose(completion.logprobs, expected[:, 0].numpy(), atol=1e-3)


@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, {"name": "dr_grpo", "kl_coefficient": 0.1}], ids=str)
@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_the_cpu_in_float32(folder, device, model, algorithm):
    rollouts, advantages = tables(behaviour=-5.0)
    wanted, (expected,) = gradient(
        Trainer(folder, algorithm, {**model, "dtype": "float32"}, max_grad_norm=1e9), rollouts, advantages
    )
    trainer = Trainer(folder, algorithm, {**model, "device": device}, max_grad_norm=1e9)
    found, (row,) = gradient(trainer, rollouts, advantages)
    tolerance = GRADIENT_TOLERANCE[trainer.model.dtype]
    assert found.device.type == device
    assert found.dtype == torch.float32
    assert (found.cpu() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
    assert row["ratio_max"] == 1.0
    counts = ("trained_rows", "trained_tokens", "off_policy_rows", "forward_rows", "skipped")
    assert {name: row[name] for name in counts} == {name: expected[name] for name in counts}


@pytest.mark.parametrize(("name", "rows"), [("dpo", pairs()), ("kto", labelled()), ("sft", trajectories())])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_given_rows_are_those_of_the_cpu(folder, device, name, rows):
    given = tables_of(rows)
    wanted, (expected,) = gradient(Trainer(folder, {"name": name}, max_grad_norm=1e9), *given)
    found, (row,) = gradient(Trainer(folder, {"name": name}, {"device": device}, max_grad_norm=1e9), *given)
    assert found.device.type == device
    assert (found.cpu() - wanted).abs().max() <= GRADIENT_TOLERANCE["float32"] * wanted.abs().max()
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_split_into_micro_batches_changes_rounding_alone(folder, device):
    rollouts, advantages = tables()
    found = [
        gradient(Trainer(folder, model={"device": device}, micro_batch_tokens=tokens), rollouts, advantages)[0]
        for tokens in (1, 40, 4000)
    ]
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 1e-5 * found[0].abs().max()


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 4}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_brings_weights_and_moments_back_to_the_bit(folder, tmp_path, device, model):
    trainer, again = (Trainer(folder, model={**model, "device": device}) for _ in range(2))
    trainer.update(*tables())
    save_checkpoint(trainer.state, tmp_path)
    load_checkpoint(again.state, tmp_path)
    assert weights_digest(again.state) == weights_digest(trainer.state)
    kept, found = trainer.state.optimizer.moments(), again.state.optimizer.moments()
    assert kept.keys() == found.keys()
    assert all(torch.equal(kept[name].cpu(), found[name].cpu()) for name in kept)
    assert {weight.device.type for weight in again.state.policy.compute} == {device}
    rows = again.update(*tables(seed=1))
    assert rows[0]["loss"] == pytest.approx(trainer.update(*tables(seed=1))[0]["loss"], rel=1e-3, abs=1e-5)
