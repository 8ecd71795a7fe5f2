import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rft_core import policy as policy_module
from rft_core.batching import TrainRow, micro_batches
from rft_core.config import ModelSettings
from rft_core.errors import ModelUnreadable, SettingsError
from rft_core.packing import packed_micro_batches
from rft_core.policy import AdapterOff, Policy, load_reference
from tests.rft_core.families import FAMILIES, make_family
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder, **settings):
    trainable = settings.pop("trainable", True)
    values = {"device": "cpu", "dtype": "float32", **settings}
    return Policy.load(ModelSettings(path=str(folder), **values), folder, seed=3, trainable=trainable)


def ragged_rows() -> list[TrainRow]:
    """Three prompts of 4, 11 and 30 tokens; 1 to 9 completions each, of 1 to 24 tokens."""
    generator = np.random.default_rng(5)
    rows = []
    for group, (prompt_length, count) in enumerate([(4, 9), (11, 1), (30, 5)]):
        prompt = generator.integers(3, 259, prompt_length)
        for index in range(count):
            completion = generator.integers(3, 259, generator.integers(1, 25))
            rows.append(TrainRow(f"{group}/{index}", str(group), prompt, completion, np.ones(len(completion), bool)))
    return rows


def logprobs_and_gradients(policy: Policy, batches, rows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs per row, and the gradient of their sum weighted by row: every row and token matters differently."""
    for master in policy.master:
        master.grad = None
    found = {}
    for batch in batches:
        logprobs_T, entropy_T = policy.token_logprobs(batch, 0.8, entropy_gradient=True)
        parts = zip(batch.row_indices, logprobs_T.split(batch.lengths), entropy_T.split(batch.lengths), strict=True)
        loss = 0.0
        for index, logprobs, entropies in parts:
            found[index] = logprobs.detach()
            loss = loss + (logprobs * torch.linspace(index + 1.0, 1.0, len(logprobs))).sum() - 0.3 * entropies.sum()
        loss.backward()
    return [found[index] for index in range(len(rows))], [master.grad.clone() for master in policy.master]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    gap = sum((f - e).double().square().sum() for f, e in zip(found, expected, strict=True))
    return float((gap / sum(e.double().square().sum() for e in expected)) ** 0.5)


def test_logprobs_equal_a_plain_forward_of_each_row(folder):
    policy = load(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = ragged_rows()
    for batch in policy.micro_batches(rows, 200):
        logprobs_T, entropy_T = policy.token_logprobs(batch, 0.7)
        parts = zip(batch.row_indices, logprobs_T.split(batch.lengths), entropy_T.split(batch.lengths), strict=True)
        for index, logprobs, entropies in parts:
            row = rows[index]
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.completion_token_ids]))[None]
            start = len(row.prompt_token_ids)
            expected = torch.log_softmax(module(ids).logits[0, start - 1 : -1] / 0.7, -1)
            assert (logprobs - expected.gather(-1, ids[0, start:, None])[:, 0]).abs().max() <= 3e-5
            assert (entropies + (expected.exp() * expected).sum(-1)).abs().max() <= 3e-5


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_shared_and_plain_layouts_are_equal(folder, lora_rank):
    policy = load(folder, lora_rank=lora_rank)
    if lora_rank:  # B starts at 0, and with it the gradient of A
        with torch.no_grad():
            for name, weight in zip(policy.names, policy.master, strict=True):
                weight += 0.05 if ".lora_B." in name else 0.0
    rows = ragged_rows()
    plain = logprobs_and_gradients(policy, micro_batches(rows, 10_000, False), rows)
    others = [micro_batches(rows, budget, True) for budget in (60, 150, 10_000)]
    others += [packed_micro_batches(rows, budget, True) for budget in (1, 60, 150, 10_000)]
    others += [packed_micro_batches(rows, 100, False)]
    for batches in others:
        shared = logprobs_and_gradients(policy, batches, rows)
        assert max((a - b).abs().max() for a, b in zip(plain[0], shared[0], strict=True)) <= 1e-5
        assert relative_error(shared[1], plain[1]) <= 1e-5


def test_head_with_an_adapter_is_computed_in_pieces(tmp_path, monkeypatch):
    """What an adapter adds to the head is not in its weight, so the head is called."""
    policy = load(make_family(tmp_path, "llama"), lora_rank=2, lora_targets=["lm_head"])
    rows = ragged_rows()
    with torch.no_grad():
        for master in policy.master:
            master += 0.05
    whole = logprobs_and_gradients(policy, policy.micro_batches(rows, 10_000), rows)
    expected = logprobs_of_plain_forwards(policy, rows)
    (batch,) = policy.micro_batches(rows, 10_000)
    found = policy.token_logprobs(batch, 1.0)[0].split(batch.lengths)
    assert all((f - expected[i]).abs().max() <= 1e-5 for f, i in zip(found, batch.row_indices, strict=True))
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 259 * 16)  # 16 rows at once
    pieces = logprobs_and_gradients(policy, policy.micro_batches(rows, 10_000), rows)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole[0], pieces[0], strict=True))
    assert relative_error(pieces[1], whole[1]) <= 1e-6


def test_bfloat16_keeps_float32_masters_and_sums_gradients_in_float32(folder):
    policy, full = load(folder, dtype="bfloat16"), load(folder)
    assert {weight.dtype for weight in policy.module.parameters()} == {torch.bfloat16}
    assert policy.module.model.rotary_emb.inv_freq.dtype == torch.float32
    for master, weight in zip(policy.master, full.master, strict=True):
        assert master.dtype == torch.float32 and torch.equal(master, weight)
    rows = ragged_rows()
    batches = policy.micro_batches(rows, 60)
    _, gradients = logprobs_and_gradients(policy, batches, rows)
    # The sum of the micro-batches' gradients, each taken alone and added in float64.
    expected = [torch.zeros_like(master, dtype=torch.float64) for master in policy.master]
    for batch in batches:
        for master in policy.master:
            master.grad = None
        logprobs_T, entropy_T = policy.token_logprobs(batch, 0.8, entropy_gradient=True)
        parts = zip(batch.row_indices, logprobs_T.split(batch.lengths), strict=True)
        loss = sum((part * torch.linspace(i + 1.0, 1.0, len(part))).sum() for i, part in parts) - 0.3 * entropy_T.sum()
        loss.backward()
        for total, master in zip(expected, policy.master, strict=True):
            total += master.grad
    assert relative_error(gradients, expected) <= 1e-6
    assert all(weight.grad is None for weight in policy.compute)


def test_lora_starts_as_the_model_from_the_seed_alone(folder):
    policy, again, full = load(folder, lora_rank=4), load(folder, lora_rank=4), load(folder)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    third = load(folder, lora_rank=4)
    assert torch.equal(torch.get_rng_state(), state)  # nobody's random stream is touched
    for other in (again, third):
        assert all(torch.equal(a, b) for a, b in zip(policy.master, other.master, strict=True))
    assert any(a.abs().sum() > 0 for a in policy.master)
    (batch,) = policy.micro_batches(ragged_rows(), 10_000)
    assert torch.equal(policy.token_logprobs(batch, 1.0)[0], full.token_logprobs(batch, 1.0)[0])


def test_reference_of_lora_is_the_policy_without_its_adapter(folder):
    policy, full = load(folder, lora_rank=4), load(folder)
    reference = load_reference(ModelSettings(path=str(folder), device="cpu", dtype="float32"), folder, policy)
    assert isinstance(reference, AdapterOff)
    with torch.no_grad():
        for master in policy.master:
            master += 0.1
        (batch,) = policy.micro_batches(ragged_rows(), 10_000)
        expected = full.token_logprobs(batch, 1.0)[0]
        assert torch.equal(reference.token_logprobs(batch, 1.0)[0], expected)
        assert (policy.token_logprobs(batch, 1.0)[0] - expected).abs().max() > 0.1


def test_reference_of_full_training_is_a_frozen_copy(folder):
    policy = load(folder)
    reference = load_reference(ModelSettings(path=str(folder), device="cpu", dtype="float32"), folder, policy)
    assert not any(weight.requires_grad for weight in reference.module.parameters())
    assert reference.master == []
    (batch,) = policy.micro_batches(ragged_rows(), 10_000)
    assert torch.equal(reference.token_logprobs(batch, 1.0)[0], policy.token_logprobs(batch, 1.0)[0].detach())


def logprobs_of_plain_forwards(policy: Policy, rows: list[TrainRow]) -> list[torch.Tensor]:
    """Each row alone, by the module's own attention and logits."""
    found = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.completion_token_ids]))[None]
        start = len(row.prompt_token_ids)
        log_p = torch.log_softmax(policy.module(ids).logits[0, start - 1 : -1], -1)
        found.append(log_p.gather(-1, ids[0, start:, None])[:, 0])
    return found


