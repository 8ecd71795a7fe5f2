"""Cases of numeric_cases.jsonl on given completions: inputs -> what is compared with `expected`, or its named parts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from rft_core.batching import TrainRow
from rft_core.kernels.token_logprob import token_logprob
from rft_core.likelihood_weights import log_collision, mean_alignment
from rft_core.pairing import CHOSEN, REJECTED
from rft_core.preference import LABEL_LOSSES, PREFERENCE_LOSSES, Side, StepStatistics
from rft_core.preference_options import Preference
from rft_core.preference_step import (
    RunningShift,
    mean_log_ratio,
    mismatched_rows,
    preference_gradient,
    preference_metrics,
)
from tests.rft_core.padded_rows import algorithm, run


def side(policy, reference=None, length=None) -> Side:
    count = len(policy)
    return Side(
        *(torch.tensor(values, dtype=torch.float64) for values in (policy, reference or [0.0] * count)),
        length=torch.tensor(length or [1.0] * count, dtype=torch.float64),
    )


def loss(name, chosen, rejected, step=None, **settings) -> list[float]:
    preference = replace(Preference(((name, 1.0),), "labels" if name in LABEL_LOSSES else "pairs"), **settings)
    return PREFERENCE_LOSSES[name](chosen, rejected, preference, StepStatistics(**(step or {}))).tolist()


def dpo_losses(inputs):
    chosen = side(inputs["policy_chosen"], inputs["ref_chosen"], inputs["len_chosen"])
    rejected = side(inputs["policy_rejected"], inputs["ref_rejected"], inputs["len_rejected"])
    beta, smoothing = {"beta": inputs["beta"]}, {"label_smoothing": inputs["label_smoothing_where_used"]}
    named = {
        "sigmoid": ("dpo", {}),
        "hinge": ("hinge", {}),
        "ipo_trl_length_avg": ("ipo", {}),
        "ipo_openrlhf_sum": ("ipo", {"length_normalised": False}),
        "exo_pair": ("exo", smoothing),
        "nca_pair": ("nca", {}),
        "robust": ("robust", smoothing),
        "bco_pair": ("bco_pair", {}),
        "sppo_hard": ("sppo", {}),
        "aot": ("aot", smoothing),
        "aot_unpaired": ("aot_unpaired", smoothing),
        "apo_zero": ("apo_zero", {}),
        "apo_down": ("apo_down", {}),
        "discopop_tau0.05": ("discopop", {}),
        "sigmoid_norm": ("dpo_norm", {}),
        "cdpo_openrlhf": ("dpo", smoothing),
    }
    per_pair = {case: loss(name, chosen, rejected, **beta, **settings) for case, (name, settings) in named.items()}
    scores = {
        CHOSEN: zip(inputs["policy_chosen"], inputs["ref_chosen"], strict=True),
        REJECTED: zip(inputs["policy_rejected"], inputs["ref_rejected"], strict=True),
    }
    rows = {f"{role}{pair}": (role, pair, *both) for role, given in scores.items() for pair, both in enumerate(given)}
    metrics = measured(
        {name: (role, pair, [policy], [ref]) for name, (role, pair, policy, ref) in rows.items()}, **beta
    )
    assert metrics["rewards_margin"] == np.mean([0.2, 0.0])
    assert metrics["rewards_chosen"] == np.mean([0.1, 0.05]) and metrics["rewards_rejected"] == np.mean([-0.1, 0.05])
    mean = {case: float(np.mean(values)) for case, values in per_pair.items()}
    return {"per_pair": per_pair, "mean": mean, "accuracy": metrics["rewards_accuracy"]}


def measured(rows, **settings) -> dict:
    """Loss and metrics of a dpo step over {id: (role, pair, policy logprobs, reference logprobs)}."""
    made, current, reference = [], {}, {}
    for name, (role, pair, policy, ref) in rows.items():
        tokens = np.arange(len(policy)) + 5
        row = TrainRow(name, str(pair), tokens[:1], tokens, tokens > 0, pair_id=str(pair), pair_role=role)
        made.append(row)
        current[row.key], reference[row.key] = (torch.tensor(values, dtype=torch.float64) for values in (policy, ref))
    found = preference_gradient(
        replace(Preference((("dpo", 1.0),)), **settings), made, current, reference, RunningShift(), 0.0
    )
    return {"loss": found.loss, **preference_metrics(found.sums)}


def dpo_step0(inputs):
    metrics = measured({"a": (CHOSEN, 0, [-1.0, -2.5], [-1.0, -2.5]), "b": (REJECTED, 0, [-0.3], [-0.3])})
    return {"loss": metrics["loss"], "margin": metrics["rewards_margin"], "accuracy": metrics["rewards_accuracy"]}


def dpo_fdiv(inputs):
    chosen, rejected = side(inputs["chosen_logratio"]), side(inputs["rejected_logratio"])
    named = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_0.5": "alpha"}
    losses = {
        case: loss("dpo", chosen, rejected, beta=inputs["beta"], divergence=name, divergence_alpha=0.5)
        for case, name in named.items()
    }
    # -logsig(beta delta) gives delta back.
    deltas = {
        case: [-math.log(math.expm1(value)) / inputs["beta"] for value in values] for case, values in losses.items()
    }
    return {"delta": deltas, "sigmoid_loss": losses}


def ld_dpo(inputs):
    chosen, rejected = inputs["chosen_token_logps"], inputs["rejected_token_logps"]
    rows = {"a": (CHOSEN, 0, chosen, [0.0] * len(chosen)), "b": (REJECTED, 0, rejected, [0.0] * len(rejected))}
    metrics = measured(rows, tail_weight=inputs["ld_alpha"])
    return {"chosen": metrics["logps_chosen"], "rejected": metrics["logps_rejected"]}


def halves(name, inputs, **rest):
    chosen, rejected = side(inputs["chosen_logratio"]), side(inputs["rejected_logratio"])
    values = loss(name, chosen, rejected, beta=inputs["beta"], **rest)
    return values[: len(chosen.policy)], values[len(chosen.policy) :]


def kto(inputs):
    kto_chosen, kto_rejected = halves("kto", inputs, step={"kl": inputs["kl"]})
    apo_chosen, apo_rejected = halves("apo_zero_unpaired", inputs)
    return {
        "kto_chosen": kto_chosen,
        "kto_rejected": kto_rejected,
        "apo_chosen": apo_chosen,
        "apo_rejected": apo_rejected,
        "kl_clamped_example": {"mean_logratio": -0.3, "kl": kl_of([-0.5, -0.1])},  # mean -0.3
    }


def kl_of(log_ratios):
    ones = np.ones(1, np.int64)
    rows = [TrainRow(str(number), "", ones, ones, ones > 0) for number in range(len(log_ratios))]
    current = {row.key: torch.tensor([value]) for row, value in zip(rows, log_ratios, strict=True)}
    return mean_log_ratio(rows, current, {row.key: torch.zeros(1) for row in rows})


def kto_cycle(inputs):
    rows = [
        TrainRow(str(number), "", np.array([number]), np.array([token]), np.ones(1, bool))
        for number, token in enumerate(inputs["completions"])
    ]
    behind = {int(row.prompt_token_ids[0]): int(row.completion_token_ids[0]) for row in mismatched_rows(rows).values()}
    return [behind[number] for number in range(len(rows))]


def bco(inputs):
    rewards = (
        torch.tensor(inputs["chosen_logratio"] + inputs["rejected_logratio"], dtype=torch.float64) * inputs["beta"]
    )
    shift = RunningShift().including(rewards, torch.ones(len(rewards), dtype=torch.float64)).mean
    chosen, rejected = halves("bco", inputs, step={"shift": shift})
    return {"delta": shift, "chosen": chosen, "rejected": rejected}


def orpo(inputs):
    chosen, rejected, beta = inputs["avg_logp_chosen"], inputs["avg_logp_rejected"], inputs["beta"]
    values = loss("orpo", side(chosen), side(rejected), beta=beta)
    log_sigmoid = [-(value + average) / beta for value, average in zip(values, chosen, strict=True)]
    # The case's NLL of chosen is a number of its own.
    return {"log_sigmoid": log_sigmoid, "loss": inputs["nll"] - beta * float(np.mean(log_sigmoid))}


def cpo(inputs):
    sides = side(inputs["logp_chosen"]), side(inputs["logp_rejected"])
    beta, gamma = {"beta": inputs["beta"]}, {"gamma": inputs["simpo_gamma"]}
    return {
        "sigmoid": loss("cpo", *sides, **beta, alpha=0.0),
        "hinge": loss("hinge", *sides, **beta),
        "ipo": loss("ipo", *sides, **beta, length_normalised=False),
        "simpo": loss("simpo", *sides, **beta, **gamma),
        "alphapo_simpo": loss("simpo", *sides, **beta, **gamma, alpha_reward=inputs["alpha"]),
    }


def reward_model(inputs):
    chosen, rejected = side(inputs["chosen"]), side(inputs["rejected"])
    apart = replace(chosen, margin=torch.tensor(inputs["margin"], dtype=torch.float64))
    return {
        "plain": float(np.mean(loss("bradley_terry", chosen, rejected))),
        "with_margin": float(np.mean(loss("bradley_terry", apart, rejected))),
        "with_centering": float(np.mean(loss("bradley_terry", chosen, rejected, centring=inputs["center_coef"]))),
    }


def dft_1(inputs):
    # Two equal logits: p = 1/2 for each of the three targets.
    dft = algorithm(surrogate="probability_weighted", aggregation="token_mean")
    return run(dft, [[1, 1], [1]], [[1, 1], [1]], logprobs=[[-math.log(2)] * 2, [-math.log(2)]])[0]


def wpo(inputs):
    """Of one completion, without the bound at 1."""
    logits = torch.tensor(inputs["logits"])
    tokens = torch.tensor(inputs["tokens"])
    row = TrainRow("r", "g", np.array([1]), tokens.numpy(), np.ones(len(tokens), bool))
    current = {row.key: token_logprob(logits, tokens)[0]}
    return math.exp(mean_alignment([row], current, {row.key: log_collision(logits, 1.0)}))


MET = {
    case.__name__: case
    for case in (dpo_losses, dpo_step0, dpo_fdiv, ld_dpo, wpo, kto, kto_cycle, bco, orpo, cpo, reward_model, dft_1)
}
