"""Cases of numeric_cases.jsonl on credit: inputs -> what is compared with `expected`, or with the parts it names."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rft_core.advantages import ADVANTAGES, Credits, std_of, whiten
from rft_core.config import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.token_credit import returns_of
from tests.rft_core.credit_tables import tables
from tests.rft_core.test_token_credit import scores


def credit(name, rewards, groups=None, **settings):
    values = np.array([math.nan if value in (None, "NaN") else float(value) for value in rewards])
    credits = Credits(values, np.array(groups or [0] * len(values)), ~np.isnan(values))
    return ADVANTAGES[name](credits, AlgorithmSettings(**settings)).tolist()


def adv_group(inputs):
    rewards, groups = [reward for group in inputs["rewards"] for reward in group], [0] * 4 + [1] * 4

    def two(name, **settings):
        flat = credit(name, rewards, groups, **settings)
        return [flat[:4], flat[4:]]

    return {
        "grpo_trl_group": two("group_zscore", std_epsilon=1e-4),
        "grpo_trl_batch": two("group_zscore", std_epsilon=1e-4, std_scope="batch"),
        "grpo_trl_none_dr_grpo": two("group_mean"),
        "grpo_openrlhf_group_norm": two("group_zscore", std_epsilon=1e-9),
        "grpo_async_population": two("group_zscore", std_ddof=0, std_epsilon=1e-8),
        "rloo": two("leave_one_out"),
    }


def adv_none(inputs):
    # The weighted sums 1, 1, unscored, .5 are the reward stage's.
    rewards = [1.0, 1.0, None, 0.5]
    return {
        "grpo_advantages": credit("group_zscore", rewards, std_epsilon=1e-4),
        "rloo_advantages": credit("leave_one_out", rewards),
        "std": std_of(np.array([1.0, 1.0, 0.5]), 1),
    }


def adv_zero_std(inputs):
    rollouts, rewards = tables(*({"group": "g", "reward": float(reward)} for reward in inputs["rewards"][0]))
    table, metrics = compute_advantages(rollouts, rewards, AlgorithmSettings(), 10, 0)
    return {
        "all_variants": [table["advantage"].to_pylist()],
        "frac_reward_zero_std": metrics["frac_reward_zero_std"],
    }


def overlong(length, limit, buffer):
    rollouts, rewards = tables({"group": "g", "reward": 0.0, "tokens": length})
    settings = AlgorithmSettings(advantage="none", min_group_size=1, overlong_buffer_tokens=buffer)
    return compute_advantages(rollouts, rewards, settings, limit, 0)[0]["advantage"][0].as_py()


def lengths(rows):
    rollouts, rewards = tables(
        *(
            {"group": "g", "reward": 0.0, "mask": mask, "finish_reason": "length" if is_cut else "stop"}
            for mask, is_cut in rows
        )
    )
    return compute_advantages(rollouts, rewards, AlgorithmSettings(), 100, 0)[1]


def truncation_flags(inputs):
    rows = [
        lengths([([True] * n, flag) for n, flag in zip(row["lengths"], row["flags"], strict=True)])
        for row in inputs["rows"]
    ]
    return {"clip_ratio": [metrics["completions/clipped_ratio"] for metrics in rows]}


def leave_one_out_seven_equal(inputs):
    assert credit("leave_one_out", inputs["rewards"])[-1] == pytest.approx(0.65)
    return {}


def async_adv(inputs):
    values = credit("group_zscore", inputs["rewards"], std_ddof=0, std_epsilon=0.0)
    return {
        "advantages_per_row": [
            value for value, rows in zip(values, inputs["rows_per_conversation"], strict=True) for _ in range(rows)
        ],
        "reward_std": std_of(np.array(inputs["rewards"]), 0),
    }


def grouped(name, **settings):
    def check(inputs):
        rewards = inputs.get("sequence_rewards", inputs.get("rewards"))
        return {"advantages": credit(name, rewards, inputs.get("group"), **settings)}

    return check


def adv_gdpo(inputs):
    # normalize_then_sum adds 1e-4 to the deviation of the step as well; ours adds 1e-8 to the variance.
    sums = [sum(member) for group in inputs["rewards"] for member in group]
    flat = credit("group_zscore", sums, [0, 0, 1, 1], std_epsilon=1e-4)
    return {"sum_then_normalize": [flat[:2], flat[2:]]}


def nemo_gdpo(inputs):
    rewards = np.zeros(2)
    components = {name: np.array(inputs[name], float) for name in ("correctness", "integer", "format")}
    whole = Credits(
        rewards,
        np.zeros(2, int),
        np.ones(2, bool),
        components=components,
        component_weights=dict.fromkeys(components, 1.0),
    )
    return {"advantages": ADVANTAGES["per_component"](whole, AlgorithmSettings()).tolist()}


def opo_baseline(inputs):
    rows = zip(inputs["sequence_rewards"], inputs["lengths"], strict=True)
    rollouts, rewards = tables(*({"group": "g", "reward": float(reward), "tokens": n} for reward, n in rows))
    table, _ = compute_advantages(rollouts, rewards, AlgorithmSettings(name="opo"), 10, 0)
    advantages = table["advantage"].to_pylist()
    return {"baseline": inputs["sequence_rewards"][0] - advantages[0], "advantages": advantages}


def a2po_v(inputs):
    first = credit("log_mean_exp", inputs["rewards"], baseline="log_mean_exp", tau=inputs["beta1"])[0]
    return inputs["rewards"][0] - first


def nemo_invalid_member_excluded(inputs):
    rewards = [reward if valid else None for reward, valid in zip(inputs["rewards"], inputs["valid"], strict=True)]
    first, middle, last = credit("leave_one_out", rewards)
    assert middle == 0.0
    return {"baseline_first": 1 - first, "baseline_last": 3 - last}


def rloo_trl(inputs):
    """One token each, whose gap to the reference is the KL of the sequence."""
    rows = [
        {"id": str(number), "group": "g", "reward": reward, "tokens": 1}
        for number, reward in enumerate(inputs["rewards"])
    ]
    gaps = {str(number): [gap] for number, gap in enumerate(inputs["seq_kl"])}
    low, high = inputs["reward_clip_range"]
    settings = {"reward_kl_coefficient": inputs["beta"], "reward_clip_low": low, "reward_clip_high": high}
    table, _ = compute_advantages(
        *tables(*rows), AlgorithmSettings(name="rloo", **settings), 8, 0, token_scores=scores(gaps)
    )
    return {"advantages": table["advantage"].to_pylist()}


def returns_per_token(inputs):
    """Tokens that others wrote are left out: they neither discount nor reset, and have none."""
    mask = np.array(inputs["mask"], bool)
    found = np.zeros(len(mask))
    found[mask] = returns_of(np.array(inputs["rewards"], float)[mask], float(inputs["gamma"]))
    return {"returns": found.tolist()}


MET = {
    "rloo_trl": rloo_trl,
    **{f"reinforce_pp_returns_{number}": returns_per_token for number in (0, 2, 3)},
    "nanstd_1": lambda inputs: std_of(np.array([1.0, 2.0, 3.0]), 1),
    "soft_overlong_0": lambda i: overlong(i["length"], i["max_completion_len"], i["soft_punish_cache"]),
    "soft_overlong_2": lambda i: overlong(i["length"], i["max_completion_len"], i["soft_punish_cache"]),
    "overlong_orlhf": lambda i: [overlong(n, i["max_new_tokens"], i["buffer"]) for n in i["lengths"]],
    "masked_var": lambda i: std_of(np.array([2.0, 3.0]), 1) ** 2,
    "async_adv": async_adv,
    "async_none": lambda i: {"advantages": credit("group_zscore", i["rewards"])},
    "adv_group": adv_group,
    "adv_zero_std": adv_zero_std,
    "adv_none": adv_none,
    "rloo_pairs": grouped("leave_one_out"),
    "grpo_mean_only": grouped("group_mean"),
    "hierarchical_grpo": grouped("group_mean"),
    "singleton_group_zero": grouped("group_zscore"),
    "grpo_one_of_eight": grouped("group_zscore", std_epsilon=0.0),
    "nemo_close_rewards": grouped("group_zscore"),
    "none_reward_excluded": grouped("group_mean"),
    "leave_one_out_seven_equal": leave_one_out_seven_equal,
    "nemo_invalid_member_excluded": nemo_invalid_member_excluded,
    "masked_whiten": lambda i: {
        "values": whiten(np.array([x for x, is_valid in zip(i["x"], i["mask"], strict=True) if is_valid], float), 1)
    },
    "adv_gdpo": adv_gdpo,
    "nemo_gdpo": nemo_gdpo,
    "maxrl": grouped("reward_over_mean"),
    "opo_baseline": opo_baseline,
    "grpo_passk": grouped("pass_at_k"),
    "a2po_v": a2po_v,
    "nemo_zero_std_group": lambda i: {"advantages": [credit("group_zscore", group) for group in i["groups"]]},
    "truncation_flags": truncation_flags,
    "multi_turn_response_length": lambda i: {
        "generated_tokens": lengths([(list(map(bool, i["action_mask"])), False)])["completions/mean_length"]
    },
}
