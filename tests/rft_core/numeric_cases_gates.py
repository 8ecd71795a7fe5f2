"""Cases of numeric_cases.jsonl on gates, weights and selections: inputs -> what is compared with `expected`."""

from __future__ import annotations

import math

import numpy as np
import torch

from rft_core.gates import GATES, STEP_GATES, StepTokens
from rft_core.kl_controller import adapted_coefficient
from rft_core.losses import MAX_LOG_RATIO, Rows
from rft_core.surrogates import SURROGATES, Tokens
from rft_core.terms import Term
from tests.rft_core.padded_rows import algorithm, run, tensor, weights


def entropy_mask(inputs):
    mask_T = tensor([value for row in inputs["mask"] for value in row]).bool()
    entropy_T = tensor([value for row in inputs["entropies"] for value in row])
    zeros_T = torch.zeros_like(entropy_T)
    tokens = StepTokens(zeros_T, zeros_T, zeros_T, entropy_T, mask_T, zeros_T.double())
    kept_T = STEP_GATES["entropy_quantile"](tokens, Term(entropy_quantile=inputs["quantile"])) & mask_T
    return np.reshape(kept_T.int().tolist(), np.shape(inputs["mask"])).tolist()


def offpolicy_mask(inputs):
    lengths = [len(row) for row in inputs["mask"]]
    flat = {
        name: torch.cat([tensor(row) for row in inputs[name]]) for name in ("policy_logps", "sampling_logps", "mask")
    }
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = Rows.of(flat["mask"].bool(), row_T, torch.zeros(len(lengths), dtype=torch.int64))
    advantages_T = tensor(inputs["advantages"])[row_T]
    tokens = Tokens(
        flat["policy_logps"],
        flat["policy_logps"],
        torch.ones(len(row_T)),
        advantages_T,
        flat["sampling_logps"],
    )
    kept_T = GATES["off_policy_sequence"](tokens, rows, Term(off_policy_limit=inputs["threshold"]))
    return [[float(kept_T[row_T == row][0])] for row in range(len(lengths))]


def token_weights(name, log_ratios, advantages, logprobs=None, **term):
    """What a likelihood surrogate multiplies -A lp with."""
    ratio = tensor(log_ratios).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    logprob, advantage = tensor(logprobs or [-1.0] * len(log_ratios)), tensor(advantages)
    tokens = Tokens(logprob, torch.zeros_like(ratio), ratio, advantage, logprob)
    losses = SURROGATES[name](tokens, Term(**term))
    return (losses / (-advantage * logprob)).tolist(), losses.tolist()


def vespo_phi1(inputs):
    return token_weights("gamma", inputs["log_w"], [1.0] * 4)[0]


def cispo_clamp(inputs):
    bounds = {"weight_floor": 1 - inputs["eps_low"], "weight_cap": 1 + inputs["eps_high"]}
    log_ratios = [math.log(ratio) for ratio in inputs["ratios"]]
    clamped, losses = token_weights("capped", log_ratios, inputs["advantages"], inputs["logprobs"], **bounds)
    return {"clamped": clamped, "per_token_loss": losses}


def topr_taper(inputs):
    # Each row one token: mean and sum of its log ratios are the same.
    return {"weights": token_weights("tapered", inputs["mean_log_ratio"], inputs["sequence_advantages"])[0]}


def dro(inputs):
    # beta / 2 (lp - old)^2 is the regularizer; the masked token counts nowhere.
    chosen = algorithm(surrogate="logprob", regularizer="squared_log_ratio", regularizer_coefficient=inputs["beta"] / 2)
    loss = run(
        chosen,
        [inputs["advantages"]],
        [inputs["mask"]],
        logprobs=[inputs["logprobs"]],
        old_logprobs_T=[inputs["old_logprobs"]],
    )[0]
    return {"loss": loss}


def outlier_veto(inputs):
    bounds = {"low": inputs["low"], "high": inputs["high"]}
    rejected = [1 - weights([gap, 0.0], "veto", **bounds)[1] for gap in inputs["log_ratios"]]
    masked = weights([inputs["log_ratios"][0], 0.0], "veto", mask=[0, 1], **bounds)
    assert masked[1] == 1.0
    return {"ratios": [math.exp(gap) for gap in inputs["log_ratios"]], "reject": rejected}


def verl_token_rs(inputs):
    # Two rows of one token; "rs" reads "token_k1 0.5_2.0".
    gaps = [inputs["old"] - value for value in inputs["rollout_rows"]]
    low, high = map(float, inputs["rs"].split()[1].split("_"))
    kept = [weights([gap], "reject", low=low, high=high)[0] for gap in gaps]
    return {
        "weights": [weights([gap], cap=inputs["is_cap"])[0] for gap in gaps],
        "keep_rows": kept,
        "masked_fraction": 1 - sum(kept) / len(kept),
    }


def adaptive_kl(inputs):
    step = {"num_rollouts": inputs["n_steps"], "target": inputs["target"], "horizon": inputs["horizon"]}
    return [adapted_coefficient(inputs["init"], observed, **step) for observed in inputs["observed"]]


def adaptive_kl_step(inputs):
    step = {"num_rollouts": inputs["n"], "target": inputs["target"], "horizon": inputs["horizon"]}
    return {"value": adapted_coefficient(inputs["value"], inputs["observed"], **step)}


MET = {
    "adaptive_kl": adaptive_kl,
    "adaptive_kl_step": adaptive_kl_step,
    "entropy_mask_0": entropy_mask,
    "entropy_mask_2": entropy_mask,
    "entropy_mask_3": entropy_mask,
    "entropy_mask_5": entropy_mask,
    "offpolicy_mask_1": offpolicy_mask,
    "offpolicy_mask_2": offpolicy_mask,
    "vespo_phi1": vespo_phi1,
    "cispo_clamp": cispo_clamp,
    "topr_taper": topr_taper,
    "dro": dro,
    "outlier_veto": outlier_veto,
    "verl_token_rs": verl_token_rs,
}
