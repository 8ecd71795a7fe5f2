"""Credit: pure functions from rewards to advantages, and the table that names them. Float64, groups by number.

Shapes: N rollouts; a group is the set of rollouts with one number in `group_N`. `settings` are the recipe's
AlgorithmSettings. The stage around them is `compute_advantages` of `rft_core.credit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rft_core.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rft_core.algorithm_settings import AlgorithmSettings


WHITEN_EPSILON = 1e-8  # added to a variance


@dataclass(frozen=True)
class Credits:
    """What credit is computed from. Rows outside `is_counted_N` (unscored, dropped, expert) enter no statistic."""

    reward_N: np.ndarray  # float64, final: after clip and shaping; anything where not counted
    group_N: np.ndarray  # int64
    is_counted_N: np.ndarray  # bool
    is_masked_N: np.ndarray | None = None  # bool: counted, but not trained (truncated, under `truncated: mask`)
    length_N: np.ndarray | None = None  # int64, tokens that the policy wrote; None where no estimator reads them
    draw_N: np.ndarray | None = None  # a seeded number of each rollout, for what is left out by lot
    index_N: np.ndarray | None = None  # int64, of each rollout in its group; None: the order of the rows
    baseline_N: np.ndarray | None = None  # float64, reward of the prompt's greedy completion; None where none was made
    components: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64[N], NaN where a row has no such score
    component_weights: Mapping[str, float] = field(default_factory=dict)

    def groups(self) -> Iterator[np.ndarray]:
        """Row numbers of the counted members of each group that has any."""
        return _split_by_group(np.flatnonzero(self.is_counted_N), self.group_N)


def _split_by_group(rows: np.ndarray, group_N: np.ndarray) -> Iterator[np.ndarray]:
    order = rows[np.argsort(group_N[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(group_N[order])) + 1
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


def whiten(values: np.ndarray, ddof: int) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8); zeros for fewer than two values.

    >>> whiten(np.array([2.0, 3.0]), 1).round(6).tolist()
    [-0.707107, 0.707107]
    """
    if len(values) < 2:
        return np.zeros(len(values))
    return centered(values) / math.sqrt(std_of(values, ddof) ** 2 + WHITEN_EPSILON)


def is_flat(credits: Credits, members: np.ndarray, advantage: object, spread_floor: float) -> bool:
    """Whether a group has no signal for an estimator: no spread in what it compares."""
    if advantage != "per_component":
        return has_no_signal(credits.reward_N[members], spread_floor)
    scores = [values[members] for values in _weighted_components(credits).values()]
    present = [values[~np.isnan(values)] for values in scores]
    return all(len(values) == 0 or has_no_signal(values, spread_floor) for values in present)


def surplus_rows(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """bool[N]: rows left out by `drop: balance`: of each group, by lot, as many below-mean rows as outnumber the others
    (REC, arXiv 2509.24203)."""
    is_surplus_N = np.zeros(len(credits.reward_N), dtype=bool)
    if settings.drop != "balance":
        return is_surplus_N
    draw_N = np.zeros(len(credits.reward_N)) if credits.draw_N is None else credits.draw_N
    for members in credits.groups():
        rewards = credits.reward_N[members]
        if has_no_signal(rewards, settings.spread_floor):
            continue
        below = members[centered(rewards) < 0]
        surplus = max(2 * len(below) - len(members), 0)
        is_surplus_N[below[np.argsort(draw_N[below], kind="stable")[:surplus]]] = True
    return is_surplus_N


def _balanced_groups(credits: Credits, settings: AlgorithmSettings) -> Iterator[np.ndarray]:
    kept = np.flatnonzero(credits.is_counted_N & ~surplus_rows(credits, settings))
    return _split_by_group(kept, credits.group_N)


def group_mean(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus its group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2). A group without signal gets exactly 0.

    >>> from rft_core.config import AlgorithmSettings
    >>> credits = Credits(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, int), np.ones(4, bool))
    >>> group_mean(credits, AlgorithmSettings()).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    advantage_N = np.zeros(len(credits.reward_N))
    for members in _balanced_groups(credits, settings):
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
    for members in _balanced_groups(credits, settings):
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
    for members in _balanced_groups(credits, settings):
        if len(members) > 1:
            advantage_N[members] *= len(members) / (len(members) - 1)
    return advantage_N


