"""One policy update: rollouts and their credit -> optimizer steps, each a row of record `updates`.

Knows no algorithm by name: what to compute is asked of the algorithm's row, and its loss is a function of a micro-batch
and of denominators that are global to the optimizer step. So neither value nor gradient depends on the split.

Shapes: T completion tokens of a micro-batch, flat; R its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_contracts.refs import PolicyRef
from data_contracts.schemas import UPDATES
from rft_core.adaptive import adapt, with_adapted
from rft_core.config import AlgorithmSettings, RolloutSettings, TrainingSettings
from rft_core.critic import SharedTrunk
from rft_core.critic_settings import CriticSettings
from rft_core.distillation import score_batch
from rft_core.errors import TrainingDiverged
from rft_core.likelihood_weights import log_collisions
from rft_core.mini_batches import MiniBatch, plan_mini_batches
from rft_core.mixtures import expert_columns
from rft_core.objective import finish_metrics, merge_sums, step_kept
from rft_core.optimizer import learning_rate
from rft_core.policy import Policy, Scorer
from rft_core.preference_step import (
    Logprobs,
    PreferenceGradient,
    mean_log_ratio,
    preference_gradient,
)
from rft_core.resolve import check, resolve_algorithm
from rft_core.seeds import derive, uniforms
from rft_core.step_batches import Scores, loss_batch
from rft_core.terms import Algorithm
from rft_core.train_rows import train_rows
from rft_core.train_state import TrainState
from rft_core.value_step import accumulate_values, for_critic, refuse_without_returns, value_parts, with_value_term

Progress = Callable[[int, int, str], None]

NO_TRAINED_TOKENS = "no_trained_tokens"  # no row of the mini-batch is trained
NO_SIGNAL = "no_signal"  # rows are trained, but every advantage is 0 and nothing else has a gradient
NON_FINITE_LOSS = "non_finite_loss"
NON_FINITE_GRADIENT = "non_finite_gradient"


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
    critic: CriticSettings
    teacher: Policy | None

    @property
    def is_warming(self) -> bool:
        """Whether the critic is trained alone."""
        return self.algorithm.value is not None and self.version <= self.critic.warmup_steps

    def shared_trunk(self, state: TrainState) -> SharedTrunk | None:
        """The head that is trained by one loss with the policy; null where each has a loss of its own."""
        model = state.critic.model if state.critic is not None and self.algorithm.value is not None else None
        return model if isinstance(model, SharedTrunk) and not self.is_warming else None


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
    critic: CriticSettings | None = None,
    teacher: Policy | None = None,
    seed: int,
    total_steps: int,
    progress: Progress | None = None,
) -> pa.Table:
    """Train `state`, which holds policy `before`, into version before.version + 1; gives its rows of `updates`.

    `total_steps` is the number of optimizer steps of the whole run, for schedules that depend on it. Rows of another
    policy than `before` are off-policy. Raises ContractError when rollouts and advantages do not pair up or a critic
    finds no returns, TrainingDiverged after too many non-finite steps in a row; a step that is skipped leaves no trace
    in weights and moments.
    """
    critic = critic or CriticSettings()
    row_of_table = with_value_term(with_adapted(resolve_algorithm(algorithm), state), state.critic, critic)
    check(row_of_table, training)
    rows = train_rows(rollouts, advantages, before, row_of_table.positions, algorithm.correct_engine)
    refuse_without_returns(rows, row_of_table)
    version = before.version + 1
    seed = derive(seed, "update", version)
    plan = plan_mini_batches(state.policy, rows, row_of_table, training, rollout.max_completion_tokens, seed)
    of_critic = [for_critic(state.critic, mini_batch, row_of_table, training.micro_batch_tokens) for mini_batch in plan]
    num_passes = len(plan) // training.epochs
    counter = _Counter(progress)
    constants = training, rollout.temperature, version, total_steps, counter.advance, seed, critic, teacher
    update = _Update(row_of_table, *constants)
    is_compared = [row.is_off_policy and row.term != "expert" for row in rows if row.num_trained_tokens]
    is_behind = len(plan) > 1 or any(is_compared)  # no loss compares what experts wrote with another policy
    passes = _passes_before(state, reference, update, is_behind, (plan[:num_passes], of_critic[:num_passes]))
    counter.total = _num_micro_batches(state, plan, of_critic, passes, update)
    state.begin_ema(training.ema_decay)
    with state.policy.training(training.compile is True, training.activation_checkpointing):
        scores = Scores(**{name: _score(*parts, update, name) for name, parts in passes.items()})
        steps = [_optimizer_step(state, *parts, scores, update) for parts in zip(plan, of_critic, strict=True)]
    made = [row for row, _ in steps]
    adapt(state, row_of_table, merge_sums(sums for _, of_step in steps for sums in of_step), rows)
    return pa.Table.from_pylist(made, schema=UPDATES.schema)


def _passes_before(
    state: TrainState,
    reference: Scorer | None,
    update: _Update,
    is_behind: bool,
    first: tuple[Sequence[MiniBatch], Sequence[MiniBatch | None]],
) -> dict[str, tuple[Scorer, Sequence[Any]]]:
    """Who scores what before the first optimizer step; `first` are the mini-batches of one epoch, and the critic's."""
    algorithm, passes = update.algorithm, {}
    if is_behind and algorithm.needs_old and not update.is_warming:
        passes["old"] = (state.policy, first[0])
    if reference is not None and algorithm.needs_reference and not update.is_warming:
        passes["reference"] = (reference, first[0])
    has_several_steps = len(first[0]) * update.training.epochs > 1
    if algorithm.value is not None and algorithm.value.clip is not None and has_several_steps:
        assert state.critic is not None, "a loss of values has a critic"
        passes["values"] = (state.critic.model, first[1])
    return passes


