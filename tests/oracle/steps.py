"""One optimizer step of a linear-softmax model, small enough to check by loops. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

FEATURES, VOCABULARY, TEMPERATURE, MAX_COMPLETION_TOKENS = 5, 11, 0.8, 12


@dataclass(frozen=True)
class Row:
    """A rollout; arrays run over its completion tokens. NaN in `behaviour` stands for null."""

    features: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    old: np.ndarray | None
    behaviour: np.ndarray
    reference: np.ndarray
    advantage: float
    group: int
    is_trained: bool = True
    is_off_policy: bool = False
    weight: float = 1.0
    term: str = "own"
    draws: np.ndarray | None = None  # a number in [0, 1) of each token, for gates that choose

    @property
    def trained(self) -> np.ndarray:
        return self.mask if self.is_trained else np.zeros_like(self.mask)


def initial_weights(seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.tensor(generator.normal(0, 0.6, (FEATURES, VOCABULARY)), requires_grad=True)


def logprobs_of(row: Row, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) of a row, float64 with gradients to the weights."""
    logits = torch.tensor(row.features) @ weights / TEMPERATURE
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, torch.tensor(row.targets)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@cache
def example_step(
    *, off_policy: bool, several_steps: bool, extreme: bool = False, has_nulls: bool = True, seed: int = 3
) -> list[Row]:
    """Ragged rows with masked gaps: a full group, one with an all-masked and an untrained (unscored) member, one of
    equal rewards (advantage 0), a singleton, a row cut at the length limit, a row of weight 2. Masked positions hold
    NaN and infinities; without `has_nulls` every trained token has a behaviour logprob."""
    generator = np.random.default_rng(seed)
    lengths = [3, 7, 1, 5, 4, 6, 2, 5, 3, MAX_COMPLETION_TOKENS]
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 3, 4]
    advantages = [1.3, -0.4, -0.9, 0.7, -0.7, 0.0, 0.0, 0.0, 0.0, -1.1]
    weights = initial_weights()
    rows = []
    for number, (length, group, advantage) in enumerate(zip(lengths, groups, advantages, strict=True)):
        row = Row(
            features=generator.normal(size=(length, FEATURES)),
            targets=generator.integers(VOCABULARY, size=length),
            mask=np.ones(length, dtype=bool),
            old=None,
            behaviour=np.zeros(length),
            reference=np.zeros(length),
            advantage=advantage,
            group=group,
            is_trained=number != 5,
            is_off_policy=off_policy and number % 3 != 1,
            weight=2.0 if number == 3 else 1.0,
        )
        now = logprobs_of(row, weights)[0].detach().numpy()
        row.mask[generator.random(length) < 0.25] = False
        row.mask[0] = True
        row.mask[:] &= number != 4
        old = now + generator.normal(0, 0.25, length)
        behaviour = (old if several_steps else now) + generator.normal(0, 0.4, length)
        if extreme and number in (0, 1, 3, 9):
            old[0], behaviour[0] = now[0] + (60.0 if number % 2 else -60.0), now[0] - 1000.0
        is_null = generator.random(length) < 0.1
        behaviour[is_null & has_nulls] = np.nan
        reference = now + generator.normal(0, 0.5, length) - (45.0 if extreme and number == 0 else 0.0)
        poison = np.where(np.arange(length) % 2, np.nan, np.inf)
        old, behaviour, reference = (np.where(row.mask, values, poison) for values in (old, behaviour, reference))
        rows.append(
            replace(
                row,
                old=_float32(old) if several_steps else None,
                behaviour=_float32(behaviour),
                reference=_float32(reference),
                draws=np.random.default_rng(number).random(length),
            )
        )
    return rows


def _float32(values: np.ndarray) -> np.ndarray:
    """Rounded, so that the oracle and the code under test read the same numbers."""
    return values.astype(np.float32).astype(np.float64)
