"""Record token_scores: logprobs of rollouts' tokens by given models, computed before credit and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from data_contracts.schemas import TOKEN_SCORES
from rft_core.batching import TrainRow
from rft_core.policy import Policy, Scorer

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class NamedScorer:
    """`name` is old | reference; `model_id` says which weights."""

    name: str
    model_id: str
    scorer: Scorer


def score_tokens(
    rollouts: pa.Table,
    policy: Policy,
    scorers: list[NamedScorer],
    temperature: float,
    token_budget: int,
    progress: Progress | None = None,
) -> pa.Table:
    """One row per scorer and train rollout segment that has tokens, its values aligned with the completion.

    `policy` decides how rows share a forward pass. Logprobs are at `temperature`, as in the update.
    """
    rows = _rows(rollouts)
    batches = policy.micro_batches(rows, token_budget)
    made, done = [], 0
    with torch.no_grad():
        for named in scorers:
            for batch in batches:
                logprobs_T, _ = named.scorer.token_logprobs(batch, temperature)
                for place, part in zip(batch.row_indices, logprobs_T.cpu().split(batch.lengths), strict=True):
                    row = rows[place]
                    made.append((row.rollout_id, row.segment, named.name, named.model_id, part.numpy()))
                done += 1
                if progress is not None:
                    progress(done, len(scorers) * len(batches), f"{named.name} logprobs")
    made.sort(key=lambda row: row[:3])
    columns = list(zip(*made, strict=True)) or [()] * len(TOKEN_SCORES.schema)
    return pa.table([list(column) for column in columns], schema=TOKEN_SCORES.schema)


def _rows(rollouts: pa.Table) -> list[TrainRow]:
    columns = ["rollout_id", "segment", "purpose", "prompt_token_ids", "completion_token_ids", "completion_mask"]
    return [
        TrainRow(
            rollout_id=row["rollout_id"],
            group_id="",
            prompt_token_ids=np.array(row["prompt_token_ids"], np.int64),
            completion_token_ids=np.array(row["completion_token_ids"], np.int64),
            trained_mask=np.array(row["completion_mask"], bool),
            segment=row["segment"],
        )
        for row in rollouts.select(columns).to_pylist()
        if row["purpose"] == "train" and row["completion_token_ids"]
    ]
