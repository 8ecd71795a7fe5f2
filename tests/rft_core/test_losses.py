"""Every entry of every table of losses: value and gradient against the float64 oracle, and one number by hand."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from rft_core.algorithms import ALGORITHMS, Correction, Term
from rft_core.config import AlgorithmSettings
from rft_core.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    GATES,
    KL_ESTIMATORS,
    LEVELS,
    SURROGATES,
    Rows,
    Tokens,
    denominators_of,
    ratio_of,
)
from tests.oracle import losses as oracle
from tests.oracle.steps import example_step
from tests.rft_core.loss_batches import EXTRAS, algorithm_of, assert_close, expected, ours

TABLES = {
    "level": (LEVELS, oracle.LEVELS),
    "gate": (GATES, oracle.GATES),
    "surrogate": (SURROGATES, oracle.SURROGATES),
    "aggregation": (AGGREGATIONS, oracle.AGGREGATIONS),
    "kl_estimator": (KL_ESTIMATORS, oracle.KL_ESTIMATORS),
    "correction": (CORRECTIONS, oracle.CORRECTIONS),
}

SITUATIONS = {
    "on_policy": {"off_policy": False, "several_steps": False},
    "several_steps": {"off_policy": False, "several_steps": True},
    "off_policy": {"off_policy": True, "several_steps": False},
    "off_policy_several_steps": {"off_policy": True, "several_steps": True},
    "extreme": {"off_policy": True, "several_steps": True, "extreme": True},
}


def specs() -> dict[str, dict]:
    """One spec per entry of each table, so that a new entry is tested without touching this file."""
    entries = {
        f"{slot}={name}": {slot: name, **({"kl_coefficient": 0.4} if slot == "kl_estimator" else {})}
        for slot, (table, _) in TABLES.items()
        for name in table
    }
    return entries | EXTRAS | {f"algorithm={name}": oracle.ALGORITHMS.get(name, {}) for name in ALGORITHMS}


@pytest.mark.parametrize("slot", TABLES)
def test_table_oracle_and_settings_name_the_same_set(slot):
    table, oracle_table = TABLES[slot]
    assert set(table) == set(oracle_table) == set(BY_HAND[slot])
    annotation = AlgorithmSettings.model_fields[slot].annotation
    literals = {name for part in (get_args(annotation) or (annotation,)) for name in (get_args(part) or (part,))}
    names = {name for name in literals if isinstance(name, str)}
    assert names == set(table) - ({"k1"} if slot == "kl_estimator" else set())


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", specs())
def test_value_and_gradient_equal_the_oracle(name, situation):
    rows = example_step(**SITUATIONS[situation])
    spec = specs()[name]
    algorithm = algorithm_of(spec)
    if name.startswith("algorithm="):
        algorithm = ALGORITHMS[name.removeprefix("algorithm=")]
    loss, gradient, _ = ours(algorithm, rows)
    assert_close(loss, gradient, *expected(spec, rows))


@pytest.mark.parametrize("name", specs())
def test_any_split_into_micro_batches_gives_the_same_step(name):
    rows = example_step(off_policy=True, several_steps=True)
    algorithm = algorithm_of(specs()[name])
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


# One number by hand per entry: (inputs, value).

ROWS = Rows.of(torch.tensor([True, True, False]), torch.tensor([0, 0, 1]), torch.tensor([0, 1]))
BOUNDS = Term(clip_low=0.2, clip_high=0.3)
LIMITS = Correction(cap=2.0, low=0.5, high=5.0)
BY_HAND = {
    # log ratios .2 and .4, the third token masked: mean .3, sum .6
    "level": {"token": [0.2, 0.4], "sequence_geometric": [0.3, 0.3], "sequence_product": [0.6, 0.6]},
    # (ratio, A): (1.5, 1) (1.5, -1) (.1, 1) (.1, -1) (4, -1) (1.1, 1)
    "gate": {
        "none": [True] * 6,
        "one_side": [False, True, True, False, True, True],
        "two_side": [False, False, False, False, False, True],
        "ring": [False, False, True, False, True, True],
    },
    # ratio 1.5, lp -1, old -1.4, A = 2
    "surrogate": {"clipped": -2.6, "unclipped": -3.0, "logprob": 2.0, "log_ratio": -0.8},
    # losses 1 2 3 | 6 | 4 4 of rows in groups 0 0 1, budget 10. Tokens 6, rows 3, prompts 2, sum 20.
    # sequence means 2, 6, 4; prompt means 12 / 4 = 3 and 4.
    "aggregation": {
        "token_mean": 20 / 6,
        "sequence_mean": 4.0,
        "sequence_sum": 20 / 3,
        "constant_length": 20 / 30,
        "prompt_mean": 3.5,
        "token_sum": 20.0,
    },
    # d = ln 2: k3 = 1/2 - 1 + .6931
    "kl_estimator": {"k1": 0.6931472, "k2": 0.2402265, "k3": 0.1931472, "abs": 0.6931472, "k2_gradient": 0.1931472},
    # ratios .4 .8 6
    "correction": {"none": [1.0, 1.0, 1.0], "truncate": [0.4, 0.8, 2.0], "mask": [0.0, 0.8, 0.0]},
}


def hand_value(slot: str, name: str):
    if slot == "level":
        return LEVELS[name](torch.tensor([0.2, 0.4, 9.0]), ROWS)[:2]
    if slot == "gate":
        ratios, advantages = torch.tensor([1.5, 1.5, 0.1, 0.1, 4.0, 1.1]), torch.tensor([1.0, -1, 1, -1, -1, 1])
        return GATES[name](ratios, advantages, Term())
    if slot == "surrogate":
        tokens = Tokens(torch.tensor([-1.0]), torch.tensor([-1.4]), torch.tensor([1.5]), torch.tensor([2.0]))
        return SURROGATES[name](tokens, BOUNDS)[0]
    if slot == "aggregation":
        row_T, group_R = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 1])
        rows = Rows.of(torch.ones(6, dtype=torch.bool), row_T, group_R)
        counts = denominators_of([3, 1, 2], [0, 0, 1], 10).counts["own"]
        return AGGREGATIONS[name](torch.tensor([1.0, 2, 3, 6, 4, 4]), rows, counts, 10)
    if slot == "kl_estimator":
        return KL_ESTIMATORS[name](torch.tensor(math.log(2.0)))
    return CORRECTIONS[name](torch.tensor([0.4, 0.8, 6.0]), LIMITS)


@pytest.mark.parametrize(("slot", "name"), [(slot, name) for slot, (table, _) in TABLES.items() for name in table])
def test_numbers_by_hand(slot, name):
    assert torch.as_tensor(hand_value(slot, name)).tolist() == pytest.approx(BY_HAND[slot][name], rel=1e-5)


def test_ratio_is_clamped_and_the_pull_vanishes():
    log_ratios = torch.tensor([1000.0, -1000.0, 0.0], requires_grad=True)
    ratios = ratio_of(log_ratios)
    assert ratios.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0), 1.0])
    ratios.sum().backward()
    assert log_ratios.grad.tolist() == [0.0, 0.0, 1.0]


def test_groups_and_rows_without_a_trained_token_count_nowhere():
    # Rows of 2, 0, 0, 3 tokens in groups 0, 0, 1, 2; the last counts twice.
    counts = denominators_of([2, 0, 0, 3], [0, 0, 1, 2], 8, weight_N=[1.0, 1.0, 1.0, 2.0]).counts["own"]
    assert (counts.tokens, counts.rows, counts.prompts, counts.group_tokens) == (8.0, 3.0, 2.0, (2.0, 0.0, 6.0))
    assert denominators_of([], [], 8).tokens == 0.0
