"""Losses token by token in float64, by branches and loops; gradients by autograd of these plain formulas.

Written from the formulas of the papers; imports nothing of ours. Each dict must hold the names of the table it checks.
A constant (a weight without gradient) is a float.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch

from tests.oracle.rows import ALGORITHMS, DEFAULTS
from tests.oracle.step_gates import REGULARIZER_GATES, STEP_GATES
from tests.oracle.steps import MAX_COMPLETION_TOKENS, Row

__all__ = ["ALGORITHMS", "DEFAULTS", "REGULARIZER_GATES", "STEP_GATES", "step_loss"]


def _bounded(log_ratio, advantage, bound):
    if advantage > 0 and log_ratio > bound:
        return torch.tensor(bound)
    if advantage < 0 and log_ratio < -bound:
        return torch.tensor(-bound)
    return log_ratio


LEVELS = {
    "token": lambda ratios, advantage, spec: ratios,
    "sequence_geometric": lambda ratios, advantage, spec: [sum(ratios) / len(ratios)] * len(ratios),
    "sequence_product": lambda ratios, advantage, spec: [sum(ratios)] * len(ratios),
    "sequence_geometric_clipped": lambda ratios, advantage, spec: (
        [sum(_bounded(ratio, advantage, spec["log_ratio_bound"]) for ratio in ratios) / len(ratios)] * len(ratios)
    ),
}


# A token here has ratio, logprob and anchor as floats, advantage, and row_gap: the row's mean of behaviour - logprob.


def _one_side(token, spec):
    if token.advantage > 0:
        return token.ratio <= 1 + spec["gate_high"]
    if token.advantage < 0:
        return token.ratio >= 1 - spec["gate_low"]
    return True


def _two_side(token, spec):
    return 1 - spec["gate_low"] <= token.ratio <= 1 + spec["gate_high"]


def _ring(token, spec):
    far_below, far_above = token.ratio <= 1 - spec["gate_low_outer"], token.ratio >= 1 + spec["gate_high_outer"]
    return _two_side(token, spec) or (token.advantage > 0 and far_below) or (token.advantage < 0 and far_above)


def _binary_tv(token, spec):
    p, q = math.exp(token.logprob), math.exp(token.anchor)
    if token.advantage > 0:
        return not p - q > spec["divergence_limit"]
    return not (token.advantage < 0 and q - p > spec["divergence_limit"])


def _binary_kl(token, spec):
    p, q = math.exp(token.logprob), math.exp(token.anchor)
    divergence = q * math.log(q / p) if q > 0 else 0.0
    divergence += (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
    is_away = p > q if token.advantage > 0 else p < q and token.advantage < 0
    return not (is_away and divergence > spec["divergence_limit"])


GATES = {
    "none": lambda token, spec: True,
    "one_side": _one_side,
    "two_side": _two_side,
    "ring": _ring,
    "off_policy_sequence": lambda token, spec: not (token.advantage < 0 and token.row_gap > spec["off_policy_limit"]),
    "binary_tv": _binary_tv,
    "binary_kl": _binary_kl,
}


def _clipped(ratio, logprob, anchor, advantage, spec):
    bound = ratio
    if advantage > 0 and ratio > 1 + spec["clip_high"]:
        bound = torch.tensor(1 + spec["clip_high"])
    if advantage < 0 and ratio < 1 - spec["clip_low"]:
        bound = torch.tensor(1 - spec["clip_low"])
    if advantage < 0 and spec["dual_clip"] is not None and ratio > spec["dual_clip"]:
        bound = torch.tensor(spec["dual_clip"])
    return -advantage * bound


def _soft_gate(ratio, logprob, anchor, advantage, spec):
    tau = spec["soft_gate_positive"] if advantage > 0 else spec["soft_gate_negative"]
    return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def _capped(ratio, logprob, anchor, advantage, spec):
    weight = max(spec["weight_floor"], min(ratio.item(), spec["weight_cap"]))
    return -advantage * weight * logprob


def _tapered(ratio, logprob, anchor, advantage, spec):
    weight = 1.0 if advantage > spec["taper_threshold"] else min(1.0, ratio.item())
    return -advantage * weight * logprob


def _exp_advantage(ratio, logprob, anchor, advantage, spec):
    return -advantage * math.exp(advantage / spec["advantage_temperature"]) * logprob


def _gamma(ratio, logprob, anchor, advantage, spec):
    sign = "positive" if advantage >= 0 else "negative"
    shape, rate = spec[f"gamma_shape_{sign}"], spec[f"gamma_rate_{sign}"]
    weight = ratio.item() ** shape * math.exp(rate * (1 - ratio.item()))
    return -advantage * weight * logprob


SURROGATES = {
    "clipped": _clipped,
    "unclipped": lambda ratio, logprob, anchor, advantage, spec: -advantage * ratio,
    "soft_gate": _soft_gate,
    "logprob": lambda ratio, logprob, anchor, advantage, spec: -advantage * logprob,
    "log_ratio": lambda ratio, logprob, anchor, advantage, spec: -advantage * (logprob - anchor),
    "probability_weighted": lambda ratio, logprob, anchor, advantage, spec: (
        -advantage * math.exp(logprob.item()) * logprob
    ),
    "uncertainty_weighted": lambda ratio, logprob, anchor, advantage, spec: (
        -advantage * math.exp(logprob.item()) * (1 - math.exp(logprob.item())) * logprob
    ),
    "logistic": lambda ratio, logprob, anchor, advantage, spec: torch.log1p(torch.exp(-advantage * logprob)),
    "ratio_logprob": lambda ratio, logprob, anchor, advantage, spec: -advantage * ratio.item() * logprob,
    "capped": _capped,
    "tapered": _tapered,
    "exp_advantage": _exp_advantage,
    "gamma": _gamma,
}
RATIO_KIND = ("clipped", "unclipped", "soft_gate")

REGULARIZERS = {
    "none": lambda logprob, anchor: torch.zeros(()),
    "log_likelihood": lambda logprob, anchor: -logprob,
    "squared_log_ratio": lambda logprob, anchor: (logprob - anchor) ** 2,
    "absolute_log_ratio": lambda logprob, anchor: (logprob - anchor) * np.sign(logprob.item() - float(anchor)),
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


def _is_inside(ratio, spec):
    return spec["correction_low"] <= ratio <= spec["correction_high"]


# Ratios of a row's trained tokens -> their weights.
CORRECTIONS = {
    "none": lambda ratios, spec: [1.0] * len(ratios),
    "truncate": lambda ratios, spec: [min(ratio, spec["correction_cap"]) for ratio in ratios],
    "mask": lambda ratios, spec: [ratio if _is_inside(ratio, spec) else 0.0 for ratio in ratios],
    "reject": lambda ratios, spec: [float(_is_inside(ratio, spec)) for ratio in ratios],
    "veto": lambda ratios, spec: [float(all(_is_inside(ratio, spec) for ratio in ratios))] * len(ratios),
}


def exp_clamped(log_ratio):
    return torch.exp(torch.clamp(torch.as_tensor(log_ratio, dtype=torch.float64), -20.0, 20.0))


def correction_weights(row: Row, kept, logprobs, old, spec) -> list[float]:
    """Constants: exp(old - behaviour), or exp(current - behaviour) where the surrogate's gradient holds no ratio."""
    if not row.is_off_policy or spec["anchor"] == "behaviour":
        return [1.0] * len(kept)
    start = old if spec["surrogate"] in RATIO_KIND else logprobs
    gaps = [0.0 if math.isnan(row.behaviour[t]) else start[t].item() - row.behaviour[t] for t in kept]
    leveled = LEVELS[spec["correction_level"]](gaps, row.advantage, spec)
    return CORRECTIONS[spec["correction"]]([exp_clamped(gap).item() for gap in leveled], spec)


