"""One policy update: rollouts and their credit -> optimizer steps, each a row of record `updates`.

Knows no algorithm by name: what to compute is asked of the algorithm's row, and its loss is a function of a micro-batch
and of denominators that are global to the optimizer step. So neither value nor gradient depends on the split.

Shapes: T completion tokens of a micro-batch, flat; R its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_contracts.refs import PolicyRef
from data_contracts.schemas import UPDATES
from rft_core.batching import MicroBatch, TrainRow
from rft_core.config import AlgorithmSettings, RolloutSettings, TrainingSettings
from rft_core.distillation import score_batch
from rft_core.entropy_options import adapted_entropy_coefficient
from rft_core.errors import TrainingDiverged
from rft_core.kl_controller import adapted_coefficient
from rft_core.likelihood_weights import log_collisions
from rft_core.losses import ROW_KINDS, LossBatch
from rft_core.mini_batches import MiniBatch, plan_mini_batches
from rft_core.objective import finish_metrics, merge_sums, step_kept
from rft_core.optimizer import Optimizer, learning_rate
from rft_core.policy import Policy, Scorer
from rft_core.preference_step import (
    Logprobs,
    PreferenceGradient,
    RunningShift,
    ScoreStatistics,
    mean_log_ratio,
    preference_gradient,
)
from rft_core.resolve import check, resolve_algorithm
from rft_core.seeds import derive, uniforms
from rft_core.terms import Algorithm, Kl
from rft_core.train_rows import train_rows

Progress = Callable[[int, int, str], None]

NO_TRAINED_TOKENS = "no_trained_tokens"  # no row of the mini-batch is trained
NO_SIGNAL = "no_signal"  # rows are trained, but every advantage is 0 and nothing else has a gradient
NON_FINITE_LOSS = "non_finite_loss"
NON_FINITE_GRADIENT = "non_finite_gradient"


@dataclass
class TrainState:
    """Everything that an update changes, and a checkpoint holds. Counters are of the whole run."""

    policy: Policy
    optimizer: Optimizer
    optimizer_step: int = 0  # rows of record `updates` so far: steps taken and skipped
    skipped_in_a_row: int = 0  # for a non-finite loss or gradient
    shift: RunningShift = field(default_factory=RunningShift)
    scores: ScoreStatistics = field(default_factory=ScoreStatistics)
    entropy_coefficient: float | None = None  # likewise
    kl_coefficient: float | None = None  # where it adapts, after the first update: that of the next one

    ema: list[Tensor] | None = None  # float32, moving averages of policy.master, in its order; None keeps none

    @classmethod
    def start(cls, policy: Policy) -> TrainState:
        return cls(policy, Optimizer.over(policy))

    def begin_ema(self, decay: float | None) -> None:
        """The average starts as the weights are where one is wanted first, and ends where none is."""
        if decay is None:
            self.ema = None
        elif self.ema is None:
            self.ema = [master.detach().clone() for master in self.policy.master]

    def advance_ema(self, decay: float | None) -> None:
        if decay is not None and self.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, self.policy.master, 1 - decay)

    def take_ema(self) -> None:
        """The average as the weights, for export. Training cannot go on from there."""
        if self.ema is None:
            raise ValueError("the state must hold a moving average of its weights, it has none")
        with torch.no_grad():
            torch._foreach_copy_(self.policy.master, self.ema)
        self.policy.write_compute()


@dataclass(frozen=True)
class Scores:
    """float32 logprobs per row, by rollout id and segment (`TrainRow.key`), from before the first optimizer step."""

    old: Logprobs | None
    reference: Logprobs | None
    kept: dict[tuple[str, int], Tensor] | None = None  # bool: by a gate over the whole optimizer step


@dataclass(frozen=True)
class _Update:
    """What stays the same over the optimizer steps of an update."""

    algorithm: Algorithm
    training: TrainingSettings
    temperature: float
    version: int  # that is being made, also the training step
    total_optimizer_steps: int
    advance: Callable[[str], None]
    seed: int  # of this update
    teacher: Policy | None = None


def update_policy(
    state: TrainState,
    rollouts: pa.Table,
    advantages: pa.Table,
    *,
    algorithm: AlgorithmSettings,
    training: TrainingSettings,
    rollout: RolloutSettings,
    before: PolicyRef,
    reference: Scorer | None,
    teacher: Policy | None = None,
    seed: int,
    total_steps: int,
    progress: Progress | None = None,
) -> pa.Table:
    """Train `state`, which holds policy `before`, into version before.version + 1; gives its rows of `updates`.

    `total_steps` is the number of optimizer steps of the whole run, for schedules that depend on it. Rows of another
    policy than `before` are off-policy. Raises ContractError when rollouts and advantages do not pair up,
    TrainingDiverged after too many non-finite steps in a row; a step that is skipped leaves no trace in weights and
    moments.
    """
    row_of_table = _with_adapted(resolve_algorithm(algorithm), state)
    check(row_of_table, training)
    rows = train_rows(rollouts, advantages, before, row_of_table.positions)
    version = before.version + 1
    seed = derive(seed, "update", version)
    plan = plan_mini_batches(state.policy, rows, row_of_table, training, rollout.max_completion_tokens, seed)
    num_passes = len(plan) // training.epochs
    is_behind = len(plan) > 1 or any(row.is_off_policy and row.num_trained_tokens for row in rows)
    needs_old, needs_reference = is_behind and row_of_table.needs_old, row_of_table.needs_reference
    counter = _counter(plan, num_passes, needs_old + needs_reference, row_of_table, progress)
    update = _Update(row_of_table, training, rollout.temperature, version, total_steps, counter, seed, teacher)
    scorers = {"old": state.policy if needs_old else None, "reference": reference if needs_reference else None}
    scores = Scores(**{name: _score(scorer, plan[:num_passes], update, name) for name, scorer in scorers.items()})
    state.begin_ema(training.ema_decay)
    steps = [_optimizer_step(state, mini_batch, scores, update) for mini_batch in plan]
    made = [row for row, _ in steps]
    _adapt(state, row_of_table, merge_sums(sums for _, of_step in steps for sums in of_step), rows)
    return pa.Table.from_pylist(made, schema=UPDATES.schema)


def _with_adapted(algorithm: Algorithm, state: TrainState) -> Algorithm:
    """The row with the coefficients that the last update left."""
    if algorithm.kl.target is not None and state.kl_coefficient is not None:
        algorithm = replace(algorithm, kl=replace(algorithm.kl, coefficient=state.kl_coefficient))
    if algorithm.adaptive_entropy is not None and state.entropy_coefficient is not None:
        algorithm = replace(algorithm, entropy_coefficient=state.entropy_coefficient)
    return algorithm


def _adapt(state: TrainState, algorithm: Algorithm, sums: dict[str, float], rows: list[TrainRow]) -> None:
    """The coefficients of the next update, from the sums of all passes of this one."""
    if algorithm.kl.target is not None:
        num_rollouts = len({row.rollout_id for row in rows if row.num_trained_tokens})
        state.kl_coefficient = _next_kl_coefficient(algorithm.kl, sums, num_rollouts)
    if algorithm.adaptive_entropy is not None:
        mean = sums["entropy"] / sums["tokens"] if sums.get("tokens") else None
        state.entropy_coefficient = adapted_entropy_coefficient(
            algorithm.entropy_coefficient, mean, algorithm.adaptive_entropy
        )


def _next_kl_coefficient(kl: Kl, sums: dict[str, float], num_rollouts: int) -> float:
    """From the mean over rows of their token mean, over all passes of the update."""
    assert kl.target is not None, "only an adaptive coefficient has a next one"
    mean = sums["kl_row_means"] / sums["kl_rows"] if sums.get("kl_rows") else None
    return adapted_coefficient(kl.coefficient, mean, num_rollouts, kl.target, kl.horizon)


def _score(scorer: Scorer | None, plan: Sequence[MiniBatch], update: _Update, name: str) -> Logprobs | None:
    """Logprobs by the weights of now, in the very micro-batches that train: on-policy ratios are exactly 1 at first."""
    if scorer is None:
        return None
    scored = {}
    with torch.no_grad():
        for mini_batch in (part for whole in plan for part in whole.parts):
            for batch in mini_batch.micro_batches:
                logprobs_T, _ = scorer.token_logprobs(batch, update.temperature)
                rows = mini_batch.rows_of(batch)
                scored |= {row.key: part for row, part in zip(rows, logprobs_T.split(batch.lengths), strict=True)}
                update.advance(f"{name} logprobs")
    return scored


def _optimizer_step(
    state: TrainState, mini_batch: MiniBatch, scores: Scores, update: _Update
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Accumulate the gradient of a mini-batch, then step or skip; gives the row of `updates` and the sums behind it."""
    state.optimizer_step += 1
    rate = learning_rate(update.training, state.optimizer_step, update.total_optimizer_steps)
    optimizer = state.optimizer
    optimizer.discard_gradients()
    kept = _step_gate(state, mini_batch, scores, update)
    preferred = _preferred(state, mini_batch, scores, update)
    sums, loss = _accumulate(state.policy, mini_batch, replace(scores, kept=kept), update, preferred)
    norm = optimizer.grad_norm() if mini_batch.micro_batches and math.isfinite(loss) else 0.0
    skipped = _reason_to_skip(mini_batch, loss, norm)
    if skipped is None:
        optimizer.step(update.training, rate, norm)
        state.advance_ema(update.training.ema_decay)
        if preferred is not None:
            state.shift = preferred.shift
            if update.algorithm.head == "sequence_labels":
                state.scores = state.scores.including(preferred.values)
        state.skipped_in_a_row = 0
    optimizer.discard_gradients()
    trained = [row for row in mini_batch.rows if row.num_trained_tokens]
    made = finish_metrics(sums) | {
        "policy_version": update.version,
        "optimizer_step": state.optimizer_step,
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": rate,
        "trained_rows": len(trained),
        "trained_tokens": sum(row.num_trained_tokens for row in trained),
        "off_policy_rows": sum(row.is_off_policy for row in trained),
        "forward_rows": len(mini_batch.forward_rows),
        "kl_coefficient": update.algorithm.kl.coefficient if update.algorithm.needs_reference else None,
        "entropy_coefficient": update.algorithm.entropy_coefficient if update.algorithm.adaptive_entropy else None,
        "skipped": skipped,
    }
    if skipped in (NON_FINITE_LOSS, NON_FINITE_GRADIENT):
        _count_skipped(state, update, made)
    return made, sums


