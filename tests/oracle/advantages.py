"""Advantages by plain numpy over one step. Imports nothing of ours."""

from __future__ import annotations

import numpy as np

DEFAULTS = {
    "std_scope": "group",
    "std_ddof": 1,
    "std_epsilon": 1e-6,
    "whiten_ddof": 1,
    "pass_at_k_over_std": False,
    "baseline": "mean",
    "tau": 1.0,
    "baseline_shift": -0.1,
    "drop": "none",
    "select": "best",
    "pass_threshold": 1.0,
}


class Group:
    """The scored members of a group: rewards, lengths and draws, and each component's scores, NaN where missing."""

    def __init__(self, rewards, lengths, draws, components):
        self.rewards, self.lengths, self.draws, self.components = rewards, lengths, draws, components

    def kept(self, spec):
        """Members after `drop: balance`: the below-mean ones of the smallest draws go until both sides are even."""
        members = list(range(len(self.rewards)))
        if spec["drop"] == "balance" and not flat(self.rewards):
            below = [i for i in members if self.rewards[i] < np.mean(self.rewards)]
            surplus = max(len(below) - (len(members) - len(below)), 0)
            gone = sorted(below, key=lambda i: self.draws[i])[:surplus]
            members = [i for i in members if i not in gone]
        return members

    def by_kept(self, spec, formula):
        result, kept = np.zeros(len(self.rewards)), self.kept(spec)
        if not flat(self.rewards[kept]):
            result[kept] = formula(self.rewards[kept])
        return result


def flat(values) -> bool:
    return len(values) < 2 or np.ptp(values) <= 1e-6 * np.abs(values).max()


def _zscore(group, everything, spec):
    def formula(rewards):
        base = everything if spec["std_scope"] == "batch" else rewards
        return (rewards - np.mean(rewards)) / (np.std(base, ddof=spec["std_ddof"]) + spec["std_epsilon"])

    return group.by_kept(spec, formula)


def _others(group, everything, spec):
    return group.by_kept(spec, lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))


def _pass_at_k(group, everything, spec):
    result = np.zeros(len(group.rewards))
    best = np.flatnonzero(group.rewards == group.rewards.max())
    if len(best) == 1 and len(group.rewards) > 1:
        lead = group.rewards[best[0]] - np.delete(group.rewards, best[0]).max()
        std = np.std(group.rewards, ddof=spec["std_ddof"]) + spec["std_epsilon"]
        result[best[0]] = lead / std if spec["pass_at_k_over_std"] else lead
    return result


def _opmd(group, everything, spec):
    if spec["baseline"] == "mean":
        return group.rewards - np.mean(group.rewards)
    return group.rewards - spec["tau"] * np.log(np.mean(np.exp(group.rewards / spec["tau"])))


def _components(group, everything, spec):
    total = np.zeros(len(group.rewards))
    for weight, scores in group.components:
        present = ~np.isnan(scores)
        if present.any() and not flat(scores[present]):
            mean, std = np.mean(scores[present]), np.std(scores[present], ddof=spec["std_ddof"]) + spec["std_epsilon"]
            total += weight * np.where(present, (scores - mean) / std, 0.0)
    return total


def _selected(group, everything, spec):
    passing = [i for i, reward in enumerate(group.rewards) if reward >= spec["pass_threshold"]]
    if spec["select"] == "best" and passing:
        passing = [max(passing, key=lambda i: (group.rewards[i], -i))]
    return np.array([float(i in passing) for i in range(len(group.rewards))])


# From a group, and the rewards of the whole step.
ADVANTAGES = {
    "group_zscore": _zscore,
    "group_mean": lambda group, everything, spec: group.by_kept(spec, lambda r: r - np.mean(r)),
    "leave_one_out": _others,
    "none": lambda group, everything, spec: group.rewards,
    "length_weighted_mean": lambda group, everything, spec: (
        group.rewards - np.average(group.rewards, weights=group.lengths)
    ),
    "reward_over_mean": lambda group, everything, spec: (
        group.rewards / np.mean(group.rewards) - 1 if np.mean(group.rewards) > 0 else np.zeros(len(group.rewards))
    ),
    "pass_at_k": _pass_at_k,
    "per_component": _components,
    "log_mean_exp": _opmd,
    "shifted_mean": lambda group, everything, spec: (
        group.rewards - (np.mean(group.rewards) + spec["baseline_shift"]) if len(group.rewards) > 1 else np.zeros(1)
    ),
    # The greedy completion of each prompt is rewarded by a tenth of its group's longest completion.
    "greedy_baseline": lambda group, everything, spec: group.rewards - max(group.lengths) / 10,
    "group_mean_batch_whiten": lambda group, everything, spec: group.rewards - np.mean(group.rewards),
    "group_mean_rescaled": lambda group, everything, spec: group.rewards - np.mean(group.rewards),
    "selected": _selected,
}

COMPARES_NOBODY = ("none", "shifted_mean", "greedy_baseline", "selected")
IS_GROUP_ESTIMATOR = {name: name not in COMPARES_NOBODY for name in ADVANTAGES}
WHITENED = ("per_component", "group_mean_batch_whiten")


def advantages(name, rewards, groups, spec, lengths, draws, components, weights) -> np.ndarray:
    """`rewards` and the lists in `components` hold None where there is no score."""
    spec = DEFAULTS | spec
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    everything = np.array([rewards[i] for i in scored], dtype=np.float64)
    result, is_flat = np.zeros(len(rewards)), np.zeros(len(rewards), dtype=bool)
    for number in sorted(set(groups)):
        members = [i for i in scored if groups[i] == number]
        if not members:
            continue
        parts = [(weights[part], np.array([scores[i] for i in members], float)) for part, scores in components.items()]
        group = Group(*(np.array([values[i] for i in members], float) for values in (rewards, lengths, draws)), parts)
        compared = [scores[~np.isnan(scores)] for _, scores in parts] if name == "per_component" else [group.rewards]
        is_flat[members] = all(map(flat, compared)) and IS_GROUP_ESTIMATOR[name]
        result[members] = ADVANTAGES[name](group, everything, spec)
    if name in WHITENED and len(scored) > 1:
        values = result[scored]
        result[scored] = (values - values.mean()) / np.sqrt(np.var(values, ddof=spec["whiten_ddof"]) + 1e-8)
    result[is_flat] = 0.0
    if name == "group_mean_rescaled":
        large = [i for i in scored if sum(groups[j] == groups[i] for j in scored) >= 2]
        with_signal = [i for i in large if not is_flat[i]]
        result *= len(large) / len(with_signal) if with_signal else 1.0
    return result
