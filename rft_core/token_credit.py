"""Credit per token: pure functions from rewards of policy tokens to advantages, and the table that names them.

A row is the policy's tokens of one rollout, all segments in order; what others wrote between them is left out, so it
neither discounts nor resets a return. Float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rft_core.advantages import has_no_signal, std_of, whiten
from rft_core.errors import ContractError
from rft_core.pairing import DESIRABLE_FROM

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.terms import Algorithm

# By (rollout_id, segment), aligned with the completion: bool[C] what the policy wrote, or float64[C] of each token.
Masks = Mapping[tuple[str, int], np.ndarray]
Scores = Mapping[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class RowTokens:
    """The T tokens that the policy wrote of a rollout. `first_step_T` is the step that a token belongs to, K for none.

    >>> RowTokens("g", np.array([0.0, 1.0])).num_tokens
    2
    """

    group_id: str
    rewards_T: np.ndarray
    values_T: np.ndarray | None = None  # a critic's, of the state in which each token was written
    value_after: float = 0.0  # of the state behind the last one
    first_step_T: np.ndarray | None = None  # int64
    step_rewards_K: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.rewards_T)


@dataclass(frozen=True)
class TokenCredit:
    """Per row, in order; `returns` are what a critic should have said."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None = None


# (rows, settings, lambda of the critic's returns or null for the policy's own) -> credit
TokenAdvantage = Callable[[Sequence[RowTokens], "AlgorithmSettings", float | None], TokenCredit]


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


def batch_whiten(
    rows: Sequence[RowTokens], settings: AlgorithmSettings, value_lambda: float | None = None
) -> TokenCredit:
    """Each token's return, whitened over all tokens of the step (REINFORCE++, arXiv 2501.03262)."""
    return TokenCredit(_whitened([returns_of(row.rewards_T, settings.gamma) for row in rows], settings))


def gae(rows: Sequence[RowTokens], settings: AlgorithmSettings, value_lambda: float | None = None) -> TokenCredit:
    """Generalised advantages (arXiv 1506.02438, eq. 16), whitened over all tokens of the step; the returns A + V, by
    their own lambda where one is given, are not. Raises ValueError for a row without values."""
    policy = _scanned(rows, settings.gamma, settings.gae_lambda)
    critic = policy if value_lambda is None else _scanned(rows, settings.gamma, value_lambda)
    returns = [part + row.values_T for part, row in zip(critic, rows, strict=True)]
    return TokenCredit(_whitened(policy, settings), returns)


def per_step_group_zscore(
    rows: Sequence[RowTokens], settings: AlgorithmSettings, value_lambda: float | None = None
) -> TokenCredit:
    """Sum, over the steps that end at the token or later, of their reward standardised over all steps of the group
    (GRPO with process supervision, arXiv 2402.03300, section 4.1.3). Steps without spread give 0."""
    statistics = {}
    for group_id, rewards in _steps_by_group(rows).items():
        is_flat = _is_flat(rewards, settings)
        scale = np.inf if is_flat else std_of(rewards, settings.std_ddof) + settings.std_epsilon
        statistics[group_id] = (math.fsum(rewards) / max(len(rewards), 1), scale)
    advantages = []
    for row in rows:
        mean, scale = statistics[row.group_id]
        from_step_K = np.cumsum(((row.step_rewards_K - mean) / scale)[::-1])[::-1]
        advantages.append(np.append(from_step_K, 0.0)[row.first_step_T])
    return TokenCredit(advantages)


def teacher_gap(
    rows: Sequence[RowTokens], settings: AlgorithmSettings, value_lambda: float | None = None
) -> TokenCredit:
    """0: all credit is what a teacher says of each token, which `with_teacher_gap` adds."""
    return TokenCredit([np.zeros(row.num_tokens) for row in rows])


TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {
    "batch_whiten": batch_whiten,
    "gae": gae,
    "per_step_group_zscore": per_step_group_zscore,
    "teacher_gap": teacher_gap,
}


def flat_step_groups(rows: Sequence[RowTokens], settings: AlgorithmSettings) -> set[str]:
    """Groups whose steps were all rewarded alike, so that none of them tells good from bad."""
    return {group_id for group_id, rewards in _steps_by_group(rows).items() if _is_flat(rewards, settings)}


def _is_flat(rewards: np.ndarray, settings: AlgorithmSettings) -> bool:
    return not len(rewards) or has_no_signal(rewards, settings.spread_floor)


def _steps_by_group(rows: Sequence[RowTokens]) -> dict[str, np.ndarray]:
    groups: dict[str, list[np.ndarray]] = {}
    for row in rows:
        if row.step_rewards_K is None:
            raise ValueError("credit per step needs step rewards of each row")
        groups.setdefault(row.group_id, []).append(row.step_rewards_K)
    return {group_id: np.concatenate(parts) for group_id, parts in groups.items()}


def _whitened(values: list[np.ndarray], settings: AlgorithmSettings) -> list[np.ndarray]:
    if not values:
        return []
    whitened = whiten(np.concatenate(values), settings.whiten_ddof)
    return np.split(whitened, np.cumsum([len(values_T) for values_T in values])[:-1])