def _step_gate(
    state: TrainState, mini_batch: MiniBatch, scores: Scores, update: _Update
) -> dict[tuple[str, int], Tensor] | None:
    """What a gate over the whole optimizer step keeps of each row, by the weights of now; None without such a gate."""
    if update.algorithm.step_gate is None or not mini_batch.micro_batches:
        return None
    batches, draws = [], []
    with torch.no_grad():
        for batch in mini_batch.micro_batches:
            logprobs_T, entropy_T = state.policy.token_logprobs(batch, update.temperature)
            batches.append(_loss_batch(mini_batch, batch, scores, logprobs_T, entropy_T))
            rows = mini_batch.rows_of(batch)
            seeds = [derive(update.seed, "gate", state.optimizer_step, *row.key) for row in rows]
            numbers = [uniforms(seed, length) for seed, length in zip(seeds, batch.lengths, strict=True)]
            draws.append(torch.from_numpy(np.concatenate(numbers)).to(logprobs_T.device))
            update.advance("gate over the whole step")
    kept = {}
    for batch, kept_T in zip(mini_batch.micro_batches, step_kept(update.algorithm, batches, draws), strict=True):
        rows = mini_batch.rows_of(batch)
        kept |= {row.key: part for row, part in zip(rows, kept_T.split(batch.lengths), strict=True)}
    return kept


