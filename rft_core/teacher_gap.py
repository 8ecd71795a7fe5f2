"""Credit of each token by a teacher: its logprob against the policy's own, from the record token_scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rft_core.errors import ContractError

Gaps = Mapping[tuple[str, int], np.ndarray]


def teacher_gaps(token_scores: pa.Table) -> dict[tuple[str, int], np.ndarray]:
    """float64[C] log p of the teacher - old by (rollout_id, segment). Raises ContractError where one is missing."""
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for row in token_scores.select(["rollout_id", "segment", "scorer", "values"]).to_pylist():
        found.setdefault((row["rollout_id"], row["segment"]), {})[row["scorer"]] = np.array(row["values"], np.float64)
    for key, values in found.items():
        if not {"old", "teacher"} <= values.keys():
            raise ContractError(f"token_scores must hold old and teacher of {key}, found {sorted(values)}")
    return {key: values["teacher"] - values["old"] for key, values in found.items()}


def with_teacher_gap(
    advantages: pa.Table, masks: Mapping[tuple[str, int], np.ndarray], token_scores: pa.Table | None, coefficient: float
) -> pa.Table:
    """The table with coefficient x gap added to each policy token of own rows that are trained; `advantage` becomes the
    mean over them. Detached: the ratio of the loss carries the gradient.

    Raises ContractError when the scores are missing or not aligned with the completions.
    """
    if token_scores is None:
        raise ContractError("a teacher's credit needs token_scores, got none")
    gaps = teacher_gaps(token_scores)
    rows = advantages.select(["rollout_id", "segment", "advantage", "token_advantages", "is_trained", "term"])
    means, credit = [], []
    for row in rows.to_pylist():
        key = (row["rollout_id"], row["segment"])
        mask = masks.get(key)
        is_credited = row["is_trained"] and row["term"] == "own" and mask is not None and mask.any()
        if not is_credited:
            means.append(row["advantage"])
            credit.append(row["token_advantages"])
            continue
        if len(gaps.get(key, ())) != len(mask):
            raise ContractError(f"token_scores must be aligned with the completion of {key}, found otherwise")
        before = row["advantage"] if row["token_advantages"] is None else np.array(row["token_advantages"], float)
        values = np.where(mask, before + coefficient * gaps[key], 0.0).astype(np.float32)
        means.append(float(values[mask].mean()))
        credit.append(values)
    for name, column in (("token_advantages", credit), ("advantage", means)):
        field = advantages.schema.field(name)
        place = advantages.schema.get_field_index(name)
        advantages = advantages.set_column(place, field, pa.array(column, field.type))
    return advantages
