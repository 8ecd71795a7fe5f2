"""Cases of numeric_cases.jsonl on returns per token, GAE, KL in the reward and the loss of values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from data_contracts.schemas import TOKEN_SCORES
from rft_core.advantages import whiten
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.kernels.gae_scan import gae_scan
from rft_core.losses import denominators_of
from rft_core.terms import ValueTerm
from rft_core.token_credit import returns_of
from rft_core.value_loss import ValueBatch, value_loss
from tests.rft_core.credit_tables import tables


def scanned(inputs, values="values"):
    """(A, returns A + V) at the masked tokens, 0 elsewhere."""
    given = {name: np.array(inputs[name], float) for name in ("rewards", values)}
    mask = np.array(inputs["mask"] or [1] * len(given["rewards"]), bool)
    rows = [torch.from_numpy(array[None]) for array in (given["rewards"], given[values], mask)]
    found = gae_scan(*rows, torch.zeros(1), inputs["gamma"], inputs["lam"])[0].numpy()
    return found, np.where(mask, found + given[values], 0.0), mask


def gae(inputs):
    advantages, returns, _ = scanned(inputs)
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


def gae_gapskip(inputs):
    advantages, returns, mask = scanned(inputs)
    found = {"advantages": advantages[mask].tolist(), "returns": returns[mask].tolist()}
    return {"positions": np.flatnonzero(mask).tolist(), **found}


def gae_returns(inputs):
    advantages, returns, _ = scanned(inputs)
    return {"returns": returns.tolist(), "advantages_before_whitening": advantages.tolist()}


def gae_masked_middle(inputs):
    """verl's convention, but for the tokens that are masked: theirs carry what follows, ours 0, and both are unread.
    The reward on the masked token is dropped by the scan; ours are put on policy tokens beforehand."""
    advantages, returns, mask = scanned(inputs)
    whitened = np.zeros(len(mask))
    whitened[mask] = whiten(advantages[mask], 1)
    skip = {"advantages_raw": advantages, "returns_raw": returns, "advantages_whitened": whitened}
    theirs = {"advantages_raw": 1.5, "returns_raw": 2.5, "advantages_whitened": -0.707107}
    return {"skip_convention_verl": {name: np.where(mask, skip[name], theirs[name]).tolist() for name in skip}}


def gae_multiturn(inputs):
    # A reward on a masked token moves to the last policy token before it: there is none here.
    assert not any(
        reward for reward, kept in zip(inputs["rewards"], inputs["mask"], strict=True) if reward and not kept
    )
    first, second = (scanned(inputs, values) for values in ("values_a", "values_b"))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    advantages, returns, _ = first
    return {"advantages_on_mask_raw": advantages.tolist(), "returns_on_mask": returns.tolist()}


def discounted(inputs):
    mask, rewards = np.array(inputs["mask"], bool), np.array(inputs["rewards"], float)
    returns = np.zeros(len(mask))
    returns[mask] = returns_of(rewards[mask], inputs["gamma"])
    return {"returns": returns.tolist()}


def scores(kl: list[list[float]]) -> pa.Table:
    rows = []
    for number, gaps in enumerate(kl):
        rows.append((f"r{number}", 0, "old", "p", [0.0] * len(gaps)))
        rows.append((f"r{number}", 0, "reference", "r", [-gap for gap in gaps]))
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=TOKEN_SCORES.schema)


def reinforcepp(inputs):
    """By `whiten_ddof: 0`; the variance is clamped there at 1e-8, which here is added to it."""
    rows = [
        {"id": f"r{number}", "group": f"g{number}", "reward": score, "mask": [value > 0 for value in mask]}
        for number, (score, mask) in enumerate(zip(inputs["scores"], inputs["mask"], strict=True))
    ]
    settings = AlgorithmSettings(
        name="reinforce_plus_plus", whiten_ddof=0, reward_kl_coefficient=inputs["kl_coef"], gamma=inputs["gamma"]
    )
    table, _ = compute_advantages(*tables(*rows), settings, 8, 0, token_scores=scores(inputs["kl"]))
    return {"advantages": table["token_advantages"].to_pylist()}


def rloo_trl(inputs):
    low, high = inputs["reward_clip_range"]
    rows = [
        {"id": f"r{number}", "group": "g", "reward": reward, "mask": [True]}
        for number, reward in enumerate(inputs["rewards"])
    ]
    settings = AlgorithmSettings(
        name="rloo", reward_kl_coefficient=inputs["beta"], reward_clip_low=low, reward_clip_high=high
    )
    kl = scores([[value] for value in inputs["seq_kl"]])
    return {
        "advantages": compute_advantages(*tables(*rows), settings, 8, 0, token_scores=kl)[0]["advantage"].to_pylist()
    }


def loss_of_values(values, old, returns, clip):
    count = len(values)
    batch = ValueBatch(
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(returns, dtype=torch.float32),
        torch.ones(count, dtype=torch.bool),
        torch.ones(count),
        torch.tensor(old, dtype=torch.float32),
    )
    return value_loss(ValueTerm(clip), batch, denominators_of([count], [0], 8)).loss.item()


def value_clip(inputs):
    given = (inputs["values"], inputs["old_values"], inputs["returns"])
    alone = [loss_of_values(*([value] for value in token), inputs["clip"]) for token in zip(*given, strict=True)]
    return {
        "per_token": alone,
        "mean": loss_of_values(*given, inputs["clip"]),
        "unclipped_mean": loss_of_values(*given, None),
    }


MET = {
    "gae_0": gae,
    "gae_2": gae,
    "gae_gapskip": gae_gapskip,
    "gae_returns_g1_l1": gae_returns,
    "gae_returns_g1_l0.5": gae_returns,
    "gae_masked_middle_two_conventions": gae_masked_middle,
    "gae_multiturn_invariance": gae_multiturn,
    "reinforcepp": reinforcepp,
    "reinforce_pp_returns_0": discounted,
    "reinforce_pp_returns_2": discounted,
    "reinforce_pp_returns_3": discounted,
    "rloo_trl": rloo_trl,
    "value_clip": value_clip,
    "value_loss_clip": lambda inputs: {
        "loss": loss_of_values(inputs["vpreds"], inputs["values"], inputs["returns"], inputs["cliprange"])
    },
}
