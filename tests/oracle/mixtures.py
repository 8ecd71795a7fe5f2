"""Rows with experts or a selection, as sums of losses over their kinds of rows. Imports nothing of ours."""

from __future__ import annotations

import math

import torch

from tests.oracle.losses import step_loss
from tests.oracle.steps import Row

_GRPO = {"aggregation": "sequence_mean"}

# Kind of rows -> spec of its loss.
ALGORITHMS = {
    "mix": {"own": _GRPO, "expert": {"surrogate": "logprob", "correction": "none"}},
    "chord": {"own": _GRPO, "expert": {"surrogate": "uncertainty_weighted", "correction": "none"}},
    "raft": {"selected": {"surrogate": "logprob"}},
}


def mu(step: int, valley: float = 0.1, peak: float = 0.1, warmup: int = 0, decay: int = 0) -> float:
    """Weight of the experts in a step, from 1."""
    if step < warmup:
        return peak * step / warmup
    if step < warmup + decay:
        return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
    return valley


def loss(name: str, rows: list[Row], logprobs: list[torch.Tensor], entropies: list[torch.Tensor], share: float):
    """Loss of the whole optimizer step, each kind of rows with denominators of its own; a kind without a trained token
    adds nothing."""
    specs = ALGORITHMS[name]
    total = torch.zeros((), dtype=torch.float64)
    for kind, spec in specs.items():
        chosen = [number for number, row in enumerate(rows) if row.term == kind]
        if not any(rows[number].trained.any() for number in chosen):
            continue
        part = step_loss(*([values[number] for number in chosen] for values in (rows, logprobs, entropies)), spec)
        weight = 1.0 if len(specs) == 1 else share if kind == "expert" else 1 - share
        total = total + weight * part
    return total