def _score(scorer: Scorer, plan: Sequence[MiniBatch], update: _Update, name: str) -> Logprobs:
    """Logprobs by the weights of now, in the very micro-batches that train: on-policy ratios are exactly 1 at first. A
    critic gives values."""
    scored: Logprobs = {}
    with torch.no_grad():
        for mini_batch in (part for whole in plan for part in whole.parts):
            for batch in mini_batch.micro_batches:
                logprobs_T, _ = scorer.token_logprobs(batch, update.temperature)
                rows = mini_batch.rows_of(batch)
                scored |= {row.key: part for row, part in zip(rows, logprobs_T.split(batch.lengths), strict=True)}
                update.advance("values" if name == "values" else f"{name} logprobs")
    return scored


def _optimizer_step(
    state: TrainState, mini_batch: MiniBatch, of_critic: MiniBatch | None, scores: Scores, update: _Update
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Accumulate the gradient of a mini-batch, then step or skip; gives the row of `updates` and the sums behind it."""
    state.optimizer_step += 1
    rates = _rates(state, update)
    _discard_gradients(state)
    kept = _step_gate(state, mini_batch, scores, update)
    preferred = _preferred(state, mini_batch, scores, update)
    sums, loss = [], 0.0
    if not update.is_warming:
        sums, loss = _accumulate(state, mini_batch, replace(scores, kept=kept), update, preferred)
    if of_critic is not None and math.isfinite(loss) and update.shared_trunk(state) is None:
        assert state.critic is not None, "only a critic has rows of its own"
        loss += accumulate_values(state.critic, update.algorithm.value, of_critic, scores, update.advance, sums)
    norms = _grad_norms(state, update) if mini_batch.micro_batches and math.isfinite(loss) else (0.0, 0.0)
    skipped = _reason_to_skip(mini_batch, loss, sum(norms))
    if skipped is None:
        if not update.is_warming:
            state.optimizer.step(update.training, rates[0], norms[0])
            state.advance_ema(update.training.ema_decay)
        if of_critic is not None and state.critic is not None:
            state.critic.optimizer.step(update.training, rates[1], norms[1])
        if preferred is not None:
            state.shift = preferred.shift
            if update.algorithm.head == "sequence_labels":
                state.scores = state.scores.including(preferred.values)
        state.skipped_in_a_row = 0
    _discard_gradients(state)
    trained = [row for row in mini_batch.rows if row.num_trained_tokens]
    made = finish_metrics(sums) | {
        "policy_version": update.version,
        "optimizer_step": state.optimizer_step,
        "loss": loss,
        "grad_norm": norms[0],
        "learning_rate": rates[0],
        "value_grad_norm": None if of_critic is None or update.critic.shared_trunk else norms[1],
        "value_learning_rate": None if of_critic is None else rates[1],
        "trained_rows": len(trained),
        "trained_tokens": sum(row.num_trained_tokens for row in trained),
        "off_policy_rows": sum(row.is_off_policy for row in trained),
        **expert_columns(update.algorithm, update.version, [row.term for row in trained]),
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
    if update.algorithm.step_gate is None or update.is_warming or not mini_batch.micro_batches:
        return None
    batches, draws = [], []
    with torch.no_grad():
        for batch in mini_batch.micro_batches:
            logprobs_T, entropy_T = state.policy.token_logprobs(batch, update.temperature)
            batches.append(loss_batch(mini_batch, batch, scores, logprobs_T, entropy_T))
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


def _rates(state: TrainState, update: _Update) -> tuple[float, float]:
    """Learning rates of the policy and of the critic, which one shared trunk has in common."""
    arguments = state.optimizer_step, update.total_optimizer_steps
    rate = learning_rate(update.training, *arguments)
    of_critic = rate
    if not update.critic.shared_trunk:
        peak = update.critic.peak_learning_rate
        of_critic = learning_rate(update.training.model_copy(update={"learning_rate": peak}), *arguments)
    return 0.0 if update.is_warming else rate, of_critic


def _grad_norms(state: TrainState, update: _Update) -> tuple[float, float]:
    """Of the policy and of the critic; one over both where they are trained by one loss."""
    policy = 0.0 if update.is_warming else state.optimizer.grad_norm()
    if update.algorithm.value is None or state.critic is None:
        return policy, 0.0
    critic = state.critic.optimizer.grad_norm()
    both = math.hypot(policy, critic)
    return (both, both) if state.critic.is_shared else (policy, critic)


def _discard_gradients(state: TrainState) -> None:
    state.optimizer.discard_gradients()
    if state.critic is not None:
        state.critic.optimizer.discard_gradients()


def _accumulate(
    state: TrainState, mini_batch: MiniBatch, scores: Scores, update: _Update, preferred: PreferenceGradient | None
) -> tuple[list[dict[str, float]], float]:
    """Forward and backward of every micro-batch; stops at the first loss that is not finite."""
    policy, trunk = state.policy, update.shared_trunk(state)
    sums, total = ([], 0.0) if preferred is None else ([preferred.sums], preferred.loss)
    if not math.isfinite(total):
        return sums, total
    for batch in mini_batch.micro_batches:
        scored = score_batch(policy, update.teacher, batch, update.temperature, update.algorithm, trunk is not None)
        policy_batch = loss_batch(mini_batch, batch, scores, *scored[:3])
        parts = update.algorithm.loss(policy_batch, mini_batch.denominators, update.version)
        differentiated = parts.loss
        sums.append(parts.sums)
        if trunk is not None:
            assert scored[3] is not None, "a shared trunk is scored with its hidden states"
            values_T = trunk.values_of(scored[3])
            of_values = value_parts(update.algorithm.value, mini_batch, batch, scores, values_T)
            differentiated = differentiated + of_values.loss
            sums.append(of_values.sums)
        loss = float(differentiated.detach())
        total += loss
        if not math.isfinite(loss):
            break
        if preferred is not None:
            coefficients = [preferred.coefficients[row.key] for row in mini_batch.rows_of(batch)]
            slope_T = torch.cat(coefficients).to(scored[0].device)
            differentiated = differentiated + torch.where(slope_T != 0, slope_T * scored[0], 0.0).sum()
        differentiated.backward()
        update.advance("forward and backward")
    return sums, total


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


def _num_micro_batches(
    state: TrainState,
    plan: Sequence[MiniBatch],
    of_critic: Sequence[MiniBatch | None],
    passes: dict[str, tuple[Scorer, Sequence[Any]]],
    update: _Update,
) -> int:
    """Of all passes of an update."""
    algorithm = update.algorithm
    has_weights = algorithm.preference is not None and algorithm.preference.likelihood_weights
    times = 0 if update.is_warming else 1 + (algorithm.step_gate is not None) + has_weights
    trained = [*plan] * times
    if update.shared_trunk(state) is None:
        trained += [mini_batch for mini_batch in of_critic if mini_batch is not None]
    scored = [mini_batch for _, mini_batches in passes.values() for mini_batch in mini_batches]
    scored += plan if algorithm.preference is not None else []
    counted = [*trained, *(part for mini_batch in scored for part in mini_batch.parts)]
    return sum(len(mini_batch.micro_batches) for mini_batch in counted)


@dataclass
class _Counter:
    """Counts micro-batches, of all passes, and reports each."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def advance(self, note: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, note)
