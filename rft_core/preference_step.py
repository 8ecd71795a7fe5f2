"""The preference objective of one optimizer step: from each completion's logprobs to the loss and its gradient.

A loss of pairs, of sorted margins, or against a mean over the step is no sum over rows. So the logprobs of all rows are
computed first, without a gradient; the loss and its derivative by each row's sum follow exactly; then each row's
gradient flows through its own forward pass, with that derivative as its coefficient. Neither value nor gradient knows
how rows are split into micro-batches, and a pair need not share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rft_core.batching import TrainRow
from rft_core.errors import ContractError
from rft_core.likelihood_weights import pair_weights
from rft_core.pairing import CHOSEN, REJECTED
from rft_core.preference import PREFERENCE_LOSSES, Side, StepStatistics
from rft_core.preference_options import SORTED_LOSSES, USED_BY, Preference

Logprobs = dict[tuple[str, int], Tensor]  # float32[C] by TrainRow.key
MISMATCHED = "~mismatched"  # ends the id of a completion behind another prompt than its own


@dataclass(frozen=True)
class RunningShift:
    """bco's shift: the mean of all rewards of the run so far, by their rows' weights. Part of a checkpoint."""

    mean: float = 0.0
    count: float = 0.0

    def including(self, rewards: Tensor, weight: Tensor) -> RunningShift:
        """
        >>> RunningShift(1.0, 1.0).including(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 1.0]))
        RunningShift(mean=2.25, count=4.0)
        """
        added = float(weight.sum())
        if added == 0:
            return self
        count = self.count + added
        return RunningShift(self.mean + float((weight * (rewards - self.mean)).sum()) / count, count)


SCORES_KEPT = 0.95  # of what earlier optimizer steps add to a reward model's statistics: its scores drift as it learns


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and mean square of a reward model's scores; older optimizer steps fade. Part of a checkpoint."""

    mean: float = 0.0
    square: float = 0.0
    count: int = 0  # of scores behind them, faded ones too

    @property
    def std(self) -> float:
        return max(self.square - self.mean**2, 0.0) ** 0.5

    def including(self, scores: Tensor) -> ScoreStatistics:
        if not scores.numel():
            return self
        kept = SCORES_KEPT if self.count else 0.0
        mean, square = float(scores.mean()), float(scores.square().mean())
        return ScoreStatistics(
            kept * self.mean + (1 - kept) * mean, kept * self.square + (1 - kept) * square, self.count + scores.numel()
        )


@dataclass(frozen=True)
class PreferenceGradient:
    """`coefficients` float64[C] by row key: the derivative of the loss by each token's logprob."""

    loss: float
    coefficients: dict[tuple[str, int], Tensor]
    sums: dict[str, float]
    shift: RunningShift  # after this step
    values: Tensor  # what the losses read of each completion: its summed logprob, or its score


