"""Everything that an update changes, and a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rft_core.critic import Critic
from rft_core.optimizer import Optimizer
from rft_core.policy import Policy
from rft_core.preference_step import RunningShift, ScoreStatistics


@dataclass
class TrainState:
    """Counters are of the whole run."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None = None
    optimizer_step: int = 0  # rows of record `updates` so far: steps taken and skipped
    skipped_in_a_row: int = 0  # for a non-finite loss or gradient
    shift: RunningShift = field(default_factory=RunningShift)
    scores: ScoreStatistics = field(default_factory=ScoreStatistics)
    kl_coefficient: float | None = None  # where it adapts, after the first update: that of the next one
    entropy_coefficient: float | None = None  # likewise
    ema: list[Tensor] | None = None  # float32, moving averages of policy.master, in its order; None keeps none

    @classmethod
    def start(cls, policy: Policy, critic: Critic | None = None) -> TrainState:
        return cls(policy, Optimizer.over(policy), critic)

    def begin_ema(self, decay: float | None) -> None:
        """The average starts as the weights are where one is wanted first, and ends where none is."""
        if decay is None:
            self.ema = None
        elif self.ema is None:
            self.ema = [master.detach().clone() for master in self.policy.master]

    def advance_ema(self, decay: float | None) -> None:
        if decay is not None and self.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, self.policy.master, 1 - decay)

    def take_ema(self) -> None:
        """The average as the weights, for export. Training cannot go on from there."""
        if self.ema is None:
            raise ValueError("the state must hold a moving average of its weights, it has none")
        with torch.no_grad():
            torch._foreach_copy_(self.policy.master, self.ema)
        self.policy.write_compute()
