"""How a model likes held-out completions that the data set gives: record evaluations, without sampling.

Shapes: P examples, N completions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from data_contracts.refs import PolicyRef
from data_contracts.schemas import RECORDS
from rft_core.batching import TrainRow
from rft_core.errors import ContractError
from rft_core.evaluation import DRAWS_AT_ONCE, RESAMPLES, SUITE
from rft_core.pairing import DESIRABLE_FROM
from rft_core.policy import Policy, Scorer
from rft_core.seeds import derive
from rft_core.train_rows import POSITIONS

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """A metric as a ratio of sums over examples: sum(values) / sum(weights)."""

    metric: str
    values_P: np.ndarray
    weights_P: np.ndarray
    num_samples: int


def evaluate_given(
    rollouts: pa.Table,
    rewards: pa.Table,
    policy: Policy,
    reference: Scorer | None,
    made: PolicyRef,
    step: int,
    token_budget: int,
    seed: int,
    positions: str = "tokens",
    progress: Progress | None = None,
) -> pa.Table:
    """Metrics of a policy, or of a model that scores, by which of a completion's tokens count (`positions`):

    tokens: `loss`, the NLL per token of completions with a reward above 0. Where a reference is given also `margin`,
    the mean summed log-ratio policy / reference of preferred completions minus that of the others (within each pair
    where there are pairs), and of pairs `preference_accuracy`, the share whose margin is above 0, and
    `preference_ties`, the share whose margin is 0: ties count as wrong, so that chance is half of what is no tie. A
    policy that is its reference has only ties: margin and accuracy are 0.
    last: margin, preference_accuracy and preference_ties of the scores.
    steps: `step_accuracy`, the share of steps whose score has the sign of their label.

    Intervals are bootstrapped over examples.
    """
    rows = _rows(rollouts, positions)
    scores = _scores(rows, policy, policy, token_budget, progress)
    if positions == "steps":
        measured = [_step_accuracy(rows, scores, rewards)]
    else:
        references = _sums(rows, _scores(rows, policy, reference, token_budget, progress)) if reference else None
        reward = dict(zip(rewards["rollout_id"].to_pylist(), rewards["reward"].to_pylist(), strict=True))
        table = _Completions.of(rows, _sums(rows, scores), references, reward)
        measured = [table.loss()] if positions == "tokens" else []
        if references is not None or positions == "last":
            measured += table.preferences()
    return pa.Table.from_pylist(
        [_row(metric, made, step, seed) for metric in measured if len(metric.values_P) and metric.weights_P.sum() > 0],
        schema=RECORDS["evaluations"].schema,
    )


@dataclass(frozen=True)
class _Completions:
    """Completions with their example; segments are summed."""

    examples: np.ndarray  # [N] ids
    logprob_N: np.ndarray  # or score
    reference_N: np.ndarray | None
    tokens_N: np.ndarray
    reward_N: np.ndarray

    @classmethod
    def of(
        cls,
        rows: list[TrainRow],
        logprobs: dict[tuple[str, int], float],
        references: dict[tuple[str, int], float] | None,
        reward: dict[str, float | None],
    ) -> _Completions:
        ids = sorted({row.rollout_id for row in rows})  # so that the order of rows has no say in an interval
        place = {name: index for index, name in enumerate(ids)}
        at = np.array([place[row.rollout_id] for row in rows], np.int64)

        def total(scores: dict[tuple[str, int], float]) -> np.ndarray:
            return np.bincount(at, weights=[scores[row.key] for row in rows], minlength=len(ids))

        examples = {row.rollout_id: row.group_id for row in rows}
        scored = [reward.get(name) for name in ids]
        if any(value is None for value in scored):
            raise ContractError("every held-out completion needs a reward; the tables do not belong together")
        return cls(
            examples=np.array([examples[name] for name in ids], dtype=object),
            logprob_N=total(logprobs),
            reference_N=total(references) if references is not None else None,
            tokens_N=np.bincount(at, weights=[row.num_trained_tokens for row in rows], minlength=len(ids)),
            reward_N=np.array(scored, np.float64),
        )

    def loss(self) -> Measured:
        good = self.reward_N > 0
        return Measured("loss", -self.logprob_N[good], self.tokens_N[good], int(good.sum()))

    def preferences(self) -> list[Measured]:
        log_ratio_N = self.logprob_N - (0.0 if self.reference_N is None else self.reference_N)
        good = self.reward_N > 0
        names, example_N = np.unique(self.examples, return_inverse=True)
        count_P = np.bincount(example_N, minlength=len(names))
        if (count_P == 2).all() and len(names):
            margin_P = np.bincount(example_N, weights=np.where(good, log_ratio_N, -log_ratio_N), minlength=len(names))
            ones = np.ones(len(names))
            return [
                Measured("margin", margin_P, ones, len(good)),
                Measured("preference_accuracy", (margin_P > 0).astype(np.float64), ones, len(good)),
                Measured("preference_ties", (margin_P == 0).astype(np.float64), ones, len(good)),
            ]
        if not good.any() or good.all():
            return []
        # Weighted so that the mean over completions is the difference of the two means.
        share = np.where(good, len(good) / good.sum(), -len(good) / (~good).sum())
        return [Measured("margin", share * log_ratio_N, np.ones(len(good)), len(good))]


def _rows(rollouts: pa.Table, positions: str) -> list[TrainRow]:
    """In the order of the table; of the last token's only the last segment of each rollout."""
    columns = [
        "rollout_id", "segment", "group_id", "prompt_token_ids", "completion_token_ids", "completion_mask", "step_ends"
    ]  # fmt: skip
    found = rollouts.select(columns).to_pylist()
    if positions == "last":
        found = list({row["rollout_id"]: row for row in sorted(found, key=lambda row: row["segment"])}.values())
    return [
        TrainRow(
            rollout_id=row["rollout_id"],
            group_id=row["group_id"],
            prompt_token_ids=np.array(row["prompt_token_ids"], np.int64),
            completion_token_ids=np.array(row["completion_token_ids"], np.int64),
            trained_mask=POSITIONS[positions](row),
            segment=row["segment"],
        )
        for row in found
    ]


