"""Losses token by token in float64, by branches and loops; gradients by autograd of these plain formulas.

Written from the formulas of the papers; imports nothing of ours. Each dict must hold the names of the table it checks.
"""

from __future__ import annotations

import math

import torch

from tests.oracle.steps import MAX_COMPLETION_TOKENS, Row

DEFAULTS = {
    "level": "token",
    "gate": "none",
    "surrogate": "clipped",
    "aggregation": "token_mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "gate_low": 0.2,
    "gate_high": 0.2,
    "gate_low_outer": 0.6,
    "gate_high_outer": 2.0,
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_importance": False,
    "entropy_coefficient": 0.0,
    "correction": "truncate",
    "correction_level": "token",
    "correction_cap": 2.0,
    "correction_low": 0.5,
    "correction_high": 5.0,
}

# Only what differs from DEFAULTS.
ALGORITHMS = {"grpo": {"aggregation": "sequence_mean"}, "dr_grpo": {"aggregation": "constant_length"}}

LEVELS = {
    "token": lambda ratios: ratios,
    "sequence_geometric": lambda ratios: [sum(ratios) / len(ratios)] * len(ratios),
    "sequence_product": lambda ratios: [sum(ratios)] * len(ratios),
}


def _one_side(ratio, advantage, spec):
    if advantage > 0:
        return ratio <= 1 + spec["gate_high"]
    if advantage < 0:
        return ratio >= 1 - spec["gate_low"]
    return True


def _two_side(ratio, advantage, spec):
    return 1 - spec["gate_low"] <= ratio <= 1 + spec["gate_high"]


def _ring(ratio, advantage, spec):
    far_below, far_above = ratio <= 1 - spec["gate_low_outer"], ratio >= 1 + spec["gate_high_outer"]
    return _two_side(ratio, advantage, spec) or (advantage > 0 and far_below) or (advantage < 0 and far_above)


GATES = {"none": lambda ratio, advantage, spec: True, "one_side": _one_side, "two_side": _two_side, "ring": _ring}


def _clipped(ratio, logprob, old, advantage, spec):
    bound = ratio
    if advantage > 0 and ratio > 1 + spec["clip_high"]:
        bound = torch.tensor(1 + spec["clip_high"])
    if advantage < 0 and ratio < 1 - spec["clip_low"]:
        bound = torch.tensor(1 - spec["clip_low"])
    if advantage < 0 and spec["dual_clip"] is not None and ratio > spec["dual_clip"]:
        bound = torch.tensor(spec["dual_clip"])
    return -advantage * bound


SURROGATES = {
    "clipped": _clipped,
    "unclipped": lambda ratio, logprob, old, advantage, spec: -advantage * ratio,
    "logprob": lambda ratio, logprob, old, advantage, spec: -advantage * logprob,
    "log_ratio": lambda ratio, logprob, old, advantage, spec: -advantage * (logprob - old),
}

# Each takes [(token losses of the row, its weight, its group)], rows without a trained token left out.
AGGREGATIONS = {
    "token_mean": lambda rows: _total(rows) / sum(w * len(losses) for losses, w, _ in rows),
    "sequence_mean": lambda rows: (
        sum(w * sum(losses) / len(losses) for losses, w, _ in rows) / sum(w for _, w, _ in rows)
    ),
    "sequence_sum": lambda rows: _total(rows) / sum(w for _, w, _ in rows),
    "constant_length": lambda rows: _total(rows) / (sum(w for _, w, _ in rows) * MAX_COMPLETION_TOKENS),
    "prompt_mean": lambda rows: _prompt_mean(rows),
    "token_sum": lambda rows: _total(rows),
}


def _total(rows):
    return sum(weight * sum(losses) for losses, weight, _ in rows)


def _prompt_mean(rows):
    groups = sorted({group for _, _, group in rows})
    means = [AGGREGATIONS["token_mean"]([row for row in rows if row[2] == group]) for group in groups]
    return sum(means) / len(means)


def _k2_gradient(d):
    constant = d.item()
    return math.exp(-constant) - 1 + constant + d * d / 2 - constant**2 / 2


KL_ESTIMATORS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "abs": lambda d: d if d >= 0 else -d,
    "k2_gradient": _k2_gradient,
}

CORRECTIONS = {
    "none": lambda ratio, spec: 1.0,
    "truncate": lambda ratio, spec: min(ratio, spec["correction_cap"]),
    "mask": lambda ratio, spec: ratio if spec["correction_low"] <= ratio <= spec["correction_high"] else 0.0,
}


def exp_clamped(log_ratio):
    return torch.exp(torch.clamp(torch.as_tensor(log_ratio, dtype=torch.float64), -20.0, 20.0))


def correction_weights(row: Row, kept, logprobs, old, spec) -> list[float]:
    """Constants: exp(old - behaviour), or exp(current - behaviour) where the surrogate's gradient holds no ratio."""
    if not row.is_off_policy:
        return [1.0] * len(kept)
    start = logprobs if spec["surrogate"] in ("logprob", "log_ratio") else old
    gaps = [0.0 if math.isnan(row.behaviour[t]) else start[t].item() - row.behaviour[t] for t in kept]
    leveled = LEVELS[spec["correction_level"]](gaps)
    return [float(CORRECTIONS[spec["correction"]](exp_clamped(gap).item(), spec)) for gap in leveled]


def step_loss(rows: list[Row], logprobs: list[torch.Tensor], entropies: list[torch.Tensor], spec: dict) -> torch.Tensor:
    """Loss of the whole optimizer step."""
    spec = DEFAULTS | spec
    policy, kl, entropy = [], [], []
    for row, row_logprobs, row_entropies in zip(rows, logprobs, entropies, strict=True):
        kept = [t for t in range(len(row.mask)) if row.trained[t]]
        if not kept:
            continue
        old = row_logprobs.detach() if row.old is None else torch.tensor(row.old)
        log_ratios = LEVELS[spec["level"]]([row_logprobs[t] - old[t] for t in kept])
        weights = correction_weights(row, kept, row_logprobs, old, spec)
        losses, divergences = [], []
        for t, log_ratio, weight in zip(kept, log_ratios, weights, strict=True):
            ratio = exp_clamped(log_ratio)
            loss = SURROGATES[spec["surrogate"]](ratio, row_logprobs[t], old[t], row.advantage, spec)
            is_kept = GATES[spec["gate"]](ratio.item(), row.advantage, spec)
            losses.append(loss * weight if is_kept else torch.zeros(()))
            gap = torch.clamp(row_logprobs[t] - row.reference[t], -20.0, 20.0)
            divergence = KL_ESTIMATORS[spec["kl_estimator"]](gap)
            divergences.append(
                divergence * exp_clamped(row_logprobs[t] - old[t]) if spec["kl_importance"] else divergence
            )
        policy.append((losses, row.weight, row.group))
        kl.append((divergences, row.weight, row.group))
        entropy.append(([row_entropies[t] for t in kept], row.weight, row.group))
    total = AGGREGATIONS[spec["aggregation"]](policy)
    if spec["kl_coefficient"]:
        total = total + spec["kl_coefficient"] * AGGREGATIONS[spec["aggregation"]](kl)
    if spec["entropy_coefficient"]:
        total = total - spec["entropy_coefficient"] * AGGREGATIONS["token_mean"](entropy)
    return total
