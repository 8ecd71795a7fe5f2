"""Runs of shipped recipes on a tiny model: what makes them small, and what is read from them afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data_contracts.ledger import Ledger
from data_contracts.store import Store

# A step of four groups of four; steps alone can be set otherwise.
SAMPLED = [
    "model.dtype=float32",
    "model.device=cpu",
    "data.size=60",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "training.learning_rate=0.003",
    "training.checkpoint_every=2",
    "evaluation.every=0",
    "execution.threads=1",
    "execution.retries=0",
]
# Two steps in seconds, and a learning rate that moves the weights of a tiny model.
SMALL = [
    "steps=2",
    "model.dtype=float32",
    "model.device=cpu",
    "training.learning_rate=0.003",
    "execution.threads=1",
    "execution.retries=0",
]
Row = dict[str, Any]


def table(root: Path, step: int, stage: str, record: str | None = None, name: str = "x") -> list[Row]:
    entry = Ledger(root / "runs" / name).get("main", step, stage)
    return Store(str(root)).read(entry.refs[record or stage]).to_pylist()


def rows(root: Path, step: int = 1) -> list[Row]:
    """Rollouts with their rewards and credit."""
    merged: dict[str, Row] = {}
    for stage in ("rollouts", "rewards", "advantages"):
        for row in table(root, step, stage):
            merged.setdefault(row["rollout_id"], {}).update(row)
    return list(merged.values())


def logprobs(module: Any, row: Row) -> torch.Tensor:
    """Of the completion's trained tokens, by the model itself."""
    ids = torch.tensor([*row["prompt_token_ids"], *row["completion_token_ids"]])
    with torch.no_grad():
        scores = module(ids[None]).logits[0].double().log_softmax(-1)
    of_targets = scores[:-1].gather(1, ids[1:, None])[:, 0][len(row["prompt_token_ids"]) - 1 :]
    return of_targets[torch.tensor(row["completion_mask"])]


def checkpoint(root: Path, name: str = "x") -> Path:
    """The folder of the run's last one."""
    policy = Ledger(root / "runs" / name).entries("checkpoint")[-1].policy
    assert policy is not None
    return root / "checkpoints" / policy.policy_id


def weights_digest(root: Path, name: str = "x") -> str:
    return json.loads((checkpoint(root, name) / "manifest.json").read_text())["weights_digest"]


def moved(root: Path, model: Path, kind: Any = AutoModelForCausalLM, name: str = "x") -> float:
    """By how much the weight that moved most did."""
    after = kind.from_pretrained(checkpoint(root, name)).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    return max((after[part] - before[part]).abs().max().item() for part in before.keys() & after.keys())
