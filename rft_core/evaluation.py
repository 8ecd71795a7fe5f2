"""How good a policy is: accuracy, pass@k and mean reward, with intervals bootstrapped over prompts.

A prompt's score is the mean over its scored rollouts (for pass@k the unbiased estimate), and a metric is the mean over
prompts, so prompts weigh equally. Rollouts without a score are left out, never counted as wrong: num_samples counts
those that were scored. Greedy rollouts are those sampled at temperature 0. Intervals depend on the set of rows and the
seed alone, not on the order of rows. Where all prompts score alike the bootstrap gives an interval without width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.refs import PolicyRef
from data_contracts.schemas import RECORDS
from rft_core.config import EvaluationSettings
from rft_core.errors import ContractError, SettingsError
from rft_core.rewards.settings import GATED
from rft_core.seeds import derive

SEMANTICS = 1
RESAMPLES = 2000  # the bounds of a 95 % interval move by about a fiftieth of its width between seeds
DRAWS_AT_ONCE = 4_000_000  # bounds memory: 32 MB of indices
SUITE = "heldout"  # the set of prompts that evaluations ask
CORRECT = 1.0  # a component of at least this is a right answer


@dataclass(frozen=True)
class PromptScores:
    """One metric of one policy per prompt. P prompts, sorted by id; `num_samples` scored rollouts stand behind them."""

    metric: str
    prompt_ids: tuple[str, ...]
    values_P: np.ndarray  # float64
    num_samples: int


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float
    num_prompts: int


def evaluate(
    rollouts: pa.Table,
    rewards: pa.Table,
    policy: PolicyRef,
    step: int,
    settings: EvaluationSettings,
    correct_component: str,
    seed: int,
) -> pa.Table:
    """Record evaluations: sampled_accuracy, mean_reward and pass@k from sampled rollouts, greedy_accuracy from greedy
    ones; mean_reward comes from greedy ones where nothing was sampled. A metric without a scored rollout has no row.

    Raises ContractError when the tables do not belong together, SettingsError for a component that no row has.
    """
    rows = []
    for metric in ("sampled_accuracy", "greedy_accuracy", "mean_reward", *(f"pass@{k}" for k in settings.pass_at)):
        scores = prompt_scores(rollouts, rewards, metric, correct_component)
        if not scores.prompt_ids:
            continue
        interval = bootstrap(scores.values_P, derive(seed, "bootstrap", metric))
        rows.append(
            {
                "policy_id": policy.policy_id,
                "suite": SUITE,
                "metric": metric,
                "step": step,
                "policy_version": policy.version,
                "value": interval.value,
                "low": interval.low,
                "high": interval.high,
                "num_prompts": interval.num_prompts,
                "num_samples": scores.num_samples,
            }
        )
    return pa.Table.from_pylist(rows, schema=RECORDS["evaluations"].schema)


def prompt_scores(rollouts: pa.Table, rewards: pa.Table, metric: str, correct_component: str) -> PromptScores:
    """One value per prompt of sampled_accuracy, greedy_accuracy, mean_reward or pass@k.

    pass@k leaves out prompts with fewer than k scored samples. Raises as `evaluate`.
    """
    component = None if metric == "mean_reward" else correct_component
    prompt_ids, is_greedy, value_R = scored_rollouts(rollouts, rewards, component)
    wants_greedy = metric == "greedy_accuracy" or (metric == "mean_reward" and is_greedy.all())
    chosen = (is_greedy if wants_greedy else ~is_greedy) & ~np.isnan(value_R)
    names, prompt_R = np.unique(prompt_ids[chosen], return_inverse=True)
    count_P = np.bincount(prompt_R, minlength=len(names))
    sum_P = np.bincount(prompt_R, weights=value_R[chosen], minlength=len(names))
    if metric.startswith("pass@"):
        k = int(metric.removeprefix("pass@"))
        enough = count_P >= k
        names, count_P, sum_P = names[enough], count_P[enough], sum_P[enough]
        values_P = pass_at_k(count_P, sum_P, k)
    else:
        values_P = sum_P / np.maximum(count_P, 1)
    return PromptScores(metric, tuple(names.tolist()), values_P, int(count_P.sum()))


def pass_at_k(num_samples_P: np.ndarray, num_correct_P: np.ndarray, k: int) -> np.ndarray:
    """1 - C(n - c, k) / C(n, k): the chance that k of a prompt's n samples, drawn without replacement, hold a right one
    (Codex, arXiv 2107.03374, section 2.1). Every n must be at least k.

    >>> pass_at_k(np.array([4, 4, 4]), np.array([0, 1, 3]), 2).tolist()
    [0.0, 0.5, 1.0]
    """
    n_P, c_P = np.asarray(num_samples_P, np.float64), np.asarray(num_correct_P, np.float64)
    if (n_P < k).any() or k < 1:
        raise ValueError(f"pass@{k} needs at least {k} samples of every prompt, got {n_P.min(initial=np.inf):g}")
    miss_P = np.ones_like(n_P)
    for drawn in range(k):  # C(n-c, k) / C(n, k) = product of (n - c - i) / (n - i): no large binomials
        miss_P *= np.maximum(n_P - c_P - drawn, 0.0) / (n_P - drawn)
    return 1.0 - miss_P


def bootstrap(values_P: np.ndarray, seed: int) -> Interval:
    """Mean of float64[P], P >= 1, with the 2.5 % and 97.5 % quantiles of the means of resampled prompts."""
    values_P = np.asarray(values_P, np.float64)
    count = len(values_P)
    generator = np.random.Generator(np.random.Philox(key=seed))
    at_once = max(1, DRAWS_AT_ONCE // count)
    means = [
        values_P[generator.integers(0, count, size=(min(at_once, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(values_P.mean()), float(low), float(high), count)


def paired_difference(before: PromptScores, after: PromptScores, seed: int) -> Interval | None:
    """Mean of after - before over the prompts that both have, with its interval; null when they share none.

    Resampling pairs cancels what makes prompts differ in difficulty, so the interval is of the change alone.
    """
    if before.metric != after.metric:
        raise ValueError(f"a difference needs one metric, got {before.metric} and {after.metric}")
    _, at_before, at_after = np.intersect1d(
        np.array(before.prompt_ids, dtype=object), np.array(after.prompt_ids, dtype=object), return_indices=True
    )
    if not len(at_before):
        return None
    return bootstrap(after.values_P[at_after] - before.values_P[at_before], derive(seed, "paired", before.metric))


def scored_rollouts(
    rollouts: pa.Table, rewards: pa.Table, component: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prompt ids, is greedy, value) per row of `rewards`; segments of one rollout count once.

    The value is 1 where the component says correct, else 0, also where its gate is closed; without a component it is
    the reward; NaN is unscored.
    Raises as `evaluate`.
    """
    at = pc.index_in(rewards.column("rollout_id"), value_set=rollouts.column("rollout_id").combine_chunks())
    if at.null_count or pc.count_distinct(rollouts.column("rollout_id")).as_py() != rewards.num_rows:
        raise ContractError("rewards must have one row for each rollout_id of rollouts, and no other")
    own = rollouts.select(["prompt_id", "sampling"]).take(at)
    prompt_ids = np.array(own.column("prompt_id").to_pylist(), dtype=object)
    sampling = own.column("sampling").combine_chunks().dictionary_encode()
    greedy = np.array([json.loads(text)["temperature"] == 0 for text in sampling.dictionary.to_pylist()], bool)
    is_greedy = greedy[sampling.indices.to_numpy()] if rewards.num_rows else np.zeros(0, bool)
    if component is None:
        return prompt_ids, is_greedy, _floats(rewards.column("reward"))
    components = rewards.column("components").combine_chunks()
    if rewards.num_rows and component not in components.keys.unique().to_pylist():
        raise SettingsError(
            f"evaluation.correct_component must be a reward component, got {component!r}; "
            f"the table has {sorted(components.keys.unique().to_pylist())}"
        )
    key = pa.scalar(component, components.type.key_type)
    value_R = _floats(pc.map_lookup(components, query_key=key, occurrence="first"))
    statuses = rewards.column("component_status").combine_chunks()
    status = pc.map_lookup(statuses, query_key=pa.scalar(component, statuses.type.key_type), occurrence="first")
    is_gated = pc.fill_null(pc.starts_with(status, GATED), False).to_numpy(zero_copy_only=False)
    value_R = np.where(is_gated, 0.0, value_R)
    return prompt_ids, is_greedy, np.where(np.isnan(value_R), np.nan, (value_R >= CORRECT).astype(np.float64))


def _floats(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """float64 with NaN for null; tables hold no other NaN."""
    return np.array(column.cast(pa.float64()).to_pylist(), dtype=np.float64)