def test_a_window_shorter_than_rows_is_computed_as_itself(tmp_path):
    policy = load(make_family(tmp_path, "gemma2", sliding_window=8))
    assert not policy.is_packed and not policy.shared_prefix
    rows = ragged_rows()
    expected = logprobs_of_plain_forwards(policy, rows)
    for batch in policy.micro_batches(rows, 100):
        for index, found in zip(
            batch.row_indices, policy.token_logprobs(batch, 1.0)[0].split(batch.lengths), strict=True
        ):
            assert (found - expected[index]).abs().max() <= 3e-5


def test_rows_longer_than_a_window_are_padded_and_the_others_packed(tmp_path):
    policy = load(make_family(tmp_path, "gemma2", sliding_window=40))
    assert policy.is_packed
    rows = ragged_rows()
    expected = logprobs_of_plain_forwards(policy, rows)
    batches = policy.micro_batches(rows, 100)
    assert {batch.segments is None for batch in batches} == {True, False}
    for batch in batches:
        for index, found in zip(
            batch.row_indices, policy.token_logprobs(batch, 1.0)[0].split(batch.lengths), strict=True
        ):
            assert (found - expected[index]).abs().max() <= 3e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_plain_forwards_in_every_family(tmp_path, family):
    """Logprobs within 1e-5 and gradients within 1e-5 of each row alone, by the module's own attention and head."""
    policy = load(make_family(tmp_path, family))
    assert policy.is_packed and policy.has_plain_head and policy.shared_prefix and policy.notes == []
    rows = ragged_rows()
    expected = logprobs_of_plain_forwards(policy, rows)
    for master in policy.master:
        master.grad = None
    loss = sum(
        (logprobs * torch.linspace(index + 1.0, 1.0, len(logprobs))).sum() for index, logprobs in enumerate(expected)
    )
    loss.backward()
    gradients = [master.grad.clone() for master in policy.master]
    for master in policy.master:
        master.grad = None
    for batch in policy.micro_batches(rows, 150):
        assert batch.segments is not None
        logprobs_T, _ = policy.token_logprobs(batch, 1.0)
        loss = 0.0
        for index, found in zip(batch.row_indices, logprobs_T.split(batch.lengths), strict=True):
            assert (found - expected[index]).abs().max() <= 1e-5
            loss = loss + (found * torch.linspace(index + 1.0, 1.0, len(found))).sum()
        loss.backward()
    assert relative_error([master.grad for master in policy.master], gradients) <= 1e-5


