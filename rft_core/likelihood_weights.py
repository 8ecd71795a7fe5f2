"""Weights of pairs by how likely the policy itself is to write them (WPO, arXiv 2406.11827, section 3.3).

Shapes: T completion tokens of a micro-batch, flat; V vocabulary; N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_core.batching import MicroBatch, TrainRow
from rft_core.policy import Policy

Values = Mapping[tuple[str, int], Tensor]


def log_collision(logits_TV: Tensor, temperature: float) -> Tensor:
    """float32[T] log sum p^2: the logprob that a token drawn from p is expected to have, so to speak."""
    x_TV = logits_TV.float() / temperature
    return (2 * x_TV).logsumexp(-1) - 2 * x_TV.logsumexp(-1)


def log_collisions(policy: Policy, batch: MicroBatch, temperature: float) -> Tensor:
    """float32[T], of the distribution at each completion token; logits exist a few rows at a time."""
    with torch.no_grad():
        features_TX, head = policy.features(batch)
        (found_T,) = policy.in_pieces(lambda features: (log_collision(head(features), temperature),), features_TX)
    return found_T


def mean_alignment(completion: Sequence[TrainRow], current: Values, collisions: Values) -> float:
    """Mean over the trained tokens of lp - log sum p^2: 0 for what the policy would write itself, below 0 for less."""
    total, count = 0.0, 0
    for row in completion:
        mask = torch.from_numpy(row.trained_mask)
        gaps = current[row.key].detach().cpu().double() - collisions[row.key].cpu().double()
        total += float(gaps[mask].sum())
        count += row.num_trained_tokens
    return total / max(count, 1)


def pair_weights(
    chosen: Sequence[Sequence[TrainRow]], rejected: Sequence[Sequence[TrainRow]], current: Values, collisions: Values
) -> Tensor:
    """float64[N], without gradient: exp(alignment of chosen + that of rejected), at most 1."""
    aligned = [
        sum(mean_alignment(completion, current, collisions) for completion in pair)
        for pair in zip(chosen, rejected, strict=True)
    ]
    return torch.tensor(aligned, dtype=torch.float64).exp().clamp(max=1.0)