def _scanned(rows: Sequence[RowTokens], gamma: float, lam: float) -> list[np.ndarray]:
    """Advantages of each row by the scan over all rows at once, padded at their ends."""
    import torch  # here, since settings and the other advantages do without

    from rft_core.kernels.gae_scan import gae_scan

    shape = (len(rows), max((row.num_tokens for row in rows), default=0))
    rewards_RT, values_RT, mask_RT = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    for number, row in enumerate(rows):
        if row.values_T is None:
            raise ValueError("advantage gae needs values of each row")
        rewards_RT[number, : row.num_tokens] = row.rewards_T
        values_RT[number, : row.num_tokens] = row.values_T
        mask_RT[number, : row.num_tokens] = True
    arrays = (rewards_RT, values_RT, mask_RT, np.array([row.value_after for row in rows], float))
    advantages_RT = gae_scan(*map(torch.from_numpy, arrays), gamma, lam).numpy()
    return [advantages_RT[number, : row.num_tokens] for number, row in enumerate(rows)]


@dataclass(frozen=True)
class TokenInputs:
    """What credit per token reads beside the rollouts' rewards."""

    masks: Masks
    gaps: Scores | None = None  # old - reference, where the reward holds their KL
    values: Scores | None = None  # a critic's, of the state before each token
    after: Scores = field(default_factory=dict)  # the same of the state behind it, for completions that were cut
    truncated: frozenset[str] = frozenset()  # rollouts that go on behind their last token
    steps: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by rollout: ends, rewards

    def row(self, keys: Sequence[tuple[str, int]], group_id: str, reward: float, reward_kl: float) -> RowTokens:
        """A rollout's tokens, from its segments in order. The reward is that of the last one; `reward_kl` x gap is
        taken from each. Raises ContractError when step rewards or the value behind a cut completion are missing."""
        rollout_id = keys[0][0]
        rewards_T = np.zeros(int(sum(self.masks[key].sum() for key in keys)))
        if self.gaps is not None:
            rewards_T -= reward_kl * self._written(self.gaps, keys)
        rewards_T[-1] += reward
        value_after = 0.0
        if rollout_id in self.truncated:
            if keys[-1] not in self.after:
                raise ContractError(f"token_scores must hold critic_after of {keys[-1]}, which was cut, found none")
            value_after = float(self.after[keys[-1]][-1])
        values_T = None if self.values is None else self._written(self.values, keys)
        row = RowTokens(group_id, rewards_T, values_T, value_after)
        return row if rollout_id not in self.steps else self._with_steps(row, keys)

    def _written(self, scores: Scores, keys: Sequence[tuple[str, int]]) -> np.ndarray:
        return np.concatenate([scores[key][self.masks[key]] for key in keys])

    def _with_steps(self, row: RowTokens, keys: Sequence[tuple[str, int]]) -> RowTokens:
        """Steps end in the last segment: all tokens before it belong to the first step."""
        ends, rewards = self.steps[keys[0][0]]
        places = [np.where(key == keys[-1], np.flatnonzero(self.masks[key]), -1) for key in keys]
        return replace(row, first_step_T=np.searchsorted(ends, np.concatenate(places)), step_rewards_K=rewards)


def token_inputs(
    algorithm: Algorithm, rollouts: pa.Table, rewards: pa.Table, token_scores: pa.Table | None
) -> TokenInputs:
    """In a mixture of what the policy wrote alone. Raises ContractError when scores or step rewards that the algorithm
    reads are missing or not aligned."""
    if algorithm.takes_experts:
        rollouts = rollouts.filter(pc.equal(rollouts["origin"], "policy"))
        rewards = rewards.filter(pc.is_in(rewards["rollout_id"], value_set=rollouts["rollout_id"].combine_chunks()))
    masks = policy_masks(rollouts)
    gaps = values = None
    after: Scores = {}
    if (algorithm.reward_kl or algorithm.needs_critic) and token_scores is None:
        reads = "takes the KL from the reward" if algorithm.reward_kl else "reads a critic's values"
        raise ContractError(f"{algorithm.name} {reads} and needs token_scores, got none")
    if algorithm.reward_kl:
        gaps = _aligned(reference_gaps(token_scores), masks)
    if algorithm.needs_critic:
        values = _aligned(scores_by(token_scores, "critic"), masks)
        after = scores_by(token_scores, "critic_after")
    cut = rollouts.filter(pc.equal(rollouts["finish_reason"], "length"))["rollout_id"].to_pylist()
    steps = step_rewards(rewards) if algorithm.advantage == "per_step_group_zscore" else {}
    return TokenInputs(masks, gaps, values, after, frozenset(cut if algorithm.bootstraps else ()), steps)


def _aligned(scores: Scores, masks: Masks) -> Scores:
    missing = next((key for key, mask in masks.items() if len(mask) and len(scores.get(key, ())) != len(mask)), None)
    if missing is not None:
        raise ContractError(f"token_scores must be aligned with the completion of {missing}, found otherwise")
    return scores


