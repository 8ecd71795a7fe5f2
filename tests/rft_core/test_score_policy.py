"""LoRA under a new head of scores: what trains, what a checkpoint and an export hold, against peft and transformers."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rft_core.checkpoint import export_model, load_checkpoint, save_checkpoint, weights_digest
from rft_core.config import ModelSettings
from rft_core.score_policy import POLICIES
from rft_core.train_state import TrainState
from tests.tiny import make_tiny_model

CLASSES = {
    "sequence_labels": (AutoModelForSequenceClassification, 1, ["score.weight"]),
    "token_labels": (AutoModelForTokenClassification, 2, ["score.weight", "score.bias"]),
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def start(folder, head: str, dtype: str) -> TrainState:
    settings = ModelSettings(path=str(folder), device="cpu", dtype=dtype, lora_rank=4)
    return TrainState.start(POLICIES[head].load(settings, folder, seed=5))


def move(state: TrainState) -> None:
    """Every trainable weight away from where it began."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in state.policy.master:
            master += 0.05 * torch.randn(master.shape, generator=generator)
    state.policy.write_compute()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", CLASSES)
def test_a_new_head_trains_whole_beside_the_adapter(folder, tmp_path, head, dtype):
    state = start(folder, head, dtype)
    kind, labels, head_names = CLASSES[head]
    assert [name for name in state.policy.names if ".lora_" not in name] == head_names
    assert len(state.policy.names) > len(head_names)
    move(state)
    with torch.no_grad():
        ours = state.policy.module(IDS).logits.float()
    save_checkpoint(state, tmp_path / "checkpoint")
    again = start(folder, head, dtype)
    assert weights_digest(again) != weights_digest(state)
    load_checkpoint(again, tmp_path / "checkpoint")
    assert weights_digest(again) == weights_digest(state)

    export_model(state, tmp_path / "merged", merged=True)
    export_model(state, tmp_path / "adapter", merged=False)
    with torch.no_grad():
        merged = kind.from_pretrained(tmp_path / "merged")(IDS).logits
        base = kind.from_pretrained(folder, num_labels=labels, pad_token_id=2)
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits
    assert merged.abs().max() > 0.05 and (merged - adapted).abs().max() <= 1e-5
    assert (ours - merged).abs().max() <= (1e-5 if dtype == "float32" else 0.1)
