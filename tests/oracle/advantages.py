"""Advantages by plain numpy over one step. Imports nothing of ours."""

from __future__ import annotations

import numpy as np

DEFAULTS = {"std_scope": "group", "std_ddof": 1, "std_epsilon": 1e-6}


def _zscore(group, everything, spec):
    base = everything if spec["std_scope"] == "batch" else group
    return (group - np.mean(group)) / (np.std(base, ddof=spec["std_ddof"]) + spec["std_epsilon"])


def _others(group, everything, spec):
    return np.array([group[i] - np.delete(group, i).mean() for i in range(len(group))])


# From the scored rewards of a group, and of the whole step.
ADVANTAGES = {
    "group_zscore": _zscore,
    "group_mean": lambda group, everything, spec: group - np.mean(group),
    "leave_one_out": _others,
    "none": lambda group, everything, spec: group,
}

IS_GROUP_ESTIMATOR = {"group_zscore": True, "group_mean": True, "leave_one_out": True, "none": False}


def advantages(name: str, rewards: list[float | None], groups: list[int], spec: dict | None = None) -> np.ndarray:
    spec = DEFAULTS | (spec or {})
    scored = [i for i, reward in enumerate(rewards) if reward is not None]
    everything = np.array([rewards[i] for i in scored], dtype=np.float64)
    result = np.zeros(len(rewards))
    for group in sorted(set(groups)):
        members = [i for i in scored if groups[i] == group]
        values = np.array([rewards[i] for i in members], dtype=np.float64)
        is_flat = len(values) < 2 or np.ptp(values) <= 1e-6 * np.abs(values).max()
        if len(values) and not (is_flat and IS_GROUP_ESTIMATOR[name]):
            result[members] = ADVANTAGES[name](values, everything, spec)
    return result
