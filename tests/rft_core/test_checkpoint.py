import json

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_contracts.refs import PolicyRef
from rft_core.checkpoint import export_model, load_checkpoint, save_checkpoint, weights_digest
from rft_core.config import AlgorithmSettings, ModelSettings, RolloutSettings, TrainingSettings
from rft_core.errors import ModelUnreadable
from rft_core.policy import Policy
from rft_core.train_state import TrainState
from rft_core.update import update_policy
from tests.rft_core.update_tables import tables
from tests.tiny import make_tiny_model

KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "lora_rank": 4},
    {"dtype": "bfloat16", "lora_rank": 4},
]
TRAINING = TrainingSettings(learning_rate=1e-2, weight_decay=0.01, warmup_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def start(folder, model) -> TrainState:
    settings = ModelSettings(path=str(folder), device="cpu", **model)
    return TrainState.start(Policy.load(settings, folder, seed=5))


def train(state: TrainState, versions: range) -> list[dict]:
    rows = []
    for version in versions:
        rollouts, advantages = tables(seed=version)
        table = update_policy(
            state,
            rollouts,
            advantages,
            algorithm=AlgorithmSettings(),
            training=TRAINING,
            rollout=RolloutSettings(max_completion_tokens=12),
            before=PolicyRef("root", version),
            reference=None,
            seed=0,
            total_steps=0,
        )
        rows += table.to_pylist()
    return rows


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_going_on_from_a_checkpoint_gives_the_same_bits(folder, tmp_path, model):
    state = start(folder, model)
    train(state, range(2))
    state.skipped_in_a_row = 1
    save_checkpoint(state, tmp_path)
    digest = weights_digest(state)
    restored = start(folder, model)
    load_checkpoint(restored, tmp_path)
    assert weights_digest(restored) == digest
    assert (restored.optimizer_step, restored.skipped_in_a_row) == (2, 1)
    assert all(torch.equal(a, b) for a, b in zip(state.policy.compute, restored.policy.compute, strict=True))
    assert train(state, range(2, 4)) == train(restored, range(2, 4))
    assert weights_digest(state) == weights_digest(restored) != digest


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_loading_into_a_state_that_went_on_turns_it_back(folder, tmp_path, model):
    state = start(folder, model)
    save_checkpoint(state, tmp_path)  # before the first step: no moments
    first = (train(state, range(2)), weights_digest(state))
    load_checkpoint(state, tmp_path)
    assert (train(state, range(2)), weights_digest(state)) == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_opens_as_a_model_in_float32(folder, tmp_path, dtype):
    state = start(folder, {"dtype": dtype})
    train(state, range(2))
    save_checkpoint(state, tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert module.dtype == torch.float32
    weights = dict(module.named_parameters())
    for name, master in zip(state.policy.names, state.policy.master, strict=True):
        assert torch.equal(weights[name], master)
    assert module.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == state.policy.tokenizer.chat_template
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 (not a dict); tied weights are stored once
    assert state.policy.module.dtype == getattr(torch, dtype)
    assert not list(tmp_path.glob("**/*.bin")) and not list(tmp_path.glob("**/*.pt"))


# peft 0.21 asks transformers 5 for a property by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exports_of_an_adapter_compute_what_the_policy_computes(folder, tmp_path, dtype):
    state = start(folder, {"dtype": dtype, "lora_rank": 4})
    train(state, range(2))
    export_model(state, tmp_path / "merged", merged=True)
    export_model(state, tmp_path / "adapter", merged=False)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    base = AutoModelForCausalLM.from_pretrained(folder)
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert (merged - adapted).abs().max() <= 1e-5 and (merged - plain).abs().max() > 0.05
    tolerance = 1e-5 if dtype == "float32" else 0.1  # the policy itself rounds its base to bfloat16
    assert (state.policy.module(ids).logits.float() - merged).abs().max() <= tolerance


def test_export_of_full_training_is_the_masters(folder, tmp_path):
    state = start(folder, {"dtype": "bfloat16"})
    train(state, range(1))
    export_model(state, tmp_path, merged=True)
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert torch.equal(weights[state.policy.names[0]], state.policy.master[0])
    assert not (tmp_path / "state.json").exists()


def test_damaged_and_foreign_checkpoints_are_named(folder, tmp_path):
    state = start(folder, {"dtype": "float32"})
    train(state, range(1))
    save_checkpoint(state, tmp_path)
    lora = start(folder, {"dtype": "float32", "lora_rank": 4})
    with pytest.raises(ModelUnreadable, match="lora"):
        load_checkpoint(lora, tmp_path)
    whole = (tmp_path / "optimizer.safetensors").read_bytes()
    (tmp_path / "optimizer.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ModelUnreadable, match=str(tmp_path)):
        load_checkpoint(state, tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(whole)
    counters = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(counters | {"format": 99}))
    with pytest.raises(ModelUnreadable, match="format 2"):
        load_checkpoint(state, tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(ModelUnreadable, match=r"state\.json"):
        load_checkpoint(state, tmp_path)


def test_weights_digest_tells_weights_apart(folder):
    state = start(folder, {"dtype": "float32"})
    digest = weights_digest(state)
    assert digest == weights_digest(start(folder, {"dtype": "bfloat16"}))  # the masters, not the compute type
    state.policy.master[2].data.view(-1)[0] += 1e-6
    assert weights_digest(state) != digest
