"""Record token_scores: logprobs and values of rollouts' tokens by given models, computed before credit and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch

from data_contracts.schemas import TOKEN_SCORES
from rft_core.batching import MicroBatch, TrainRow
from rft_core.policy import Scorer

Progress = Callable[[int, int, str], None]


class Layout(Protocol):
    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]: ...


@dataclass(frozen=True)
class NamedScorer:
    """`name` is a scorer of the record; `model_id` says which weights. `layout` decides how its rows share a forward
    pass, null leaves that to the policy."""

    name: str
    model_id: str
    scorer: Scorer
    layout: Layout | None = None
    only_cut: bool = False  # completions that were cut at the limit alone


def score_tokens(
    rollouts: pa.Table,
    policy: Layout,
    scorers: list[NamedScorer],
    temperature: float,
    token_budget: int,
    progress: Progress | None = None,
) -> pa.Table:
    """One row per scorer and train rollout segment that has tokens, its values aligned with the completion. Logprobs
    are at `temperature`, as in the update.
    """
    every, cut = _rows(rollouts)
    plan: list[tuple[NamedScorer, list[TrainRow], MicroBatch]] = []
    for named in scorers:
        rows = cut if named.only_cut else every
        plan += [(named, rows, batch) for batch in (named.layout or policy).micro_batches(rows, token_budget)]
    made = []
    with torch.no_grad():
        for done, (named, rows, batch) in enumerate(plan, start=1):
            scores_T, _ = named.scorer.token_logprobs(batch, temperature)
            for place, part in zip(batch.row_indices, scores_T.cpu().split(batch.lengths), strict=True):
                row = rows[place]
                made.append((row.rollout_id, row.segment, named.name, named.model_id, part.numpy()))
            if progress is not None:
                progress(done, len(plan), f"scored by {named.name}")
    made.sort(key=lambda row: row[:3])
    columns = list(zip(*made, strict=True)) or [()] * len(TOKEN_SCORES.schema)
    return pa.table([list(column) for column in columns], schema=TOKEN_SCORES.schema)


def _rows(rollouts: pa.Table) -> tuple[list[TrainRow], list[TrainRow]]:
    """(all train segments with tokens, those of them that were cut)."""
    columns = ["rollout_id", "segment", "purpose", "finish_reason"]
    columns += ["prompt_token_ids", "completion_token_ids", "completion_mask"]
    wanted = [
        row for row in rollouts.select(columns).to_pylist() if row["purpose"] == "train" and row["completion_token_ids"]
    ]
    rows = [
        TrainRow(
            rollout_id=row["rollout_id"],
            group_id="",
            prompt_token_ids=np.array(row["prompt_token_ids"], np.int64),
            completion_token_ids=np.array(row["completion_token_ids"], np.int64),
            trained_mask=np.array(row["completion_mask"], bool),
            segment=row["segment"],
        )
        for row in wanted
    ]
    return rows, [made for made, row in zip(rows, wanted, strict=True) if row["finish_reason"] == "length"]