def _preferred(state: TrainState, mini_batch: MiniBatch, scores: Scores, update: _Update) -> PreferenceGradient | None:
    """The preference objective of the whole mini-batch by the weights of now; null without one."""
    preference = update.algorithm.preference
    if preference is None or not mini_batch.forward_rows:
        return None
    current = _score(state.policy, [mini_batch], update, "preference")
    assert current is not None
    collisions: Logprobs | None = None
    if preference.likelihood_weights:
        collisions = {}
        for batch in mini_batch.micro_batches:
            parts = log_collisions(state.policy, batch, update.temperature).split(batch.lengths)
            collisions |= {row.key: part for row, part in zip(mini_batch.rows_of(batch), parts, strict=True)}
            update.advance("likelihood of pairs")
    kl = 0.0
    if mini_batch.mismatched is not None and scores.reference is not None:
        kl = mean_log_ratio(mini_batch.mismatched.rows, current, scores.reference)
    rows = mini_batch.forward_rows
    return preference_gradient(preference, rows, current, scores.reference, state.shift, kl, collisions)


def _accumulate(
    policy: Policy, mini_batch: MiniBatch, scores: Scores, update: _Update, preferred: PreferenceGradient | None
) -> tuple[list[dict[str, float]], float]:
    """Forward and backward of every micro-batch; stops at the first loss that is not finite."""
    sums, total = ([], 0.0) if preferred is None else ([preferred.sums], preferred.loss)
    if not math.isfinite(total):
        return sums, total
    for batch in mini_batch.micro_batches:
        logprobs_T, entropy_T, divergence_T = score_batch(
            policy, update.teacher, batch, update.temperature, update.algorithm
        )
        loss_batch = _loss_batch(mini_batch, batch, scores, logprobs_T, entropy_T, divergence_T)
        parts = update.algorithm.loss(loss_batch, mini_batch.denominators, update.version)
        loss = float(parts.loss.detach())
        sums.append(parts.sums)
        total += loss
        if not math.isfinite(loss):
            break
        differentiated = parts.loss
        if preferred is not None:
            coefficients = [preferred.coefficients[row.key] for row in mini_batch.rows_of(batch)]
            slope_T = torch.cat(coefficients).to(logprobs_T.device)
            differentiated = differentiated + torch.where(slope_T != 0, slope_T * logprobs_T, 0.0).sum()
        differentiated.backward()
        update.advance("forward and backward")
    return sums, total