def scored_tokens(row: Row, logprobs, entropies, spec) -> list[SimpleNamespace]:
    """The trained tokens of a row with all that surrogates and gates read."""
    kept = [t for t in range(len(row.mask)) if row.trained[t]]
    if not kept:
        return []
    old = logprobs.detach() if row.old is None else torch.tensor(row.old)
    anchor = torch.tensor(row.behaviour) if spec["anchor"] == "behaviour" else old
    log_ratios = [logprobs[t] - anchor[t] for t in kept]
    leveled = LEVELS[spec["level"]](log_ratios, row.advantage, spec)
    known = [old[t].item() if math.isnan(row.behaviour[t]) else row.behaviour[t] for t in kept]
    row_gap = sum(before - logprobs[t].item() for before, t in zip(known, kept, strict=True)) / len(kept)
    weights = correction_weights(row, kept, logprobs, old, spec)
    return [
        SimpleNamespace(
            place=t,
            live_logprob=logprobs[t],
            logprob=logprobs[t].item(),
            live_ratio=exp_clamped(leveled[number]),
            ratio=exp_clamped(leveled[number]).item(),
            log_ratio=log_ratios[number].item(),
            old=old[t],
            anchor=anchor[t].item(),
            entropy=entropies[t],
            advantage=row.advantage,
            row_gap=row_gap,
            weight=weights[number],
            draw=row.draws[t],
        )
        for number, t in enumerate(kept)
    ]


