"""How often each train prompt was drawn, tried and solved: the memory of the orders that go by pass rate."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.schemas import PROMPT_STATS
from rft_core.errors import ContractError
from rft_core.evaluation import scored_rollouts


def update_stats(
    previous: pa.Table | None,
    prompts: pa.Table,
    rollouts: pa.Table,
    rewards: pa.Table,
    component: str,
    decay: float,
    step: int,
) -> pa.Table:
    """Record prompt_stats with one more step. New prompts come after those of `previous`, in the order of `prompts`.

    A rollout passes when its reward component is at least 1; unscored rollouts count neither way, and greedy ones do
    not belong to the training. What was counted of a prompt before fades by `decay` when it is measured again, and
    stays as it is when none of its new rollouts was scored. Raises ContractError when the tables do not belong
    together, SettingsError for a component that no row has.
    """
    names, is_greedy, is_right = scored_rollouts(rollouts, rewards, component)
    drawn = prompts["prompt_id"].combine_chunks()
    at = pc.index_in(pa.array(names, drawn.type), value_set=drawn)
    if at.null_count:
        stranger = names[pc.indices_nonzero(pc.is_null(at))[0].as_py()]
        raise ContractError(f"rollouts of step {step} must be of its prompts, found one of {stranger!r}")
    counted = ~is_greedy & ~np.isnan(is_right)
    owner = at.to_numpy()[counted]
    attempts = np.bincount(owner, minlength=len(drawn)).astype(np.float64)
    passes = np.bincount(owner, weights=is_right[counted], minlength=len(drawn))

    previous = previous if previous is not None else PROMPT_STATS.schema.empty_table()
    before = pc.index_in(drawn, value_set=previous["prompt_id"].combine_chunks())
    fresh = pc.indices_nonzero(pc.is_null(before)).to_numpy()
    place = before.fill_null(0).to_numpy().astype(np.int64)
    place[fresh] = previous.num_rows + np.arange(len(fresh))
    keep = np.where(attempts > 0, decay, 1.0)

    def column(name: str) -> np.ndarray:
        values = previous[name].to_numpy()
        return np.concatenate([values, np.zeros(len(fresh), values.dtype)])

    columns = {name: column(name) for name in ("attempts", "passes", "draws", "last_step")}
    columns["attempts"][place] = keep * columns["attempts"][place] + attempts
    columns["passes"][place] = keep * columns["passes"][place] + passes
    columns["draws"][place] += 1
    columns["last_step"][place] = step
    ids = pa.concat_arrays([previous["prompt_id"].combine_chunks(), drawn.take(pa.array(fresh))])
    return pa.table([ids, *(pa.array(columns[name]) for name in PROMPT_STATS.schema.names[1:])], PROMPT_STATS.schema)
