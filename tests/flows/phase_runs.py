"""Runs of the shipped recipes with phases on a tiny model, two steps a phase, and what is read of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.train import train
from rft_core.recipes import load_recipe
from tests.flows.small_runs import Row

SMALL = [
    "model.dtype=float32",
    "model.device=cpu",
    "phases.0.steps=2",
    "phases.1.steps=2",
    "phases.0.rollout.prompts_per_step=6",
    "phases.1.rollout={prompts_per_step: 4, group_size: 4, max_completion_tokens: 6, block_groups: 2}",
    "phases.1.data.size=40",
    "phases.0.training.learning_rate=0.003",
    "phases.1.training.learning_rate=0.003",
    "phases.0.evaluation={every: 2, prompts: 4}",
    "phases.1.evaluation={every: 2, prompts: 2, samples: 1, pass_at: [1]}",
    "phases.1.algorithm.kl_coefficient=0.1",
    "execution.threads=1",
    "execution.retries=0",
]
VARIED = """
def varied(rows):
    return [len(set(row.completion_text)) / 10 for row in rows]
"""
CORRECT = "phases.1.evaluation.correct_component=numeric_answer"


def run(root: Path, model: Path, recipe: str, *overrides: str, name: str = "x") -> None:
    root.mkdir(exist_ok=True)
    (root / "varied.py").write_text(VARIED)
    varied = f"phases.1.reward.functions.0={{name: custom, path: {root}/varied.py:varied}}"
    judge = ["phases.1.reward.functions.0.reward_model.dtype=float32", CORRECT]
    rewards = [varied] if recipe == "sft_then_grpo" else judge
    chosen = load_recipe(recipe, [*SMALL, f"model.path={model}", *rewards, *overrides])
    train(recipe=chosen, run=name, root=str(root))


def table(root: Path, phase: str, step: int, stage: str, record: str | None = None, name: str = "x") -> list[Row]:
    entry = Ledger(root / "runs" / name).get(phase, step, stage)
    return Store(str(root)).read(entry.refs[record or stage]).to_pylist()


def policy(root: Path, phase: str, step: int = 2, name: str = "x") -> str:
    return Ledger(root / "runs" / name).get(phase, step, "update").policy.policy_id


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def distance(one: Path, other: Path) -> float:
    before, after = weights(one), weights(other)
    return max(float((after[name] - before[name]).abs().max()) for name in before.keys() & after.keys())