def step_loss(rows: list[Row], logprobs: list[torch.Tensor], entropies: list[torch.Tensor], spec: dict) -> torch.Tensor:
    """Loss of the whole optimizer step."""
    spec = DEFAULTS | spec
    scored = [scored_tokens(*parts, spec) for parts in zip(rows, logprobs, entropies, strict=True)]
    every = [token for tokens in scored for token in tokens]
    if spec["gate"] in STEP_GATES:
        dropped = STEP_GATES[spec["gate"]](every, spec)
    else:
        dropped = [number for number, token in enumerate(every) if not GATES[spec["gate"]](token, spec)]
    for number, token in enumerate(every):
        token.is_kept = number not in dropped
        token.is_held = True
    if spec["regularizer_gate"] != "none":
        held = REGULARIZER_GATES[spec["regularizer_gate"]](every, spec)
        for number, token in enumerate(every):
            token.is_held = number in held
    policy, kl, entropy = [], [], []
    for row, tokens in zip(rows, scored, strict=True):
        if not tokens:
            continue
        losses = [_token_loss(token, spec) for token in tokens]
        policy.append(([loss / (1 + (spec["tau"] or 0.0)) for loss in losses], row.weight, row.group))
        kl.append(([_divergence(token, row, spec) for token in tokens], row.weight, row.group))
        entropy.append(([token.entropy for token in tokens], row.weight, row.group))
    total = AGGREGATIONS[spec["aggregation"]](policy)
    if spec["kl_coefficient"]:
        total = total + spec["kl_coefficient"] * AGGREGATIONS[spec["aggregation"]](kl)
    if spec["entropy_coefficient"]:
        total = total - spec["entropy_coefficient"] * AGGREGATIONS["token_mean"](entropy)
    return total


def _token_loss(token, spec):
    surrogate = SURROGATES[spec["surrogate"]]
    loss = surrogate(token.live_ratio, token.live_logprob, token.anchor, token.advantage, spec) * token.weight
    added = spec["regularizer_coefficient"] * REGULARIZERS[spec["regularizer"]](token.live_logprob, token.anchor)
    return (loss if token.is_kept else torch.zeros(())) + (added if token.is_held else 0.0)


def _divergence(token, row, spec):
    gap = torch.clamp(token.live_logprob - row.reference[token.place], -20.0, 20.0)
    divergence = KL_ESTIMATORS[spec["kl_estimator"]](gap)
    if spec["kl_value_clamp"] is not None and abs(divergence.item()) > spec["kl_value_clamp"]:
        divergence = torch.tensor(math.copysign(spec["kl_value_clamp"], divergence.item()))
    return divergence * exp_clamped(token.live_logprob - token.old) if spec["kl_importance"] else divergence