def length_weighted_mean(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus sum(length x R) / sum(length) of its group: the baseline of least variance if a completion's squared
    gradient grows like its length (OPO, arXiv 2505.23585)."""
    advantage_N = np.zeros(len(credits.reward_N))
    length_N = _lengths(credits)
    for members in credits.groups():
        rewards = credits.reward_N[members]
        if not has_no_signal(rewards, settings.spread_floor):
            shifted = rewards - rewards.min()
            lengths = length_N[members].astype(float)
            advantage_N[members] = shifted - math.fsum((lengths * shifted).tolist()) / math.fsum(lengths.tolist())
    return advantage_N


def reward_over_mean(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """(R - mean) / mean of the group, 0 where the mean is 0 (MaxRL, arXiv 2602.02710). Raises ContractError for a
    negative reward: the mean stands for a rate of success."""
    advantage_N = group_mean(credits, settings)
    counted = credits.reward_N[credits.is_counted_N]
    if len(counted) and counted.min() < 0:
        raise ContractError(f"advantage reward_over_mean needs rewards of at least 0, got {counted.min():g}")
    for members in credits.groups():
        if advantage_N[members].any():
            advantage_N[members] /= math.fsum(credits.reward_N[members].tolist()) / len(members)
    return advantage_N


def pass_at_k(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Best minus second best to the best of a group, 0 to the others and in a tie: the gain in pass@n (arXiv 2503.19595
    with k = n). `pass_at_k_over_std` divides by the group's std + std_epsilon."""
    advantage_N = np.zeros(len(credits.reward_N))
    for members in credits.groups():
        rewards = credits.reward_N[members]
        if has_no_signal(rewards, settings.spread_floor):
            continue
        second, best = np.sort(rewards)[-2:]
        std = std_of(rewards, settings.std_ddof) + settings.std_epsilon if settings.pass_at_k_over_std else 1.0
        advantage_N[members[rewards.argmax()]] = (best - second) / std
    return advantage_N


def per_component(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Each component standardised in its group, weighed and summed, then whitened over the step (GDPO, arXiv
    2601.05242). A member without a component gets 0 for it and is not in its statistics."""
    sum_N = np.zeros(len(credits.reward_N))
    is_flat_N = np.zeros(len(credits.reward_N), dtype=bool)
    for members in credits.groups():
        is_flat_N[members] = is_flat(credits, members, "per_component", settings.spread_floor)
        for name, values_N in _weighted_components(credits).items():
            present = members[~np.isnan(values_N[members])]
            values = values_N[present]
            if len(present) and not has_no_signal(values, settings.spread_floor):
                std = std_of(values, settings.std_ddof) + settings.std_epsilon
                sum_N[present] += credits.component_weights[name] * centered(values) / std
    return _whitened(sum_N, credits, is_flat_N, settings.whiten_ddof)


def log_mean_exp(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus its group's mean, or with `baseline: log_mean_exp` minus tau ln mean exp(R / tau) (OPMD, arXiv
    2509.24203)."""
    if settings.baseline == "mean":
        return group_mean(credits, settings)
    advantage_N = np.zeros(len(credits.reward_N))
    for members in credits.groups():
        rewards = credits.reward_N[members]
        if not has_no_signal(rewards, settings.spread_floor):
            below_best = rewards - rewards.max()
            mean = math.fsum(np.exp(below_best / settings.tau).tolist()) / len(members)
            advantage_N[members] = below_best - settings.tau * math.log(mean)
    return advantage_N


def shifted_mean(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus (its group's mean + baseline_shift); a negative shift leans on successes (AsymRE, arXiv 2506.20520).
    Equal rewards give -baseline_shift; a group of one, which is its own mean, gives 0."""
    advantage_N = np.zeros(len(credits.reward_N))
    for members in credits.groups():
        if len(members) > 1:
            advantage_N[members] = centered(credits.reward_N[members]) - settings.baseline_shift
    return advantage_N


def greedy_baseline(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus that of the greedy completion of the same prompt (ReMax, arXiv 2310.10505)."""
    if credits.baseline_N is None:
        raise ContractError("advantage greedy_baseline needs rollouts with purpose baseline, found none")
    return np.where(credits.is_counted_N, credits.reward_N - credits.baseline_N, 0.0)


def group_mean_batch_whiten(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """Reward minus its group's mean, whitened over the step (REINFORCE++-baseline, arXiv 2501.03262)."""
    advantage_N = group_mean(credits, settings)
    is_flat_N = np.zeros(len(advantage_N), dtype=bool)
    for members in credits.groups():
        is_flat_N[members] = has_no_signal(credits.reward_N[members], settings.spread_floor)
    return _whitened(advantage_N, credits, is_flat_N, settings.whiten_ddof)


def group_mean_rescaled(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """group_mean x B / (B - M): of B trained rows, M are in groups without signal, and would thin the others out in the
    average (GPG, arXiv 2504.02546, eq. 6 to 8)."""
    advantage_N = group_mean(credits, settings)
    is_masked_N = np.zeros(len(advantage_N), dtype=bool) if credits.is_masked_N is None else credits.is_masked_N
    large = [members for members in credits.groups() if len(members) >= settings.min_group_size]
    num_trained = [(int((~is_masked_N[members]).sum()), advantage_N[members].any()) for members in large]
    with_signal = sum(count for count, has_signal in num_trained if has_signal)
    return advantage_N * (sum(count for count, _ in num_trained) / with_signal) if with_signal else advantage_N


def _whitened(values_N: np.ndarray, credits: Credits, is_flat_N: np.ndarray, ddof: int) -> np.ndarray:
    """Whitened over the counted rows; groups without signal get exactly 0 afterwards."""
    result_N = np.zeros(len(values_N))
    result_N[credits.is_counted_N] = whiten(values_N[credits.is_counted_N], ddof)
    return np.where(is_flat_N, 0.0, result_N)


def _weighted_components(credits: Credits) -> dict[str, np.ndarray]:
    """The components that have a weight; metrics of reward functions have none."""
    return {name: values for name, values in credits.components.items() if credits.component_weights.get(name)}


def _lengths(credits: Credits) -> np.ndarray:
    if credits.length_N is None:
        raise ValueError("this advantage needs the lengths of the rollouts, got none")
    return credits.length_N


def reward_itself(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """The reward, without a baseline (REINFORCE). Not a group estimator: equal rewards keep their value."""
    return np.where(credits.is_counted_N, credits.reward_N, 0.0)


def selected(credits: Credits, settings: AlgorithmSettings) -> np.ndarray:
    """1 for what passes: the best of each group, of equal ones that with the lowest index, or all (RAFT, arXiv
    2304.06767, algorithm 1); 0 for the rest. What is masked is not chosen, and does not stand in the way."""
    is_candidate_N = credits.is_counted_N & (credits.reward_N >= settings.pass_threshold)
    if credits.is_masked_N is not None:
        is_candidate_N &= ~credits.is_masked_N
    if settings.select == "passing":
        return is_candidate_N.astype(np.float64)
    index_N = np.arange(len(is_candidate_N)) if credits.index_N is None else credits.index_N
    advantage_N = np.zeros(len(is_candidate_N))
    for members in _split_by_group(np.flatnonzero(is_candidate_N), credits.group_N):
        advantage_N[members[np.lexsort((index_N[members], -credits.reward_N[members]))[0]]] = 1.0
    return advantage_N


ADVANTAGES = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": reward_itself,
    "length_weighted_mean": length_weighted_mean,
    "reward_over_mean": reward_over_mean,
    "pass_at_k": pass_at_k,
    "per_component": per_component,
    "log_mean_exp": log_mean_exp,
    "shifted_mean": shifted_mean,
    "greedy_baseline": greedy_baseline,
    "group_mean_batch_whiten": group_mean_batch_whiten,
    "group_mean_rescaled": group_mean_rescaled,
    "selected": selected,
}
