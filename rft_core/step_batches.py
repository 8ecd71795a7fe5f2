"""From the rows of a micro-batch, and what was scored of them beforehand, to what losses read.

Shapes: T completion tokens of a micro-batch, flat; R its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft_core.batching import MicroBatch
from rft_core.losses import ROW_KINDS, LossBatch
from rft_core.mini_batches import MiniBatch
from rft_core.preference_step import Logprobs
from rft_core.value_loss import ValueBatch


@dataclass(frozen=True)
class Scores:
    """float32 logprobs per row, by rollout id and segment (`TrainRow.key`), from before the first optimizer step."""

    old: Logprobs | None = None
    reference: Logprobs | None = None
    values: Logprobs | None = None  # a critic's, where they bound it
    kept: dict[tuple[str, int], Tensor] | None = None  # bool: by a gate over the whole optimizer step


def loss_batch(
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
        off_policy_R=per_row([row.is_corrected for row in rows], torch.bool),
        weight_R=per_row([row.weight for row in rows], torch.float32),
        group_R=per_row([mini_batch.group_numbers[row.group_id] for row in rows], torch.int64),
        term_R=per_row([ROW_KINDS.index(row.term) for row in rows], torch.int64),
    )


def value_batch(mini_batch: MiniBatch, batch: MicroBatch, scores: Scores, values_T: Tensor) -> ValueBatch:
    rows = mini_batch.rows_of(batch)

    def flat(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(values_T.device)

    sized = list(zip(rows, batch.lengths, strict=True))
    return ValueBatch(
        values_T=values_T,
        returns_T=flat([np.zeros(length, np.float32) if row.returns is None else row.returns for row, length in sized]),
        mask_T=flat([row.trained_mask for row in rows]),
        weight_T=flat([np.full(length, row.weight, np.float32) for row, length in sized]),
        old_T=None if scores.values is None else torch.cat([scores.values[row.key] for row in rows]),
    )
