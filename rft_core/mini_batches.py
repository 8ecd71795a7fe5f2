"""Rows of an update -> the mini-batches of its optimizer steps, with denominators over each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rft_core.batching import MicroBatch, TrainRow
from rft_core.config import TrainingSettings
from rft_core.losses import Denominators, denominators_of
from rft_core.policy import Policy
from rft_core.preference_step import mismatched_rows
from rft_core.seeds import derive, permutation
from rft_core.terms import Algorithm


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step; `forward_rows` are those whose logprobs its loss reads."""

    rows: list[TrainRow]
    forward_rows: list[TrainRow]
    micro_batches: list[MicroBatch]  # of forward_rows
    group_numbers: dict[str, int]
    denominators: Denominators
    mismatched: MiniBatch | None = None  # kto: the same completions behind other prompts

    @property
    def parts(self) -> list[MiniBatch]:
        """What logprobs are computed of: the rows, and for kto also behind other prompts."""
        return [self] if self.mismatched is None else [self, self.mismatched]

    def rows_of(self, batch: MicroBatch) -> list[TrainRow]:
        """The rows of one of its micro-batches."""
        return [self.forward_rows[index] for index in batch.row_indices]


def plan_mini_batches(
    policy: Policy,
    rows: list[TrainRow],
    algorithm: Algorithm,
    training: TrainingSettings,
    max_completion_tokens: int,
    seed: int,
) -> list[MiniBatch]:
    """Every epoch's mini-batches: whole groups, in an order drawn anew each epoch, each with its share of the groups of
    experts. Some are empty where groups are few, so that the number of optimizer steps is known beforehand."""
    groups: dict[str, list[TrainRow]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    kinds = _kinds([any(row.term == "expert" for row in members) for members in groups.values()])
    trained = [row for row in rows if row.num_trained_tokens]
    # Partners come from the whole step: the same in every epoch, whatever mini-batch a row falls into.
    needs_mismatched = algorithm.preference is not None and algorithm.preference.uses("kto")
    mismatched = mismatched_rows(trained) if needs_mismatched else {}
    plan = []
    names = list(groups)
    for epoch in range(training.epochs):
        drawn = [members[permutation(derive(seed, epoch, *label), len(members))] for label, members in kinds]
        parts = [np.array_split(order, training.mini_batches) for order in drawn]
        for part in map(np.concatenate, zip(*parts, strict=True)):
            # Inside a mini-batch rows keep the table's order: only membership is drawn.
            chosen = [row for index in sorted(part) for row in groups[names[index]]]
            made = _mini_batch(policy, chosen, algorithm, training.micro_batch_tokens, max_completion_tokens)
            plan.append(_with_mismatched(made, mismatched, policy, training.micro_batch_tokens))
    return plan


def _kinds(is_expert: list[bool]) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Numbers of groups by who wrote them, with what sets their draws apart: mini-batches of a mixture need both."""
    given = np.array(is_expert, bool)
    if given.all() or not given.any():
        return [((), np.arange(len(given)))]
    return [((), np.flatnonzero(~given)), (("expert",), np.flatnonzero(given))]


def _mini_batch(
    policy: Policy, rows: list[TrainRow], algorithm: Algorithm, token_budget: int, max_completion_tokens: int
) -> MiniBatch:
    needs_all = algorithm.needs_all_rows()
    forward_rows = [row for row in rows if row.num_trained_tokens and (needs_all or row.has_signal)]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(row.group_id for row in rows))}
    denominators = denominators_of(
        [row.num_trained_tokens for row in rows],
        [numbers[row.group_id] for row in rows],
        max_completion_tokens,
        [row.weight for row in rows],
        [row.term for row in rows],
    )
    batches = policy.micro_batches(forward_rows, token_budget)
    return MiniBatch(rows, forward_rows, batches, numbers, denominators)


def _with_mismatched(
    made: MiniBatch, mismatched: dict[tuple[str, int], TrainRow], policy: Policy, token_budget: int
) -> MiniBatch:
    if not mismatched:
        return made
    others = [mismatched[row.key] for row in made.forward_rows]
    batches = policy.micro_batches(others, token_budget)
    return replace(made, mismatched=replace(made, rows=others, forward_rows=others, micro_batches=batches))
