"""GAE and the value loss token by token in float64, by loops and the defining sums. Imports nothing of ours."""

from __future__ import annotations

import math

import numpy as np
import torch


def gae(rewards, values, mask, after, gamma, lam):
    """Advantages by the definition as a sum, A_t = sum over k of (gamma lam)^k delta_(t+k), over the masked tokens
    alone (arXiv 1506.02438, eq. 11); 0 elsewhere."""
    kept = [t for t in range(len(mask)) if mask[t]]
    deltas = []
    for number, t in enumerate(kept):
        following = values[kept[number + 1]] if number + 1 < len(kept) else after
        deltas.append(rewards[t] + gamma * following - values[t])
    result = np.zeros(len(mask))
    for number, t in enumerate(kept):
        result[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[number:]))
    return result


def value_loss(values, old, returns, clip, weights):
    """Mean over tokens, each counted `weight` times, of half the larger squared error; arguments are flat lists of
    trained tokens, `values` float64 tensors with gradient. The clipped value is a constant beyond its bounds."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for value, before, wanted, weight in zip(values, old, returns, weights, strict=True):
        error = (value - wanted) ** 2
        if clip is not None and abs(value.item() - before) > clip:
            bound = before + math.copysign(clip, value.item() - before)
            if (bound - wanted) ** 2 > error.item():
                error = torch.tensor((bound - wanted) ** 2, dtype=torch.float64)
        total = total + weight * error / 2
        count += weight
    return total / count if count else total


def explained_variance(values, returns):
    values, returns = np.array(values), np.array(returns)
    return 1 - np.var(returns - values) / np.var(returns)