def scores_by(token_scores: pa.Table, scorer: str) -> dict[tuple[str, int], np.ndarray]:
    """float64[C] by (rollout_id, segment) of one scorer."""
    rows = token_scores.filter(pc.equal(token_scores["scorer"], scorer)).select(["rollout_id", "segment", "values"])
    return {(row["rollout_id"], row["segment"]): np.array(row["values"], np.float64) for row in rows.to_pylist()}


def reference_gaps(token_scores: pa.Table) -> dict[tuple[str, int], np.ndarray]:
    """float64[C] old - reference by (rollout_id, segment): the k1 estimate of the KL to the reference per token.

    Raises ContractError for a segment that one of the two did not score.
    """
    old, reference = (scores_by(token_scores, name) for name in ("old", "reference"))
    for key in sorted(old.keys() ^ reference.keys()):
        found = "old" if key in old else "reference"
        raise ContractError(f"token_scores must hold old and reference of {key}, found ['{found}']")
    return {key: values - reference[key] for key, values in old.items()}


def step_rewards(rewards: pa.Table) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(token of each step's end, its reward) by rollout. Raises ContractError for a scored rollout without them."""
    found = {}
    for row in rewards.select(["rollout_id", "step_ends", "step_rewards", "status"]).to_pylist():
        if row["status"] == "scored" and (row["step_rewards"] is None or row["step_ends"] is None):
            raise ContractError(
                f"rollout {row['rollout_id']} must have step_ends and step_rewards, found none: some function of "
                "reward.functions must score reasoning steps, which reward.steps divides"
            )
        ends, scores = row["step_ends"] or [], row["step_rewards"] or []
        found[row["rollout_id"]] = (np.array(ends, np.int64), np.array(scores, np.float64))
    return found


def policy_masks(rollouts: pa.Table) -> Masks:
    """bool[C] of each train segment: what the policy wrote."""
    rows = rollouts.filter(pc.equal(rollouts["purpose"], "train")).select(["rollout_id", "segment", "completion_mask"])
    return {(row["rollout_id"], row["segment"]): np.array(row["completion_mask"], bool) for row in rows.to_pylist()}


def with_token_credit(
    advantages: pa.Table,
    inputs: TokenInputs,
    reward_of: Mapping[str, float],
    algorithm: Algorithm,
    settings: AlgorithmSettings,
    value_lambda: float | None = None,
) -> pa.Table:
    """The table with token_advantages and returns of its trained rows, and the mean advantage as the credit of the
    whole segment; where steps have no spread the reason says zero_variance. Rows without a mask, which experts wrote,
    keep one credit for all tokens."""
    masks = inputs.masks
    keys = list(zip(advantages["rollout_id"].to_pylist(), advantages["segment"].to_pylist(), strict=True))
    group_of = dict(zip(advantages["rollout_id"].to_pylist(), advantages["group_id"].to_pylist(), strict=True))
    segments: dict[str, list[tuple[str, int]]] = {}
    for key, is_trained in zip(keys, advantages["is_trained"].to_pylist(), strict=True):
        if is_trained and key in masks and masks[key].any():
            segments.setdefault(key[0], []).append(key)
    segments = {rollout_id: sorted(parts) for rollout_id, parts in segments.items()}
    rows = [
        inputs.row(parts, group_of[rollout_id], reward_of[rollout_id], algorithm.reward_kl)
        for rollout_id, parts in segments.items()
    ]
    found = TOKEN_ADVANTAGES[str(algorithm.advantage)](rows, settings, value_lambda)
    credit = _spread(found.advantages, segments, masks)
    whole = dict(zip(keys, advantages["advantage"].to_pylist(), strict=True))
    means = [
        float(credit[key][masks[key]].mean()) if key in credit else 0.0 if key in masks else whole[key] for key in keys
    ]
    table = _with(advantages, "token_advantages", [credit.get(key) for key in keys])
    if found.returns is not None:
        returns = _spread(found.returns, segments, masks)
        table = _with(table, "returns", [returns.get(key) for key in keys])
    if algorithm.advantage == "per_step_group_zscore":
        flat = flat_step_groups(rows, settings)
        reasons = zip(table["drop_reason"].to_pylist(), table["group_id"].to_pylist(), strict=True)
        marked = ["zero_variance" if reason == "none" and group in flat else reason for reason, group in reasons]
        table = _with(table, "drop_reason", marked)
    return _with(table, "advantage", means)


def _spread(
    values: Sequence[np.ndarray], segments: Mapping[str, list[tuple[str, int]]], masks: Masks
) -> dict[tuple[str, int], np.ndarray]:
    """float32[C] of each segment: a row's values at the tokens that the policy wrote, 0 elsewhere."""
    made: dict[tuple[str, int], np.ndarray] = {}
    for parts, values_T in zip(segments.values(), values, strict=True):
        start = 0
        for key in parts:
            count = int(masks[key].sum())
            made[key] = np.zeros(len(masks[key]), np.float32)
            made[key][masks[key]] = values_T[start : start + count]
            start += count
    return made


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
