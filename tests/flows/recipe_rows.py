"""What a recipe's run left, put together for tests, and what the Hugging Face model itself says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_contracts.ledger import Ledger
from data_contracts.store import Store

Row = dict[str, Any]
# Two steps in seconds, and a learning rate that moves the weights of a tiny model.
SMALL = [
    "steps=2",
    "model.dtype=float32",
    "model.device=cpu",
    "training.learning_rate=0.003",
    "execution.threads=1",
    "execution.retries=0",
]


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
    """Of the completion's trained tokens."""
    ids = torch.tensor([*row["prompt_token_ids"], *row["completion_token_ids"]])
    with torch.no_grad():
        scores = module(ids[None]).logits[0].double().log_softmax(-1)
    of_targets = scores[:-1].gather(1, ids[1:, None])[:, 0][len(row["prompt_token_ids"]) - 1 :]
    return of_targets[torch.tensor(row["completion_mask"])]
