"""Pairs and labelled completions of chosen numbers, as our sides and as the oracle's completions."""

from __future__ import annotations

import numpy as np
import torch

from rft_core.preference import Side
from tests.oracle.preference import Completion, mpf

# (chosen policy, chosen reference, chosen tokens, rejected policy, rejected reference, rejected tokens, margin)
Pair = tuple[float, float, int, float, float, int, float]


def _ordinary() -> list[Pair]:
    generator = np.random.default_rng(5)
    pairs = []
    for _ in range(7):
        (c, j), (move_c, move_j) = -generator.uniform(3, 60, 2), generator.normal(0, 3, 2)
        lengths = generator.integers(2, 30, 2)
        pairs.append((c, c - move_c, int(lengths[0]), j, j - move_j, int(lengths[1]), float(generator.uniform(0, 1))))
    return pairs


# Averages from -1e-11 to -1, above, at and below ln 2; the last pair's rejected is nearly certain.
NEAR_0 = (-1e-11, -1e-9, -1e-4, -0.5, -0.6931471, -0.6932, -1.0)
EXTREME = (-3000.0, -300.0, -21.0, -1e-7, 1e-7, 21.0, 300.0, 3000.0)
SITUATIONS: dict[str, list[Pair]] = {
    "ordinary": _ordinary(),
    "one_pair": _ordinary()[:1],
    "policy_is_reference": [(c, c, n, j, j, m, margin) for c, _, n, j, _, m, margin in _ordinary()],
    "equal_sides": [(c, c - 1.0, n, c, c - 1.0, n, 0.0) for c, _, n, _, _, _, _ in _ordinary()],
    "near_0": [(a * 4, -2.0, 4, b * 3, -1.5, 3, 0.0) for a, b in zip(NEAR_0, NEAR_0[::-1], strict=True)],
    "extreme": [
        (-4000.0 + c, -4000.0, 47, -3500.0 + j, -3500.0, 41, 0.0)
        for c, j in zip(EXTREME, (EXTREME[3], *EXTREME[::-1][1:]), strict=True)
    ],
    "unlikely_chosen": [(-9000.0, -20.0, 9, -15.0, -9.0, 8, 0.0), (-30.0, -20.0, 9, -9000.0, -9.0, 700, 0.0)],
}


def sides_of(pairs: list[Pair], num_rejected: int | None = None) -> tuple[Side, Side]:
    made = []
    for completions in _completions(pairs, num_rejected):
        made.append(
            Side(
                policy=_tensor([each[0] for each in completions]).requires_grad_(),
                reference=_tensor([each[1] for each in completions]),
                length=_tensor([each[2] for each in completions]),
                margin=_tensor([each[3] for each in completions]),
            )
        )
    return made[0], made[1]


def oracle_of(pairs: list[Pair], num_rejected: int | None = None) -> tuple[list[Completion], list[Completion]]:
    chosen, rejected = (
        [Completion(mpf(policy), mpf(reference), length, margin) for policy, reference, length, margin in completions]
        for completions in _completions(pairs, num_rejected)
    )
    return chosen, rejected


def _completions(pairs: list[Pair], num_rejected: int | None):
    chosen = [(pair[0], pair[1], pair[2], pair[6]) for pair in pairs]
    rejected = [(pair[3], pair[4], pair[5], 0.0) for pair in pairs]
    return chosen, rejected[:num_rejected]


def _tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
