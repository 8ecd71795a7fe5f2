"""Our losses on padded rows of literal numbers, as public tests write them; "NaN" and null are texts of the cases."""

from __future__ import annotations

import math

import numpy as np
import torch

from rft_core.losses import CORRECTIONS, LEVELS, LossBatch, Rows, denominators_of, ratio_of
from rft_core.objective import finish_metrics
from rft_core.surrogates import SURROGATES, Tokens
from rft_core.terms import Algorithm, Correction, Kl, Term


def tensor(values) -> torch.Tensor:
    return torch.tensor([math.nan if value in (None, "NaN", "null") else float(value) for value in values])


def algorithm(kl=None, correction=None, **term) -> Algorithm:
    return Algorithm("case", "", "none", (Term(**term),), kl=kl or Kl(), correction=correction or Correction())


def run(algorithm, advantages, mask, *, logprobs=None, groups=None, budget=16, micro=None, off_policy=False, **others):
    """(loss, metrics, gradient) of padded rows; `micro` lists row numbers of each micro-batch, over one step."""
    width = [len(row) for row in mask]
    logprobs = logprobs or [[-1.0] * count for count in width]
    groups = groups or list(range(len(mask)))
    over = denominators_of([sum(map(bool, row)) for row in mask], groups, budget)
    flat = torch.cat([tensor(row) for row in logprobs]).requires_grad_()
    starts = np.cumsum([0, *width])
    total, sums = 0.0, []
    for rows in micro or [range(len(mask))]:
        take = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
        given = {name: torch.cat([tensor(values[row]) for row in rows]) for name, values in others.items()}
        batch = LossBatch(
            flat[take],
            torch.cat([tensor(advantages[row]) for row in rows]),
            torch.cat([tensor(mask[row]).bool() for row in rows]),
            torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([width[row] for row in rows])),
            torch.full((len(rows),), off_policy),
            torch.ones(len(rows)),
            torch.tensor([groups[row] for row in rows]),
            **given,
        )
        parts = algorithm.loss(batch, over, 1)
        parts.loss.backward()
        total += parts.loss.item()
        sums.append(parts.sums)
    return total, finish_metrics(sums), flat.grad.tolist()


def aggregated(aggregation, losses, mask, **rest):
    """The aggregation of given token losses: on-policy the ratio is 1, so A = -loss."""
    negated = [[-float(value) for value in row] for row in losses]
    return run(algorithm(aggregation=aggregation), negated, mask, **rest)[0]


def surrogate(name, ratios, advantages, **term):
    ratio, advantage = tensor(ratios), tensor(advantages)
    zeros = torch.zeros_like(ratio)
    return SURROGATES[name](Tokens(ratio.log(), zeros, ratio, advantage, zeros), Term(**term)).tolist()


def weights(log_ratios, kind="truncate", level="token", mask=None, **limits):
    kept = tensor(mask or [1] * len(log_ratios)).bool()
    rows = Rows.of(kept, torch.zeros(len(log_ratios), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    gaps = torch.where(kept, tensor(log_ratios), torch.zeros(len(log_ratios)))
    ratio = ratio_of(LEVELS[level](gaps, rows, torch.ones_like(gaps), math.inf))
    return CORRECTIONS[kind](ratio, rows, Correction(kind, **limits)).tolist()


def difference(left, right):
    return [float(a) - float(b) for a, b in zip(left, right, strict=True)]


def repeat(values, rows):
    return [[value] * len(row) for value, row in zip(values, rows, strict=True)]