def preference_gradient(
    preference: Preference,
    rows: Sequence[TrainRow],
    current: Logprobs,
    reference: Logprobs | None,
    shift: RunningShift,
    kl: float,
    collisions: Logprobs | None = None,
) -> PreferenceGradient:
    """Loss of the step and its gradient. `rows` are those with a pair_role; segments of a rollout are one completion.

    `kl` is kto's, 0 elsewhere; `collisions` are log sum p^2 at each token, for weights of pairs. Raises ContractError
    for a row without a role, for a pair that is not one chosen and one rejected completion of one weight, and for
    unequal weights where a loss sorts the step.
    """
    sides = {role: _completions(rows, role) for role in (CHOSEN, REJECTED)}
    without = next((row.rollout_id for row in rows if row.pair_role not in sides), None)
    if without is not None:
        raise ContractError(f"a row that is trained must be chosen or rejected, found neither for {without}")
    if preference.unit == "pairs":
        sides = _aligned(sides)
    weights = _token_weights(sides, preference.tail_weight) if preference.tail_weight != 1 else {}
    made = {role: _side(completions, current, reference, weights) for role, completions in sides.items()}
    chosen, rejected = made[CHOSEN], made[REJECTED]
    rewards = {role: preference.beta * side.log_ratio.detach() for role, side in made.items()}
    weights_of = {role: _row_weights(completions) for role, completions in sides.items()}
    weight = weights_of[CHOSEN] if preference.unit == "pairs" else torch.cat([weights_of[CHOSEN], weights_of[REJECTED]])
    if preference.uses(*SORTED_LOSSES) and len(weight.unique()) > 1:
        raise ContractError(f"{' and '.join(SORTED_LOSSES)} sort the pairs of a step, so all must have one weight")
    if preference.running_shift and preference.uses("bco", "bco_pair"):
        shift = shift.including(torch.cat(list(rewards.values())), torch.cat(list(weights_of.values())))
    statistics = StepStatistics(kl=kl, shift=shift.mean)
    by_likelihood = None
    if preference.likelihood_weights:
        if collisions is None:
            raise ContractError("likelihood_weights need log sum p^2 of each token, got none")
        by_likelihood = pair_weights(sides[CHOSEN], sides[REJECTED], current, collisions)
    total = torch.zeros((), dtype=torch.float64)
    for name, coefficient in preference.losses:
        if coefficient:
            values = PREFERENCE_LOSSES[name](chosen, rejected, preference, statistics)
            if by_likelihood is not None and name in USED_BY["likelihood_weights"]:
                values = values * by_likelihood
            total = total + coefficient * (weight * values).sum() / weight.sum().clamp(min=1e-12)
    gradients = torch.autograd.grad(total, [chosen.policy, rejected.policy], allow_unused=True)
    coefficients: dict[tuple[str, int], Tensor] = {}
    for role, gradient in zip((CHOSEN, REJECTED), gradients, strict=True):
        for index, completion in enumerate(sides[role]):
            slope = 0.0 if gradient is None else float(gradient[index])
            for row in completion:
                mask = torch.from_numpy(row.trained_mask)
                coefficients[row.key] = slope * weights.get(row.key, mask.double())
    loss = float(total.detach())
    values = torch.cat([chosen.policy, rejected.policy]).detach()
    sums = {"policy_loss": loss, **_sums(preference, rewards, made)}
    return PreferenceGradient(loss, coefficients, sums, shift, values)


def _completions(rows: Sequence[TrainRow], role: str) -> list[list[TrainRow]]:
    """The completions of a role, each with its segments, in the order of the rows."""
    found: dict[str, list[TrainRow]] = {}
    for row in rows:
        if row.pair_role == role:
            found.setdefault(row.rollout_id, []).append(row)
    return list(found.values())


def _aligned(sides: dict[str, list[list[TrainRow]]]) -> dict[str, list[list[TrainRow]]]:
    by_pair = {
        role: {completion[0].pair_id: completion for completion in completions} for role, completions in sides.items()
    }
    chosen, rejected = by_pair[CHOSEN], by_pair[REJECTED]
    if chosen.keys() != rejected.keys() or any(len(by_pair[role]) != len(sides[role]) for role in sides):
        odd = sorted(chosen.keys() ^ rejected.keys(), key=str) or ["a pair has two of one role"]
        raise ContractError(f"a pair must be one chosen and one rejected completion, the first that is not: {odd[0]}")
    uneven = next((pair for pair in chosen if chosen[pair][0].weight != rejected[pair][0].weight), None)
    if uneven is not None:
        raise ContractError(f"both completions of a pair must have one weight, the first that have two: {uneven}")
    return {CHOSEN: list(chosen.values()), REJECTED: [rejected[pair] for pair in chosen]}


def _row_weights(completions: list[list[TrainRow]]) -> Tensor:
    return torch.tensor([completion[0].weight for completion in completions], dtype=torch.float64)


def _token_weights(sides: dict[str, list[list[TrainRow]]], tail: float) -> dict[tuple[str, int], Tensor]:
    """float64[C] by row: `tail` for trained tokens beyond the shorter completion of the pair (LD-DPO, arXiv
    2409.06411), else 1."""
    weights = {}
    for pair in zip(sides[CHOSEN], sides[REJECTED], strict=True):
        shorter = min(sum(row.num_trained_tokens for row in completion) for completion in pair)
        for completion in pair:
            before = 0
            for row in completion:
                rank = before + np.cumsum(row.trained_mask)
                value = np.where(rank <= shorter, 1.0, tail) * row.trained_mask
                weights[row.key] = torch.from_numpy(value)
                before += row.num_trained_tokens
    return weights


