"""Advantage functions: against the float64 oracle over the table itself, by hand, and their invariants."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from rft_core.advantages import ADVANTAGES, Credits
from rft_core.config import AlgorithmSettings
from rft_core.terms import GROUP_ESTIMATORS
from tests.oracle import advantages as oracle


def credit(name: str, rewards: list[float | None], groups: list[int], **settings) -> np.ndarray:
    values = np.array([math.nan if reward is None else reward for reward in rewards], dtype=float)
    credits = Credits(values, np.array(groups), ~np.isnan(values))
    return ADVANTAGES[name](credits, AlgorithmSettings(**settings))


# Rewards 1 0 0 1 of one group (mean .5, std .57735 with ddof 1), and a singleton 3.
BY_HAND = {
    "group_zscore": [0.8660239, -0.8660239, -0.8660239, 0.8660239, 0.0],
    "group_mean": [0.5, -0.5, -0.5, 0.5, 0.0],
    "leave_one_out": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0],
    "none": [1.0, 0.0, 0.0, 1.0, 3.0],
}


def test_table_oracle_settings_and_numbers_name_the_same_set():
    literals = get_args(get_args(AlgorithmSettings.model_fields["advantage"].annotation)[0])
    assert set(ADVANTAGES) == set(oracle.ADVANTAGES) == set(literals) == set(BY_HAND)
    assert {name for name, is_group in oracle.IS_GROUP_ESTIMATOR.items() if is_group} == GROUP_ESTIMATORS


@pytest.mark.parametrize("name", ADVANTAGES)
def test_numbers_by_hand(name):
    assert credit(name, [1.0, 0.0, 0.0, 1.0, 3.0], [0, 0, 0, 0, 1]).tolist() == pytest.approx(BY_HAND[name], abs=1e-7)


# Ragged groups in mixed order, unscored members, an unscored group, a singleton, equal rewards, tiny real spread.
REWARDS = [0.3, 1.0, None, 0.0, -2.5, 7.0, 1.0, None, 1.0, 0.1, 4.0, 1.0, None, 1.001, 0.25]
GROUPS = [0, 1, 0, 1, 0, 2, 1, 3, 4, 0, 5, 4, 5, 6, 6]


@pytest.mark.parametrize("spec", [{}, {"std_scope": "batch"}, {"std_ddof": 0}, {"std_epsilon": 1e-4}])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_value_equals_the_oracle(name, spec):
    wanted = oracle.advantages(name, REWARDS, GROUPS, spec)
    assert credit(name, REWARDS, GROUPS, **spec) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
@pytest.mark.parametrize(
    "rewards",
    [[0.1] * 3, [0.0] * 4, [0.30000000000000004, 0.3, 0.3, 0.3], [5.0], [None, 1.0], [-1e9, -1e9 - 1e-3], [None, None]],
)
def test_without_signal_credit_is_exactly_zero(name, rewards):
    assert credit(name, rewards, [0] * len(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_rows_changes_no_bit(name):
    generator = np.random.default_rng(5)
    rewards = generator.normal(size=40) * 10.0 ** generator.uniform(-6, 6, 40)
    groups = generator.integers(6, size=40)
    first = credit(name, rewards.tolist(), groups.tolist())
    for _ in range(5):
        order = generator.permutation(40)
        assert credit(name, rewards[order].tolist(), groups[order].tolist()).tolist() == first[order].tolist()


def test_a_group_is_what_it_would_be_alone():
    together = credit("group_zscore", [1.0, 0.0, None, 1.0, 0.0, 1.0, 0.0, 1.0], [0, 0, 0, 0, 1, 1, 1, 1])
    assert together[4:].tolist() == credit("group_zscore", [0.0, 1.0, 0.0, 1.0], [0, 0, 0, 0]).tolist()


def test_standardised_credit_never_exceeds_its_bound():
    # One success among n: (n - 1) / sqrt(n) is reached, even for rewards that barely differ.
    for size in (2, 8, 64):
        for top in (1.0, 1e-3, 1e9):
            largest = credit("group_zscore", [top] + [0.0] * (size - 1), [0] * size, std_epsilon=0.0).max()
            assert largest == pytest.approx((size - 1) / math.sqrt(size), rel=1e-9)
    last_bit = credit("group_zscore", [0.30000000000000004, 0.3, 0.3, 0.3], [0] * 4, std_epsilon=0.0, spread_floor=0.0)
    assert last_bit.max() == pytest.approx(1.5)
    close = credit("group_zscore", [1e6 + 2.0] + [1e6] * 7, [0] * 8, std_epsilon=0.0)
    assert close.max() == pytest.approx(7 / math.sqrt(8), rel=1e-9)


def test_nothing_counted_gives_zeros():
    for name in ADVANTAGES:
        assert credit(name, [None, None], [0, 1]).tolist() == [0.0, 0.0]
        assert credit(name, [], []).tolist() == []
