"""AdamW over float32 master weights, the learning rate's schedule, and the global gradient norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_core.config import TrainingSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(training: TrainingSettings, optimizer_step: int, total_optimizer_steps: int) -> float:
    """Of an optimizer step, counted from 1. Warm-up reaches the peak at step `warmup_steps`; linear and cosine reach
    peak x min_learning_rate_ratio at the last step. Steps past the total stay there; constant ignores the total.

    >>> [learning_rate(TrainingSettings(learning_rate=1.0, warmup_steps=2), step, 0) for step in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    >>> [learning_rate(TrainingSettings(learning_rate=1.0, schedule="linear"), step, 4) for step in (1, 2, 4)]
    [0.75, 0.5, 0.0]
    """
    if optimizer_step <= training.warmup_steps:
        return training.learning_rate * optimizer_step / training.warmup_steps
    decaying = max(1, total_optimizer_steps - training.warmup_steps)
    progress = min(1.0, (optimizer_step - training.warmup_steps) / decaying)
    share = SCHEDULES[training.schedule](progress)
    return training.learning_rate * (training.min_learning_rate_ratio + (1 - training.min_learning_rate_ratio) * share)


class Weights(Protocol):
    """What is trained: float32 masters by name, and the weights that compute."""

    names: list[str]
    compute: list[torch.nn.Parameter]
    master: list[Tensor]

    def write_compute(self) -> None: ...


@dataclass
class Optimizer:
    """Decoupled weight decay (arXiv 1711.05101) on matrices only: vectors are norms and biases.

    A weight without a gradient counts as one with gradient 0, so that every weight's moments see the same steps.
    Settings come with each step: a replay of updates that were made under others uses theirs.
    """

    policy: Weights
    adamw: torch.optim.AdamW
    num_steps: int = 0  # that changed weights; skipped ones are not among them

    @classmethod
    def over(cls, policy: Weights) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in policy.master if weight.ndim >= 2], "is_decayed": True},
            {"params": [weight for weight in policy.master if weight.ndim < 2], "is_decayed": False},
        ]
        return cls(policy, torch.optim.AdamW([group for group in groups if group["params"]], fused=True))

    def grad_norm(self) -> float:
        """Global 2-norm of all gradients, in float32 per weight and float64 across; inf or NaN if a gradient is."""
        norms = torch._foreach_norm(self._gradients())
        return float(torch.linalg.vector_norm(torch.stack(norms).double()))

    def step(self, training: TrainingSettings, learning_rate: float, grad_norm: float) -> None:
        """Scale gradients down to the norm, step, and write the compute weights. Gradients are freed."""
        gradients = self._gradients()
        excess = max(1.0, grad_norm / training.max_grad_norm)
        # The fused step divides by it on its way, which saves a pass over all gradients.
        self.adamw.grad_scale = torch.tensor(excess, device=gradients[0].device) if excess > 1 else None
        for group in self.adamw.param_groups:
            group["lr"], group["eps"] = learning_rate, training.adam_epsilon
            group["betas"] = (training.beta1, training.beta2)
            group["weight_decay"] = training.weight_decay if group["is_decayed"] else 0.0
        self.adamw.step()
        self.num_steps += 1
        self.policy.write_compute()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        for weight in self.policy.master:
            weight.grad = None
        for weight in self.policy.compute:
            weight.grad = None

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg.NAME` and `exp_avg_sq.NAME`, float32; empty before the first step."""
        named = list(zip(self.policy.names, self.policy.master, strict=True))
        if not self.num_steps:
            return {}
        return {f"{kind}.{name}": self.adamw.state[weight][kind] for kind in MOMENTS for name, weight in named}

    def restore(self, moments: dict[str, Tensor], num_steps: int) -> None:
        """Put moments back as `moments()` gave them. Raises KeyError when one is missing."""
        self.adamw.state.clear()
        self.num_steps = num_steps
        if not num_steps:
            return
        for name, weight in zip(self.policy.names, self.policy.master, strict=True):
            state: dict[str, Tensor] = {"step": torch.tensor(float(num_steps), device=weight.device)}
            for kind in MOMENTS:
                state[kind] = moments[f"{kind}.{name}"].to(weight.device).clone()
            self.adamw.state[weight] = state

    def _gradients(self) -> list[Tensor]:
        for weight in self.policy.master:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [weight.grad for weight in self.policy.master if weight.grad is not None]


SCHEDULES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
