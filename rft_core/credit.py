"""The advantage stage as a pure function: rollouts and rewards -> one row of `advantages` per train rollout segment.

Shapes: S rows of rollouts (segments) with purpose train; N rollouts (a rollout is one or more segments).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.schemas import ADVANTAGES as ADVANTAGES_RECORD
from rft_core.advantages import ADVANTAGES, Credits, has_no_signal, is_flat, std_of, surplus_rows
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.credit_weights import row_weights
from rft_core.errors import ContractError
from rft_core.joined import Joined, join
from rft_core.pairing import CHOSEN, PAIRINGS, Roles
from rft_core.resampling import groups_with_signal
from rft_core.resolve import resolve_algorithm
from rft_core.rewards.given import MARGIN
from rft_core.seeds import derive
from rft_core.teacher_gap import with_teacher_gap
from rft_core.terms import Algorithm
from rft_core.token_credit import (
    TOKEN_ADVANTAGES,
    TokenInputs,
    token_inputs,
    with_step_labels,
    with_token_credit,
)

# Of two reasons the earlier one is given. Rows before group_too_small enter no statistic, masked truncated ones do.
DROP_REASONS = ("unscored", "filtered", "stale", "truncated", "group_too_small", "zero_variance")
TRAINED = ("none", "zero_variance")

Metrics = dict[str, float | int]


def compute_advantages(
    rollouts: pa.Table,
    rewards: pa.Table,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    current_version: int,
    *,
    component_weights: Mapping[str, float] | None = None,
    token_scores: pa.Table | None = None,
    value_lambda: float | None = None,
    max_groups: int | None = None,
    expert_weights: Mapping[str, float] | None = None,
    seed: int = 0,
) -> tuple[pa.Table, Metrics]:
    """The `advantages` table and the step's metrics by the field's names. `current_version` is that of the policy to
    update; `component_weights` are those of the reward's functions, for advantages that weigh them anew; `seed` decides
    what is left out by lot; under dynamic sampling at most `max_groups` groups are kept; `expert_weights` are those of
    given completions by prompt_id, 1 where there is none.

    Rows of the table follow the train rows of `rollouts`. A row that is not trained says why; nothing trained is no
    error. Raises ContractError when rollouts and rewards do not match one to one.
    """
    algorithm = resolve_algorithm(settings)
    settings = algorithm.filled(settings)
    joined = join(rollouts, rewards)
    inputs = token_inputs(algorithm, rollouts, rewards, token_scores)
    shaped_N = shaped_rewards(joined, settings, max_completion_tokens) - _summed_kl(joined, algorithm, inputs)
    final_N = np.where(joined.is_expert_N & algorithm.takes_experts, joined.reward_N, shaped_N)
    reasons, is_counted_N = _exclusions(joined, algorithm, settings, current_version)
    kept = _kept_groups(joined, rewards, settings, max_groups) if algorithm.dynamic_sampling else joined.group_ids
    is_counted_N &= _filter(joined, reasons, np.isin(joined.group_ids, kept), "filtered")
    baseline_N = baselines(joined, rollouts, rewards) if algorithm.has_baselines else None
    if baseline_N is not None:
        is_counted_N &= _filter(joined, reasons, ~np.isnan(baseline_N), "unscored")
    credits = Credits(
        final_N,
        joined.group_N,
        is_counted_N,
        is_masked_N=is_counted_N & (np.array(reasons, dtype=object) != "none"),
        length_N=joined.num_tokens_N,
        draw_N=_draws(joined, seed) if settings.drop != "none" else None,
        index_N=joined.index_N,
        baseline_N=baseline_N,
        components=joined.component_values(),
        component_weights=component_weights or {},
    )
    advantage_N = _estimator(algorithm)(credits, settings)
    flat_share = _note_groups(credits, algorithm, settings, reasons)
    _filter(joined, reasons, (advantage_N > 0) | (not algorithm.selects), "filtered")
    weight_N = row_weights(joined, kept if settings.duplicate_to_fill else [], max_groups, expert_weights, seed)
    advantage_N = _with_given(joined, algorithm, final_N, advantage_N, reasons, weight_N)
    roles = _roles(algorithm, joined, final_N, reasons)
    table = _table(joined, algorithm, advantage_N if roles is None else roles.sign_N, reasons, roles, weight_N)
    if algorithm.positions == "steps":
        table = with_step_labels(table, rollouts, rewards)
    reward_of = dict(zip(joined.rollout_ids, final_N.tolist(), strict=True))
    table = _with_credit_of_tokens(table, inputs, reward_of, token_scores, algorithm, settings, value_lambda)
    metrics = _metrics(joined, settings, final_N, reasons)
    return table, metrics | _group_metrics(algorithm, settings, credits, roles, flat_share)


def _with_credit_of_tokens(
    table: pa.Table,
    inputs: TokenInputs,
    reward_of: Mapping[str, float],
    token_scores: pa.Table | None,
    algorithm: Algorithm,
    settings: AlgorithmSettings,
    value_lambda: float | None,
) -> pa.Table:
    if algorithm.advantage in TOKEN_ADVANTAGES:
        table = with_token_credit(table, inputs, reward_of, algorithm, settings, value_lambda)
    if algorithm.distillation.teacher_gap:
        table = with_teacher_gap(table, inputs.masks, token_scores, algorithm.distillation.teacher_gap)
    return table


def _estimator(algorithm: Algorithm) -> Callable[[Credits, AlgorithmSettings], np.ndarray]:
    if callable(algorithm.advantage):
        return algorithm.advantage
    return ADVANTAGES["none"] if algorithm.advantage in TOKEN_ADVANTAGES else ADVANTAGES[algorithm.advantage]


def _summed_kl(joined: Joined, algorithm: Algorithm, inputs: TokenInputs) -> np.ndarray:
    """float64[N]: what is taken from the reward of each whole completion; 0 where credit is per token."""
    total_N = np.zeros(len(joined.rollout_ids))
    masks, gaps = inputs.masks, inputs.gaps
    if gaps is None or algorithm.advantage in TOKEN_ADVANTAGES:
        return total_N
    for rollout, segment in joined.segments:
        key = (joined.rollout_ids[rollout], segment)
        if len(masks.get(key, ())):
            total_N[rollout] += algorithm.reward_kl * gaps[key][masks[key]].sum()
    return total_N


def _kept_groups(joined: Joined, rewards: pa.Table, settings: AlgorithmSettings, max_groups: int | None) -> list[str]:
    """The first `max_groups` groups of own rollouts that carry signal."""
    own = pa.array(joined.rollout_ids, pa.large_string()).filter(pa.array(~joined.is_expert_N))
    of_train = rewards.filter(pc.is_in(rewards["rollout_id"], value_set=own))
    return groups_with_signal(of_train, settings)[:max_groups]


def _filter(joined: Joined, reasons: list[str], is_kept_N: np.ndarray, reason: str) -> np.ndarray:
    """Gives the reason to what is not kept and has none yet; returns what is kept."""
    for row in np.flatnonzero(~is_kept_N & ~joined.is_expert_N):
        reasons[row] = reason if reasons[row] == "none" else reasons[row]
    return is_kept_N


def baselines(joined: Joined, rollouts: pa.Table, rewards: pa.Table) -> np.ndarray:
    """float64[N]: reward of the greedy completion of each rollout's prompt, NaN where it is unscored or failed, and for
    completions that the data gives.

    Raises ContractError for a prompt without one.
    """
    rows = rollouts.filter(pc.equal(rollouts["purpose"], "baseline")).select(["rollout_id", "prompt_id"]).to_pylist()
    reward = dict(zip(rewards["rollout_id"].to_pylist(), rewards["reward"].to_pylist(), strict=True))
    greedy = {row["prompt_id"]: reward[row["rollout_id"]] for row in rows}
    asked = [None if is_given else name for name, is_given in zip(joined.prompt_ids, joined.is_expert_N, strict=True)]
    for prompt_id in asked:
        if prompt_id is not None and prompt_id not in greedy:
            raise ContractError(
                f"advantage greedy_baseline needs a greedy completion of each prompt, {prompt_id} has none"
            )
    return np.array([None if prompt_id is None else greedy[prompt_id] for prompt_id in asked], dtype=float)


def _note_groups(credits: Credits, algorithm: Algorithm, settings: AlgorithmSettings, reasons: list[str]) -> float:
    """Gives reasons to members of groups that are too small or without signal; returns the share of flat groups."""
    num_flat = num_groups = 0
    for members in credits.groups():
        is_without_signal = is_flat(credits, members, algorithm.advantage, settings.spread_floor)
        num_flat += has_no_signal(credits.reward_N[members], settings.spread_floor)
        num_groups += 1
        for row in members:
            if reasons[row] != "none" or not algorithm.compares_groups:
                continue  # where nobody is compared, a rollout alone is as good as any
            if len(members) < settings.min_group_size:
                reasons[row] = "group_too_small"
            elif is_without_signal and not algorithm.distillation.teacher_gap:
                reasons[row] = "zero_variance"
    return num_flat / num_groups if num_groups else 0.0


def _roles(algorithm: Algorithm, joined: Joined, final_N: np.ndarray, reasons: list[str]) -> Roles | None:
    """Who is preferred to whom; what is in no pair is filtered. Null without a preference objective."""
    if algorithm.preference is None:
        return None
    is_compared_N = np.isin(reasons, TRAINED)
    roles = PAIRINGS[algorithm.preference.unit](Credits(final_N, joined.group_N, is_compared_N))
    for row in np.flatnonzero(is_compared_N):
        reasons[row] = "filtered" if roles.role_N[row] is None else "none"
    return roles


def _with_given(
    joined: Joined,
    algorithm: Algorithm,
    final_N: np.ndarray,
    advantage_N: np.ndarray,
    reasons: list[str],
    weight_N: np.ndarray,
) -> np.ndarray:
    """Advantages with the reward itself for completions that the data gives, whose reasons are noted."""
    is_given_N = joined.is_expert_N & _usable(joined)
    for row in np.flatnonzero(is_given_N):
        reasons[row] = "none" if algorithm.takes_given and weight_N[row] else "filtered"
    return np.where(is_given_N, final_N, advantage_N)


def _group_metrics(
    algorithm: Algorithm, settings: AlgorithmSettings, credits: Credits, roles: Roles | None, flat_share: float
) -> Metrics:
    metrics: Metrics = {"frac_reward_zero_std": flat_share}
    if roles is not None and algorithm.preference is not None and algorithm.preference.unit == "pairs":
        metrics |= {"pairs": int(roles.pair_N.max(initial=-1)) + 1, "pairs/ties": roles.num_ties}
    if settings.drop != "none" and len(credits.reward_N):
        metrics["share/surplus"] = float(surplus_rows(credits, settings).mean())
    return metrics


def _usable(joined: Joined) -> np.ndarray:
    """bool[N]: given rollouts that can be trained on: scored, without error, with a token to learn."""
    return ~np.isnan(joined.reward_N) & ~joined.is_error_N & (joined.num_tokens_N > 0)


def shaped_rewards(joined: Joined, settings: AlgorithmSettings, max_completion_tokens: int) -> np.ndarray:
    """float64[N]: rewards after clip and soft overlong penalty; NaN where unscored.

    Soft overlong (DAPO, arXiv 2503.14476, eq. 13): 0 up to the buffer, down to -1 at max_completion_tokens.
    """
    rewards_N = joined.reward_N.copy()
    if settings.reward_clip_low is not None:
        rewards_N = np.maximum(rewards_N, settings.reward_clip_low)
    if settings.reward_clip_high is not None:
        rewards_N = np.minimum(rewards_N, settings.reward_clip_high)
    buffer = settings.overlong_buffer_tokens
    if buffer > 0:
        rewards_N = rewards_N + np.clip((max_completion_tokens - buffer - joined.num_tokens_N) / buffer, -1.0, 0.0)
    return rewards_N


def _exclusions(
    joined: Joined, algorithm: Algorithm, settings: AlgorithmSettings, current_version: int
) -> tuple[list[str], np.ndarray]:
    """The reason of each rollout that is not trained whatever its group, and which rollouts enter group statistics.

    A rollout without a token of the policy shows nothing of the policy; one of a policy too old says little of it.
    Where rewards decide nothing, one without is trained, and still enters no statistic.
    """
    is_unscored_N = np.isnan(joined.reward_N)
    applies = {
        "unscored": is_unscored_N & algorithm.reads_rewards | joined.is_error_N,
        "filtered": (joined.num_tokens_N == 0) | joined.is_expert_N,
        "stale": np.zeros(len(joined.reward_N), dtype=bool),
        "truncated": joined.is_truncated_N & (settings.truncated != "train"),
    }
    if settings.max_staleness is not None:
        applies["stale"] = ~joined.is_expert_N & (current_version - joined.policy_version_N > settings.max_staleness)
    reasons = np.full(len(joined.reward_N), "none", dtype=object)
    for reason in reversed(DROP_REASONS[:4]):
        reasons[applies[reason]] = reason
    is_counted_N = reasons == "none"
    if settings.truncated == "mask":
        is_counted_N = is_counted_N | (reasons == "truncated")
    return reasons.tolist(), is_counted_N & ~is_unscored_N


def _draws(joined: Joined, seed: int) -> np.ndarray:
    return np.array([derive(seed, "drop", rollout_id) for rollout_id in joined.rollout_ids], dtype=np.int64)


def _table(
    joined: Joined,
    algorithm: Algorithm,
    advantage_N: np.ndarray,
    reasons: list[str],
    roles: Roles | None,
    weight_N: np.ndarray,
) -> pa.Table:
    own = "selected" if algorithm.selects else "own"
    is_trained_N = np.isin(reasons, TRAINED)
    rows = [
        {
            "rollout_id": joined.rollout_ids[rollout],
            "segment": segment,
            "group_id": joined.group_ids[rollout],
            "advantage": float(advantage_N[rollout]) if is_trained_N[rollout] else 0.0,
            "weight": float(weight_N[rollout]),
            "is_trained": bool(is_trained_N[rollout]),
            "drop_reason": reasons[rollout],
            "term": "expert" if joined.is_expert_N[rollout] else own,
            **(_role(joined, roles, rollout) if roles is not None and is_trained_N[rollout] else {}),
        }
        for rollout, segment in joined.segments
    ]
    return pa.Table.from_pylist(rows, schema=ADVANTAGES_RECORD.schema)


def _role(joined: Joined, roles: Roles, rollout: int) -> dict[str, Any]:
    """A labelled completion is a pair of its own."""
    is_paired = roles.pair_N[rollout] >= 0
    return {
        "pair_id": joined.group_ids[rollout] if is_paired else joined.rollout_ids[rollout],
        "pair_role": roles.role_N[rollout],
        "pair_margin": joined.components[rollout].get(MARGIN) if roles.role_N[rollout] == CHOSEN else None,
    }


def _metrics(joined: Joined, settings: AlgorithmSettings, final_N: np.ndarray, reasons: list[str]) -> Metrics:
    """Metrics of own rollouts; one that has no value to average is left out, never NaN."""
    is_own_N, is_trained_N = ~joined.is_expert_N, np.isin(reasons, TRAINED)
    num_rows = len(reasons)
    metrics: Metrics = {
        "rows": num_rows,
        "rows_trained": int(is_trained_N.sum()),
        "num_tokens": int(joined.num_tokens_N[is_trained_N].sum()),
    }
    if num_rows:
        counts = Counter(reasons)
        metrics["share/trained"] = metrics["rows_trained"] / num_rows
        metrics |= {f"share/{reason}": counts[reason] / num_rows for reason in DROP_REASONS}
        metrics["share/error"] = float(joined.is_error_N.mean())
        metrics["share/expert"] = float(joined.is_expert_N.mean())
    is_scored_N = is_own_N & ~np.isnan(joined.reward_N)
    if is_scored_N.any():
        metrics["reward"] = float(joined.reward_N[is_scored_N].mean())
        groups = Credits(joined.reward_N, joined.group_N, is_scored_N).groups()
        metrics["reward_std"] = float(np.mean([std_of(joined.reward_N[rows], settings.std_ddof) for rows in groups]))
        metrics["reward_shaped"] = float(final_N[is_scored_N].mean())
    for name in sorted({name for components in joined.components for name in components}):
        own = [joined.components[row].get(name) for row in np.flatnonzero(is_own_N)]
        scores = np.array([score for score in own if score is not None], dtype=float)
        if len(scores):
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            metrics[f"rewards/{name}/std"] = std_of(scores, 1)
    return metrics | _length_metrics(joined, is_own_N & ~joined.is_error_N)


def _length_metrics(joined: Joined, is_completion_N: np.ndarray) -> Metrics:
    """Lengths count tokens of the policy; what was cut is known from finish_reason, never from a length."""
    lengths = joined.num_tokens_N[is_completion_N]
    if not len(lengths):
        return {}
    is_cut = joined.is_truncated_N[is_completion_N]
    metrics: Metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float(is_cut.mean()),
    }
    if not is_cut.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~is_cut].mean())
    return metrics
