"""Credit: pure functions from rewards to advantages, and the table that names them. Float64, groups by number.

Shapes: N rollouts; a group is the set of rollouts with one number in `group_N`. `settings` are the recipe's
AlgorithmSettings. The stage around them is `compute_advantages` of `rft_core.credit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rft_core.algorithm_settings import AlgorithmSettings


@dataclass(frozen=True)
class Credits:
    """What credit is computed from. Rows outside `is_counted_N` (unscored, dropped, expert) enter no statistic."""

    reward_N: np.ndarray  # float64, final: after clip and shaping; anything where not counted
    group_N: np.ndarray  # int64
    is_counted_N: np.ndarray  # bool

    def groups(self) -> Iterator[np.ndarray]:
        """Row numbers of the counted members of each group that has any."""
        counted = np.flatnonzero(self.is_counted_N)
        order = counted[np.argsort(self.group_N[counted], kind="stable")]
        starts = np.flatnonzero(np.diff(self.group_N[order])) + 1
        return iter(np.split(order, starts) if len(order) else [])


def centered(values: np.ndarray) -> np.ndarray:
    """Values minus their mean, the same whatever their order; exact also where they differ in the last bits only."""
    shifted = values - values.min()
    return shifted - math.fsum(shifted.tolist()) / len(values)


def std_of(values: np.ndarray, ddof: int) -> float:
    """Standard deviation, independent of order; 0 when there are not more values than `ddof`.

    >>> std_of(np.array([1.0, 0.0, 0.0, 1.0]), 0)
    0.5
    """
    if len(values) <= ddof:
        return 0.0
    return math.sqrt(math.fsum((centered(values) ** 2).tolist()) / (len(values) - ddof))


def has_no_signal(rewards: np.ndarray, spread_floor: float) -> bool:
    """One member, or a spread within rounding of 0: dividing that noise by its own tiny deviation makes huge credit."""
    spread = float(rewards.max() - rewards.min())
    return len(rewards) < 2 or spread <= spread_floor * float(np.abs(rewards).max())


def group_mean(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus its group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2). A group without signal gets exactly 0.

    >>> from rft_core.config import AlgorithmSettings
    >>> credits = Credits(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, int), np.ones(4, bool))
    >>> group_mean(credits, AlgorithmSettings()).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    advantage_N = np.zeros(len(credits.reward_N))
    for members in credits.groups():
        rewards = credits.reward_N[members]
        if not has_no_signal(rewards, settings.spread_floor):
            advantage_N[members] = centered(rewards)
    return advantage_N


def group_zscore(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """(R - mean of the group) / (std + std_epsilon) (GRPO, arXiv 2402.03300, section 4.1.2).

    The std is the group's, or with `std_scope: batch` that of all counted rollouts. A group without signal gets 0.
    """
    advantage_N = group_mean(credits, settings)
    counted = credits.reward_N[credits.is_counted_N]
    batch_std = std_of(counted, settings.std_ddof) if len(counted) else 0.0
    for members in credits.groups():
        if not advantage_N[members].any():
            continue
        std = batch_std if settings.std_scope == "batch" else std_of(credits.reward_N[members], settings.std_ddof)
        advantage_N[members] /= std + settings.std_epsilon
        if settings.std_scope != "batch" and settings.std_ddof == 1:
            bound = (len(members) - 1) / math.sqrt(len(members))
            largest = np.abs(advantage_N[members]).max()
            assert largest <= bound * (1 + 1e-9), f"standardised credit {largest} exceeds its bound {bound}"
    return advantage_N


def leave_one_out(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus the mean of the others of its group: n / (n - 1) x group_mean (RLOO, arXiv 2402.14740, eq. 8)."""
    advantage_N = group_mean(credits, settings)
    for members in credits.groups():
        if len(members) > 1:
            advantage_N[members] *= len(members) / (len(members) - 1)
    return advantage_N


def reward_itself(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """The reward, without a baseline (REINFORCE). Not a group estimator: equal rewards keep their value."""
    return np.where(credits.is_counted_N, credits.reward_N, 0.0)


ADVANTAGES = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": reward_itself,
}