def _loss_batch(
    mini_batch: MiniBatch,
    batch: MicroBatch,
    scores: Scores,
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    divergence_T: Tensor | None = None,
) -> LossBatch:
    rows = mini_batch.rows_of(batch)
    device = logprobs_T.device

    def flat(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def per_row(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def scored(values: dict[tuple[str, int], Tensor] | None) -> Tensor | None:
        return None if values is None else torch.cat([values[row.key] for row in rows])

    behaviour = None
    if any(row.behaviour_logprobs is not None for row in rows):
        unknown = [np.full(length, np.nan, np.float32) for length in batch.lengths]
        known = [row.behaviour_logprobs for row in rows]
        behaviour = flat([gap if values is None else values for values, gap in zip(known, unknown, strict=True)])
    return LossBatch(
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        divergence_T=divergence_T,
        old_logprobs_T=scored(scores.old),
        behaviour_logprobs_T=behaviour,
        reference_logprobs_T=scored(scores.reference),
        step_kept_T=scored(scores.kept),
        advantages_T=flat([row.advantages for row in rows]),
        mask_T=flat([row.trained_mask for row in rows]),
        row_T=flat([np.repeat(np.arange(len(rows)), batch.lengths)]),
        off_policy_R=per_row([row.is_off_policy for row in rows], torch.bool),
        weight_R=per_row([row.weight for row in rows], torch.float32),
        group_R=per_row([mini_batch.group_numbers[row.group_id] for row in rows], torch.int64),
        term_R=per_row([ROW_KINDS.index(row.term) for row in rows], torch.int64),
    )


def _reason_to_skip(mini_batch: MiniBatch, loss: float, norm: float) -> str | None:
    if not any(row.num_trained_tokens for row in mini_batch.rows):
        return NO_TRAINED_TOKENS
    if not mini_batch.forward_rows:
        return NO_SIGNAL
    if not math.isfinite(loss):
        return NON_FINITE_LOSS
    return None if math.isfinite(norm) else NON_FINITE_GRADIENT


def _count_skipped(state: TrainState, update: _Update, made: dict[str, Any]) -> None:
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row >= update.training.max_skipped_updates:
        raise TrainingDiverged(
            f"at most {update.training.max_skipped_updates - 1} optimizer steps in a row may be skipped, optimizer "
            f"step {state.optimizer_step} of policy version {update.version} is one more: {made['skipped']} "
            f"(loss {made['loss']}, grad_norm {made['grad_norm']}); lower training.learning_rate, or go on from an "
            "earlier step with `rft rerun RUN --from update --at N`"
        )


def _counter(
    plan: list[MiniBatch], num_passes: int, num_scorers: int, algorithm: Algorithm, progress: Progress | None
) -> Callable[[str], None]:
    """A function that counts micro-batches, of all passes, and reports each."""
    trained = sum(len(mini_batch.micro_batches) for mini_batch in plan)
    scored = [sum(len(part.micro_batches) for part in mini_batch.parts) for mini_batch in plan]
    total = trained * (1 + (algorithm.step_gate is not None)) + num_scorers * sum(scored[:num_passes])
    if algorithm.preference is not None:
        total += sum(scored) + trained * algorithm.preference.likelihood_weights
    done = 0

    def advance(note: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, note)

    return advance
