"""Credit per token: pure functions from rewards of policy tokens to advantages, and the table that names them.

A row is the policy's tokens of one rollout, all segments in order; what others wrote between them is left out, so it
neither discounts nor resets a return. Float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rft_core.advantages import whiten
from rft_core.errors import ContractError
from rft_core.pairing import DESIRABLE_FROM

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.terms import Algorithm

# By (rollout_id, segment): bool[C] what the policy wrote, and float64[C] old - reference.
Masks = Mapping[tuple[str, int], np.ndarray]
Gaps = Mapping[tuple[str, int], np.ndarray]
TokenAdvantage = Callable[[Sequence[np.ndarray], "AlgorithmSettings"], list[np.ndarray]]


def returns_of(rewards_T: np.ndarray, gamma: float) -> np.ndarray:
    """sum over k of gamma^k r_(t+k).

    >>> returns_of(np.array([0.0, 0.0, 2.0]), 0.5).tolist()
    [0.5, 1.0, 2.0]
    """
    returns_T = np.zeros(len(rewards_T))
    following = 0.0
    for token in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[token] + gamma * following
        returns_T[token] = following
    return returns_T


def batch_whiten(rewards: Sequence[np.ndarray], settings: AlgorithmSettings) -> list[np.ndarray]:
    """Each token's return, whitened over all tokens of the step (REINFORCE++, arXiv 2501.03262)."""
    returns = [returns_of(rewards_T, settings.gamma) for rewards_T in rewards]
    if not returns:
        return []
    whitened = whiten(np.concatenate(returns), settings.whiten_ddof)
    return np.split(whitened, np.cumsum([len(returns_T) for returns_T in returns])[:-1])


def teacher_gap(rewards: Sequence[np.ndarray], settings: AlgorithmSettings) -> list[np.ndarray]:
    """0: all credit is what a teacher says of each token, which `with_teacher_gap` adds."""
    return [np.zeros(len(rewards_T)) for rewards_T in rewards]


TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {"batch_whiten": batch_whiten, "teacher_gap": teacher_gap}


def reference_gaps(token_scores: pa.Table) -> dict[tuple[str, int], np.ndarray]:
    """float64[C] old - reference by (rollout_id, segment): the k1 estimate of the KL to the reference per token.

    Raises ContractError for a segment that one of the two did not score.
    """
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for row in token_scores.select(["rollout_id", "segment", "scorer", "values"]).to_pylist():
        found.setdefault((row["rollout_id"], row["segment"]), {})[row["scorer"]] = np.array(row["values"], np.float64)
    for key, values in found.items():
        if not {"old", "reference"} <= values.keys():
            raise ContractError(f"token_scores must hold old and reference of {key}, found {sorted(values)}")
    return {key: values["old"] - values["reference"] for key, values in found.items()}


def policy_masks(rollouts: pa.Table) -> Masks:
    """bool[C] of each train segment: what the policy wrote."""
    rows = rollouts.filter(pc.equal(rollouts["purpose"], "train")).select(["rollout_id", "segment", "completion_mask"])
    return {(row["rollout_id"], row["segment"]): np.array(row["completion_mask"], bool) for row in rows.to_pylist()}


def with_token_credit(
    advantages: pa.Table,
    masks: Masks,
    reward_of: Mapping[str, float],
    gaps: Gaps | None,
    algorithm: Algorithm,
    settings: AlgorithmSettings,
) -> pa.Table:
    """The table with token_advantages of its trained rows, and their mean as the credit of the whole segment.

    A rollout's reward is that of its last policy token; `algorithm.reward_kl` x gap is taken from each.
    """
    keys = list(zip(advantages["rollout_id"].to_pylist(), advantages["segment"].to_pylist(), strict=True))
    segments: dict[str, list[tuple[str, int]]] = {}
    for key, is_trained in zip(keys, advantages["is_trained"].to_pylist(), strict=True):
        if is_trained and masks[key].any():
            segments.setdefault(key[0], []).append(key)
    segments = {rollout_id: sorted(parts) for rollout_id, parts in segments.items()}
    rewards = []
    for rollout_id, parts in segments.items():
        rewards_T = np.zeros(int(sum(masks[key].sum() for key in parts)))
        if gaps is not None:
            rewards_T -= algorithm.reward_kl * np.concatenate([gaps[key][masks[key]] for key in parts])
        rewards_T[-1] += reward_of[rollout_id]
        rewards.append(rewards_T)
    credit: dict[tuple[str, int], np.ndarray] = {}
    estimator = TOKEN_ADVANTAGES[str(algorithm.advantage)]
    for parts, advantages_T in zip(segments.values(), estimator(rewards, settings), strict=True):
        start = 0
        for key in parts:
            count = int(masks[key].sum())
            credit[key] = np.zeros(len(masks[key]), np.float32)
            credit[key][masks[key]] = advantages_T[start : start + count]
            start += count
    means = [float(credit[key][masks[key]].mean()) if key in credit else 0.0 for key in keys]
    table = _with(advantages, "token_advantages", [credit.get(key) for key in keys])
    return _with(table, "advantage", means)


def with_step_labels(advantages: pa.Table, rollouts: pa.Table, rewards: pa.Table) -> pa.Table:
    """token_advantages of 1 at the end of a good step and -1 at that of a bad one, 0 elsewhere; a step is good from a
    step reward of 0.5. Raises ContractError for a rollout without step rewards."""
    labels = {row["rollout_id"]: row for row in rewards.select(["rollout_id", "step_ends", "step_rewards"]).to_pylist()}
    columns = ["rollout_id", "segment", "completion_mask"]
    lengths = {
        (row["rollout_id"], row["segment"]): len(row["completion_mask"]) for row in rollouts.select(columns).to_pylist()
    }
    values = []
    for row in advantages.select(["rollout_id", "segment"]).to_pylist():
        found = labels[row["rollout_id"]]
        if found["step_rewards"] is None:
            raise ContractError(f"rollout {row['rollout_id']} must have step_rewards, found none")
        credit = np.zeros(lengths[row["rollout_id"], row["segment"]], np.float32)
        credit[found["step_ends"]] = np.where(np.array(found["step_rewards"]) >= DESIRABLE_FROM, 1.0, -1.0)
        values.append(credit)
    return _with(advantages, "token_advantages", values)


def _with(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