def _scores(
    rows: list[TrainRow], layout: Policy, scorer: Scorer, token_budget: int, progress: Progress | None
) -> dict[tuple[str, int], np.ndarray]:
    """float64 logprobs, or scores, of each row's tokens that count."""
    batches = layout.micro_batches(rows, token_budget)
    scores = {}
    with torch.no_grad():
        for index, batch in enumerate(batches):
            values_T, _ = scorer.token_logprobs(batch, 1.0)
            for place, part in zip(batch.row_indices, values_T.split(batch.lengths), strict=True):
                scores[rows[place].key] = part.cpu().double().numpy()[rows[place].trained_mask]
            if progress is not None:
                progress(index + 1, len(batches), "held-out completions")
    return scores


def _sums(rows: list[TrainRow], scores: dict[tuple[str, int], np.ndarray]) -> dict[tuple[str, int], float]:
    return {row.key: float(scores[row.key].sum()) for row in rows}


def _step_accuracy(rows: list[TrainRow], scores: dict[tuple[str, int], np.ndarray], rewards: pa.Table) -> Measured:
    labels = dict(zip(rewards["rollout_id"].to_pylist(), rewards["step_rewards"].to_pylist(), strict=True))
    right, steps = [], []
    for row in rows:
        if not row.num_trained_tokens:
            continue  # max_tokens cut before the first step's end
        is_good = np.array(labels[row.rollout_id]) >= DESIRABLE_FROM
        right.append(float(((scores[row.key] > 0) == is_good).sum()))
        steps.append(float(len(is_good)))
    return Measured("step_accuracy", np.array(right), np.array(steps), len(steps))


def _row(measured: Measured, made: PolicyRef, step: int, seed: int) -> dict[str, object]:
    value = float(measured.values_P.sum() / measured.weights_P.sum())
    low, high = _bounds(measured.values_P, measured.weights_P, derive(seed, "bootstrap", measured.metric))
    return {
        "policy_id": made.policy_id,
        "suite": SUITE,
        "metric": measured.metric,
        "step": step,
        "policy_version": made.version,
        "value": value,
        "low": low,
        "high": high,
        "num_prompts": len(measured.values_P),
        "num_samples": measured.num_samples,
    }


def _bounds(values_P: np.ndarray, weights_P: np.ndarray, seed: int) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of the ratio over resampled examples."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    count = len(values_P)
    at_once = max(1, DRAWS_AT_ONCE // count)
    ratios = []
    for start in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, count, size=(min(at_once, RESAMPLES - start), count))
        ratios.append(values_P[drawn].sum(axis=1) / weights_P[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(low), float(high)