def test_logits_of_another_form_are_computed_by_the_model_itself(folder, monkeypatch):
    class Doubled(Policy):
        @classmethod
        def read(cls, *args):
            module = Policy.read(*args)
            module.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits * 2))
            return module

    policy = Doubled.load(ModelSettings(path=str(folder), device="cpu", dtype="float32"), folder, seed=3)
    assert not policy.has_plain_head
    assert any("logits of this model" in note for note in policy.notes)
    rows = ragged_rows()
    expected = logprobs_of_plain_forwards(policy, rows)
    for batch in policy.micro_batches(rows, 100):
        for index, found in zip(
            batch.row_indices, policy.token_logprobs(batch, 1.0)[0].split(batch.lengths), strict=True
        ):
            assert (found - expected[index]).abs().max() <= 3e-5


def test_an_attention_that_is_not_by_segments_pads_with_a_note(folder, monkeypatch):
    def refuses(*args, **kwargs):
        raise ValueError("sinks")

    monkeypatch.setattr("rft_core.attending.packed_attention", refuses)
    policy = load(folder)
    assert not policy.is_packed and policy.shared_prefix
    assert any("cannot be computed on packed rows" in note for note in policy.notes)


def test_too_little_memory_says_nothing_of_a_model(folder, monkeypatch):
    """Else the layout, and with it the bits, would depend on what else was running."""

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("rft_core.attending.packed_attention", fails)
    with pytest.raises(torch.OutOfMemoryError):
        load(folder)


def test_generation_finds_the_attention_that_it_left(folder):
    policy = load(folder)
    before = policy.module.config._attn_implementation
    (batch,) = policy.micro_batches(ragged_rows(), 10_000)
    policy.token_logprobs(batch, 1.0)
    assert policy.module.config._attn_implementation == before


def test_shared_prefix_can_be_switched_off(folder):
    policy = load(folder, shared_prefix=False)
    assert not any(batch.is_shared for batch in policy.micro_batches(ragged_rows(), 10_000))
    assert policy.notes == []


def test_lora_targets_that_name_nothing_are_a_settings_error(folder):
    with pytest.raises(SettingsError, match="lora_targets"):
        load(folder, lora_rank=2, lora_targets=["no_such_module"])


def _without_folder(folder):
    shutil.rmtree(folder)


def _without_config(folder):
    (folder / "config.json").unlink()


def _config_not_json(folder):
    (folder / "config.json").write_text("{")


def _truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _without_weights(folder):
    (folder / "model.safetensors").unlink()


def _with_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _unknown_architecture(folder):
    _with_config(folder, model_type="no_such_model", architectures=["NoSuchModel"])


def _more_layers_than_weights(folder):
    _with_config(folder, num_hidden_layers=3)


def _other_shape(folder):
    _with_config(folder, intermediate_size=128)


def _code_of_its_own(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["model_type"]
    path.write_text(json.dumps(content | {"auto_map": {"AutoConfig": "evil.Config"}}))


BREAKAGES = [
    _without_folder,
    _without_config,
    _config_not_json,
    _truncated_weights,
    _without_weights,
    _unknown_architecture,
    _more_layers_than_weights,
    _other_shape,
    _code_of_its_own,
]


@pytest.mark.parametrize("damage", BREAKAGES)
def test_a_model_that_cannot_be_read_is_named(folder, tmp_path, damage):
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    damage(broken)
    with pytest.raises(ModelUnreadable, match=str(broken)):
        load(broken)
