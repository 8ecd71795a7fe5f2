"""Runs our loss on the rows of the oracle's example step, split into micro-batches as asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rft_core.losses import ROW_KINDS, Denominators, LossBatch, denominators_of
from rft_core.objective import finish_metrics, step_kept
from rft_core.terms import Algorithm, Correction, Kl, Term
from tests.oracle import losses as oracle
from tests.oracle.steps import MAX_COMPLETION_TOKENS, Row, initial_weights, logprobs_of

# Settings beyond one name of a table.
EXTRAS = {
    "dual_clip": {"dual_clip": 1.5},
    "asymmetric_clip": {"clip_low": 0.1, "clip_high": 0.28},
    "kl": {"kl_coefficient": 0.5},
    "kl_importance": {"kl_coefficient": 0.5, "kl_importance": True},
    "entropy": {"entropy_coefficient": 0.3},
    "sequence_weight": {"correction_level": "sequence_geometric"},
    "sequence_weight_sum": {"correction_level": "sequence_product"},
    "sequence_mask": {"correction": "mask", "correction_level": "sequence_geometric"},
    "gspo_like": {"level": "sequence_geometric", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "gated_ratio": {"surrogate": "log_ratio", "gate": "two_side", "gate_low": 0.1, "gate_high": 0.3},
    "behaviour_anchor": {"anchor": "behaviour", "surrogate": "clipped"},
    "capped_both_ways": {"surrogate": "capped", "weight_floor": 0.9, "weight_cap": 1.1},
    "early_geometric_clip": {
        "level": "sequence_geometric_clipped",
        "log_ratio_bound": 0.1,
        "surrogate": "unclipped",
        "aggregation": "sequence_mean",
    },
    "capped_sequence": {"surrogate": "capped", "level": "sequence_product", "aggregation": "sequence_sum"},
    "likelihood_rejected": {"surrogate": "capped", "correction": "reject"},
    "likelihood_sequence_weight": {"surrogate": "ratio_logprob", "correction_level": "sequence_geometric"},
    "veto": {"correction": "veto", "correction_low": 0.4, "correction_high": 2.5},
    "old_drift": {"gate": "off_policy_sequence", "off_policy_limit": 0.05},
    "regularized_gate": {
        "gate": "two_side",
        "surrogate": "ratio_logprob",
        "regularizer": "squared_log_ratio",
        "regularizer_coefficient": 0.2,
    },
    "tau": {"surrogate": "logprob", "tau": 3.0},
    "anchored_second_moment": {"gate": "second_moment", "anchor": "behaviour", "surrogate": "unclipped"},
    "half_of_entropies": {"gate": "entropy_quantile", "entropy_quantile": 0.5, "aggregation": "sequence_mean"},
    "wide_band": {
        "gate": "covariance_band",
        "covariance_low": 0.1,
        "covariance_high": 0.9,
        "covariance_share": 0.9,
    },
    "held_covariance": {
        "regularizer": "absolute_log_ratio",
        "regularizer_coefficient": 0.7,
        "regularizer_gate": "covariance_top",
        "covariance_top_share": 0.3,
        "surrogate": "unclipped",
    },
    "kl_clamp": {"kl_coefficient": 0.5, "kl_value_clamp": 0.02},
    "tight_divergence": {"gate": "binary_tv", "anchor": "behaviour", "divergence_limit": 0.02},
}
# What the entry of a table needs beside its name to have an effect.
NEEDED = {
    "kl_estimator": {"kl_coefficient": 0.4},
    "regularizer": {"regularizer_coefficient": 0.3},
    "gate=binary_tv": {"anchor": "behaviour", "divergence_limit": 0.05},
    "gate=binary_kl": {"anchor": "behaviour", "divergence_limit": 0.01},
    "gate=covariance_band": {"covariance_low": 0.1},
    "level=sequence_geometric": {"aggregation": "sequence_mean"},
}


def denominators(rows: list[Row]) -> Denominators:
    return denominators_of(
        [int(row.trained.sum()) for row in rows],
        [row.group for row in rows],
        MAX_COMPLETION_TOKENS,
        [row.weight for row in rows],
        [row.term for row in rows],
    )


def batch_of(rows: list[Row], logprobs: torch.Tensor, entropies: torch.Tensor) -> LossBatch:
    def flat(values: list[np.ndarray]) -> torch.Tensor:
        return torch.tensor(np.concatenate(values), dtype=torch.float32)

    return LossBatch(
        logprobs_T=logprobs,
        advantages_T=flat([np.where(row.mask, row.advantage, np.nan) for row in rows]),
        mask_T=torch.tensor(np.concatenate([row.trained for row in rows])),
        row_T=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.mask) for row in rows])),
        off_policy_R=torch.tensor([row.is_off_policy for row in rows]),
        weight_R=torch.tensor([row.weight for row in rows], dtype=torch.float32),
        group_R=torch.tensor([row.group for row in rows]),
        old_logprobs_T=None if rows[0].old is None else flat([row.old for row in rows]),
        behaviour_logprobs_T=flat([row.behaviour for row in rows]),
        reference_logprobs_T=flat([row.reference for row in rows]),
        entropy_T=entropies,
        term_R=torch.tensor([ROW_KINDS.index(row.term) for row in rows]),
    )


def hand_batch(logprobs, advantages, *, mask=None, rows=None, groups=None, off_policy=False, **optional) -> LossBatch:
    """A batch of literal numbers: one row unless `rows` says otherwise."""
    count = len(logprobs)
    row_T = torch.tensor(rows or [0] * count)
    num_rows = int(row_T.max()) + 1
    return LossBatch(
        logprobs_T=torch.tensor(logprobs, requires_grad=True),
        advantages_T=torch.tensor(advantages),
        mask_T=torch.tensor(mask or [True] * count),
        row_T=row_T,
        off_policy_R=torch.full((num_rows,), off_policy),
        weight_R=torch.ones(num_rows),
        group_R=torch.tensor(groups or [0] * num_rows),
        **{name: torch.tensor(values) for name, values in optional.items()},
    )


def scored_batch(rows: list[Row], weights: torch.Tensor) -> LossBatch:
    scored = [logprobs_of(row, weights) for row in rows]
    logprobs, entropies = (torch.cat([pair[part] for pair in scored]).float() for part in (0, 1))
    return batch_of(rows, logprobs, entropies)


def kept_by_step_gate(algorithm: Algorithm, parts: list[list[Row]], weights: torch.Tensor) -> list[torch.Tensor | None]:
    if algorithm.step_gate is None:
        return [None] * len(parts)
    with torch.no_grad():
        batches = [scored_batch(rows, weights) for rows in parts]
    draws = [torch.tensor(np.concatenate([row.draws for row in rows])) for rows in parts]
    return step_kept(algorithm, batches, draws)


def ours(algorithm: Algorithm, rows: list[Row], splits: list[list[int]] | None = None, step: int = 1):
    """(loss, gradient to the model's weights, metrics), accumulated over micro-batches in float32."""
    weights = initial_weights()
    total, sums = 0.0, []
    over = denominators(rows)
    chosen = [[rows[number] for number in numbers] for numbers in splits or [list(range(len(rows)))]]
    for part, kept in zip(chosen, kept_by_step_gate(algorithm, chosen, weights), strict=True):
        batch = replace(scored_batch(part, weights), step_kept_T=kept)
        parts = algorithm.loss(batch, over, step)
        parts.loss.backward()
        total += parts.loss.item()
        sums.append(parts.sums)
    return total, weights.grad, finish_metrics(sums)


def expected(spec: dict, rows: list[Row]):
    """(loss, gradient) of the oracle, on the same float32 logprobs."""
    weights = initial_weights()
    scored = [logprobs_of(row, weights) for row in rows]
    loss = oracle.step_loss(rows, [pair[0].float().double() for pair in scored], [pair[1] for pair in scored], spec)
    loss.backward()
    return loss.item(), weights.grad


def algorithm_of(spec: dict) -> Algorithm:
    values = oracle.DEFAULTS | spec
    term_names = set(Term.__dataclass_fields__) & set(values)
    return Algorithm(
        name="test",
        source="",
        advantage="none",
        terms=(Term(**{name: values[name] for name in term_names}),),
        kl=Kl(values["kl_coefficient"], values["kl_estimator"], values["kl_importance"], values["kl_value_clamp"]),
        entropy_coefficient=values["entropy_coefficient"],
        correction=Correction(
            values["correction"],
            values["correction_level"],
            values["correction_cap"],
            values["correction_low"],
            values["correction_high"],
        ),
    )


def assert_close(loss, gradient, wanted_loss, wanted_gradient, tolerance=1e-6):
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert loss == pytest.approx(wanted_loss, rel=3e-6, abs=1e-6)
    assert (gradient - wanted_gradient).abs().max() <= tolerance * max(wanted_gradient.abs().max().item(), 1e-12)


def assert_any_split_agrees(algorithm: Algorithm, rows: list[Row]) -> None:
    """Loss, gradient and metrics of the step, whatever micro-batches it is cut into."""
    loss, gradient, metrics = ours(algorithm, rows)
    for seed in range(3):
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(rows))
        cuts = sorted(generator.choice(np.arange(1, len(rows)), size=seed + 2, replace=False))
        splits = [part.tolist() for part in np.split(order, cuts)]
        split_loss, split_gradient, split_metrics = ours(algorithm, rows, splits)
        assert_close(split_loss, split_gradient, loss, gradient)
        for column, value in metrics.items():
            near = value if value is None else pytest.approx(value, rel=2e-6, abs=1e-7)
            assert split_metrics[column] == near, column
