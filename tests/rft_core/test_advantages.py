"""Advantage functions: against the float64 oracle over the table itself, by hand, and their invariants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from rft_core.advantages import ADVANTAGES, Credits, surplus_rows
from rft_core.config import AlgorithmSettings
from rft_core.errors import ContractError
from rft_core.terms import GROUP_ESTIMATORS
from rft_core.token_credit import TOKEN_ADVANTAGES
from tests.oracle import advantages as oracle

WEIGHTS = {"a": 1.0, "b": -0.5}


def floats(values: list[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def credits_of(rewards, groups, lengths=None, draws=None, components=None) -> Credits:
    """Without components the rewards themselves are the only one."""
    values = floats(rewards)
    scores = {name: floats(scores) for name, scores in (components or {"a": rewards}).items()}
    group_N, length_N = np.array(groups, dtype=np.int64), np.array(lengths or [1] * len(values))
    scored = [(group, length) for group, length, value in zip(groups, length_N, values, strict=True) if value == value]
    return Credits(
        values,
        group_N,
        ~np.isnan(values),
        length_N=length_N,
        baseline_N=np.array(
            [max((size for other, size in scored if other == group), default=0) / 10 for group in groups]
        ),
        draw_N=np.array(draws or [0.0] * len(values)),
        components=scores,
        component_weights=WEIGHTS,
    )


def credit(name: str, rewards, groups, lengths=None, draws=None, components=None, **settings) -> np.ndarray:
    return ADVANTAGES[name](credits_of(rewards, groups, lengths, draws, components), AlgorithmSettings(**settings))


def allowed(name: str, rewards: list[float | None]) -> list[float | None]:
    """reward_over_mean takes no negative rewards."""
    return [reward and abs(reward) for reward in rewards] if name == "reward_over_mean" else rewards


# Rewards 1 0 0 1 of one group (mean .5, std .57735 with ddof 1), and a singleton 3. Lengths 2 6 4 4 5.
BY_HAND = {
    "group_zscore": [0.8660239, -0.8660239, -0.8660239, 0.8660239, 0.0],
    "group_mean": [0.5, -0.5, -0.5, 0.5, 0.0],
    "leave_one_out": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0],
    "none": [1.0, 0.0, 0.0, 1.0, 3.0],
    "length_weighted_mean": [0.625, -0.375, -0.375, 0.625, 0.0],  # (2 + 4) / 16
    "reward_over_mean": [1.0, -1.0, -1.0, 1.0, 0.0],
    "pass_at_k": [0.0] * 5,  # a tie
    # Standardised .866 -.866 -.866 .866 0; whitened by sqrt(4 x .75 / 4)
    "per_component": [1.0, -1.0, -1.0, 1.0, 0.0],
    "log_mean_exp": [0.5, -0.5, -0.5, 0.5, 0.0],
    "shifted_mean": [0.6, -0.4, -0.4, 0.6, 0.0],
    "greedy_baseline": [0.4, -0.6, -0.6, 0.4, 2.5],  # baselines .6 and .5
    "group_mean_batch_whiten": [1.0, -1.0, -1.0, 1.0, 0.0],  # by sqrt(4 x .25 / 4)
    "group_mean_rescaled": [0.5, -0.5, -0.5, 0.5, 0.0],  # the singleton is too small to count
    "selected": [1.0, 0.0, 0.0, 0.0, 1.0],  # of two equal ones the first
}


def test_table_oracle_settings_and_numbers_name_the_same_set():
    literals = get_args(get_args(AlgorithmSettings.model_fields["advantage"].annotation)[0])
    assert set(ADVANTAGES) == set(oracle.ADVANTAGES) == set(literals) - {"custom", *TOKEN_ADVANTAGES} == set(BY_HAND)
    assert {name for name, is_group in oracle.IS_GROUP_ESTIMATOR.items() if is_group} == GROUP_ESTIMATORS


@pytest.mark.parametrize("name", ADVANTAGES)
def test_numbers_by_hand(name):
    found = credit(name, [1.0, 0.0, 0.0, 1.0, 3.0], [0, 0, 0, 0, 1], lengths=[2, 6, 4, 4, 5])
    assert found.tolist() == pytest.approx(BY_HAND[name], abs=1e-6 if name == "per_component" else 1e-7)


# Ragged groups in mixed order, unscored members, an unscored group, a singleton, equal rewards, tiny real spread, a
# lone best one, and a majority below the mean.
REWARDS = [0.3, 1.0, None, 0.0, -2.5, 7.0, 1.0, None, 1.0, 0.1, 4.0, 1.0, None, 1.001, 0.25, 9.0, 0.0, 0.5, 0.0]
GROUPS = [0, 1, 0, 1, 0, 2, 1, 3, 4, 0, 5, 4, 5, 6, 6, 7, 7, 7, 7]
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
DRAWS = [0.6, 0.2, 0.9, 0.4, 0.5, 0.1, 0.3, 0.8, 0.7, 0.65, 0.25, 0.95, 0.45, 0.55, 0.15, 0.35, 0.85, 0.05, 0.75]
# Some rows lack a component; b tells members of group 4 apart that have equal rewards.
COMPONENTS = {
    "a": [0.3, 1, None, 0, None, 7, 1, None, 1, 0.1, 4, 1, 5, 1, 0.25, 9, 0, 0.5, None],
    "b": [1, 0, None, None, 0, 1, 1, 0, 1, 0, 1, 0, None, 3, 3, None, None, 2, None],
}
SPECS = [
    {},
    {"std_scope": "batch"},
    {"std_ddof": 0},
    {"std_epsilon": 1e-4},
    {"whiten_ddof": 0},
    {"pass_at_k_over_std": True},
    {"baseline": "log_mean_exp", "tau": 0.5},
    {"baseline_shift": 0.3},
    {"drop": "balance"},
    {"select": "passing", "pass_threshold": 0.3},
    {"pass_threshold": -9.0},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_value_equals_the_oracle(name, spec):
    if name not in ("group_mean", "group_zscore", "leave_one_out") and "drop" in spec:
        spec = {}  # refused elsewhere
    rewards = allowed(name, REWARDS)
    wanted = oracle.advantages(name, rewards, GROUPS, spec, LENGTHS, DRAWS, COMPONENTS, WEIGHTS)
    found = credit(name, rewards, GROUPS, LENGTHS, DRAWS, COMPONENTS, **spec)
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert found.any()


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
@pytest.mark.parametrize(
    "rewards",
    [[0.1] * 3, [0.0] * 4, [0.30000000000000004, 0.3, 0.3, 0.3], [5.0], [None, 1.0], [-1e9, -1e9 - 1e-3], [None, None]],
)
def test_without_signal_credit_is_exactly_zero(name, rewards):
    rewards = allowed(name, rewards)
    assert credit(name, rewards, [0] * len(rewards)).tolist() == [0.0] * len(rewards)
    # Neither does another group's deviation make credit of it.
    together = credit(name, [*rewards, 1.0, 0.0, 3.0], [*[0] * len(rewards), 1, 1, 1])
    assert together[: len(rewards)].tolist() == [0.0] * len(rewards)


def test_equal_rewards_give_a_shifted_mean_its_shift():
    assert credit("shifted_mean", [2.0, 2.0, 5.0], [0, 0, 1]).tolist() == pytest.approx([0.1, 0.1, 0.0])


def test_rewards_over_their_mean_must_not_be_negative():
    with pytest.raises(ContractError, match="at least 0, got -1"):
        credit("reward_over_mean", [1.0, -1.0], [0, 0])


def test_the_best_of_a_group_gets_its_lead():
    # 3 1 2: lead 1, std 1
    assert credit("pass_at_k", [3.0, 1.0, 2.0], [0, 0, 0]).tolist() == [1.0, 0.0, 0.0]
    over = credit("pass_at_k", [3.0, 1.0, 5.0], [0, 0, 0], pass_at_k_over_std=True)
    assert over.tolist() == pytest.approx([0.0, 0.0, 2 / (2 + 1e-6)])


def test_groups_without_signal_do_not_thin_out_the_others():
    # Six rows in groups of at least two, four of them without signal: x 6 / 2.
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 7.0], [0, 0, 1, 1, 2, 2, 3]
    assert credit("group_mean_rescaled", rewards, groups).tolist() == [1.5, -1.5, 0, 0, 0, 0, 0]
    assert credit("group_mean_rescaled", rewards, groups, min_group_size=3).tolist() == [0.5, -0.5, 0, 0, 0, 0, 0]


def test_the_best_that_passes_is_selected_by_its_index():
    credits = replace(credits_of([0.5, 2.0, 2.0, 0.9, None], [0, 0, 0, 1, 1]), index_N=np.array([0, 2, 1, 0, 1]))
    select = ADVANTAGES["selected"]
    assert select(credits, AlgorithmSettings()).tolist() == [0, 0, 1, 0, 0]  # .9 does not pass
    assert select(credits, AlgorithmSettings(pass_threshold=0.9)).tolist() == [0, 0, 1, 1, 0]
    assert select(credits, AlgorithmSettings(select="passing", pass_threshold=0.5)).tolist() == [1, 1, 1, 1, 0]
    masked = replace(credits, is_masked_N=np.array([False, False, True, False, False]))  # cut, under truncated: mask
    assert select(masked, AlgorithmSettings()).tolist() == [0, 1, 0, 0, 0]


def test_components_tell_apart_what_their_sum_does_not():
    # Equal sums, 1 and 0 against 0 and 2: b has weight -.5. Standardised +-.7071 each: .7071 + .35355 and the negative.
    components = {"a": [1.0, 0.0], "b": [0.0, 2.0]}
    found = credit("per_component", [1.0, 1.0], [0, 0], components=components)
    assert found.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-6)


def test_balance_leaves_out_the_smallest_draws_of_the_majority_below():
    # Mean 1: three below, one above: two go, those of draws .1 and .2. Kept 4 and 0: mean 2.
    rewards, draws = [4.0, 0.0, 0.0, 0.0], [0.0, 0.2, 0.3, 0.1]
    assert credit("group_mean", rewards, [0] * 4, draws=draws, drop="balance").tolist() == [2.0, 0.0, -2.0, 0.0]
    credits = credits_of(rewards, [0] * 4, draws=draws)
    assert surplus_rows(credits, AlgorithmSettings(drop="balance")).tolist() == [False, True, False, True]
    assert not surplus_rows(credits, AlgorithmSettings()).any()
    assert not surplus_rows(credits_of([1.0, 1.0, 1.0, 0.0], [0] * 4), AlgorithmSettings(drop="balance")).any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_rows_changes_no_bit(name):
    generator = np.random.default_rng(5)
    rewards = np.array(allowed(name, (generator.normal(size=40) * 10.0 ** generator.uniform(-6, 6, 40)).tolist()))
    groups, lengths, draws = generator.integers(6, size=40), generator.integers(1, 9, size=40), generator.random(40)
    settings = {"drop": "balance"} if name == "group_mean" else {}

    def in_order(order):
        parts = [values[order].tolist() for values in (rewards, groups, lengths, draws)]
        return credit(name, *parts, **settings).tolist()

    first = np.array(in_order(np.arange(40)))
    for _ in range(5):
        order = generator.permutation(40)
        assert in_order(order) == first[order].tolist()


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