def _side(
    completions: list[list[TrainRow]],
    current: Logprobs,
    reference: Logprobs | None,
    weights: dict[tuple[str, int], Tensor],
) -> Side:
    def total(scores: Logprobs) -> Tensor:
        sums = []
        for completion in completions:
            parts = [_masked_sum(scores[row.key], row, weights) for row in completion]
            sums.append(sum(parts))
        return torch.tensor(sums, dtype=torch.float64)

    lengths = [sum(_num_tokens(row, weights) for row in completion) for completion in completions]
    policy = total(current).requires_grad_()
    return Side(
        policy=policy,
        reference=torch.zeros_like(policy) if reference is None else total(reference),
        length=torch.tensor(lengths, dtype=torch.float64),
        margin=torch.tensor([completion[0].pair_margin for completion in completions], dtype=torch.float64),
    )


def _num_tokens(row: TrainRow, weights: dict[tuple[str, int], Tensor]) -> float:
    return float(weights[row.key].sum()) if row.key in weights else row.num_trained_tokens


def _masked_sum(values: Tensor, row: TrainRow, weights: dict[tuple[str, int], Tensor]) -> float:
    mask = torch.from_numpy(row.trained_mask)
    kept = values.detach().cpu().double()[mask]
    return float((kept * weights[row.key][mask]).sum() if row.key in weights else kept.sum())


def _sums(preference: Preference, rewards: dict[str, Tensor], made: dict[str, Side]) -> dict[str, float]:
    sums = {}
    for role in (CHOSEN, REJECTED):
        sums[f"reward_{role}"] = float(rewards[role].sum())
        sums[f"count_{role}"] = rewards[role].numel()
        if not preference.uses("bradley_terry"):
            sums[f"logp_{role}"] = float(made[role].policy.detach().sum())
    if preference.unit == "pairs":
        margin = rewards[CHOSEN] - rewards[REJECTED]
        sums |= {"margin": float(margin.sum()), "margin_right": float((margin > 0).sum()), "margins": margin.numel()}
    return sums


def preference_metrics(sums: dict[str, float]) -> dict[str, float | None]:
    """The columns of record `updates` that only a preference objective fills."""

    def mean(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if name in sums and sums[count] else None

    means = {
        "rewards_chosen": mean("reward_chosen", "count_chosen"),
        "rewards_rejected": mean("reward_rejected", "count_rejected"),
        "rewards_margin": mean("margin", "margins"),
        "rewards_accuracy": mean("margin_right", "margins"),
        "logps_chosen": mean("logp_chosen", "count_chosen"),
        "logps_rejected": mean("logp_rejected", "count_rejected"),
    }
    chosen, rejected = means["rewards_chosen"], means["rewards_rejected"]
    if means["rewards_margin"] is None and chosen is not None and rejected is not None:
        means["rewards_margin"] = chosen - rejected  # completions that are not paired
    return means


def mismatched_rows(rows: Sequence[TrainRow]) -> dict[tuple[str, int], TrainRow]:
    """kto: each completion behind the prompt of the next one that has another prompt, in a ring; by key of the row.

    All segments of a completion go behind one prompt: that of the other's first segment, since later ones hold what it
    said. Raises ContractError when all prompts are equal.
    """
    if not rows:
        return {}
    prompts = {}  # of the first segment of each completion, in the rows' order
    for row in sorted(rows, key=lambda row: row.segment):
        prompts.setdefault(row.rollout_id, row.prompt_token_ids)
    names = list(dict.fromkeys(row.rollout_id for row in rows))
    seen = {name: prompts[name].tobytes() for name in names}
    other: dict[str, str] = {}
    for name, following in pairwise(reversed([*names, *names])):
        # From behind, twice around: an equal neighbour has the same partner, once there is one.
        partner = name if seen[name] != seen[following] else other.get(name)
        if partner is not None:
            other[following] = partner
    if not other:
        raise ContractError(
            f"kto needs at least 2 different prompts in a step, found 1 in {len(rows)} rows; raise "
            "rollout.prompts_per_step"
        )
    return {
        row.key: replace(
            row, prompt_token_ids=prompts[other[row.rollout_id]], rollout_id=f"{row.rollout_id}{MISMATCHED}"
        )
        for row in rows
    }


def mean_log_ratio(rows: Sequence[TrainRow], current: Logprobs, reference: Logprobs) -> float:
    """kto's kl: the mean over completions, by their weights, of the summed log-ratio, at least 0."""
    total = sum(
        row.weight * (_masked_sum(current[row.key], row, {}) - _masked_sum(reference[row.key], row, {})) for row in rows
    )
    weight = sum({row.rollout_id: row.weight for row in rows}.values())
    return max(0.0, total / weight) if weight else 0.0
