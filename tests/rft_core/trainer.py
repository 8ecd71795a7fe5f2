"""A tiny policy in training, for the tests of updates."""

from __future__ import annotations

import torch

from data_contracts.schemas import UPDATES
from rft_core.config import AlgorithmSettings, ModelSettings, RolloutSettings, TrainingSettings
from rft_core.policy import Policy, load_reference
from rft_core.resolve import resolve_algorithm
from rft_core.update import TrainState, update_policy
from tests.rft_core.update_tables import ROOT


class Trainer:
    """A tiny policy and its settings; `update` gives the rows of the updates table."""

    def __init__(self, folder, algorithm=None, model=None, **training):
        self.model = ModelSettings(path=str(folder), **{"device": "cpu", "dtype": "float32", **(model or {})})
        self.training = TrainingSettings(**{"learning_rate": 1e-2, **training})
        self.algorithm = AlgorithmSettings(**(algorithm or {}))
        self.state = TrainState.start(Policy.load(self.model, folder, seed=0))
        self.reference = (
            load_reference(self.model, folder, self.state.policy)
            if resolve_algorithm(self.algorithm).needs_reference
            else None
        )
        self.seen = []

    def update(self, rollouts, advantages, before=ROOT):
        table = update_policy(
            self.state,
            rollouts,
            advantages,
            algorithm=self.algorithm,
            training=self.training,
            rollout=RolloutSettings(max_completion_tokens=12, temperature=0.9),
            before=before,
            reference=self.reference,
            seed=7,
            total_steps=0,
            progress=lambda done, total, note: self.seen.append((done, total, note)),
        )
        assert table.schema == UPDATES.schema
        return table.to_pylist()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [master.detach().clone() for master in self.state.policy.master]


def gradient(trainer: Trainer, rollouts, advantages) -> tuple[torch.Tensor, list[dict]]:
    """The flat gradient that the optimizer was given: caught between accumulation and step."""
    optimizer, caught = trainer.state.optimizer, []
    kept = optimizer.adamw.step
    optimizer.adamw.step = lambda: caught.append(torch.cat([w.grad.flatten() for w in trainer.state.policy.master]))
    rows = trainer.update(rollouts, advantages)
    optimizer.adamw.step = kept
    return caught[0], rows
