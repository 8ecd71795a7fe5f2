"""Rounds of a step: more prompts while groups lack signal, and greedy baselines. A step's tables are the union."""

from __future__ import annotations

import pyarrow as pa

from data_contracts.refs import TableRef
from rft_core.resampling import groups_with_signal
from tasks.context import PHASE, RunContext
from tasks.stage import Slot


def read_all(context: RunContext, refs: list[TableRef], columns: list[str] | None = None) -> pa.Table:
    """The rounds' tables as one."""
    return pa.concat_tables([context.store.read(ref, columns) for ref in refs])


def wants_another(context: RunContext, rewards: list[TableRef]) -> bool:
    """Whether dynamic sampling goes on: the step is not full, and another round is allowed."""
    algorithm = context.recipe.algorithm
    if not context.algorithm.dynamic_sampling or len(rewards) > algorithm.max_resample_rounds:
        return False
    kept = groups_with_signal(read_all(context, rewards), algorithm)
    return len(kept) < context.recipe.rollout.prompts_per_step


def may_generate(context: RunContext, slot: Slot) -> bool:
    """Whether the round is there already, or an engine may make it."""
    is_there = context.ledger.get(PHASE, slot.step, slot.stage, slot.round) is not None
    return is_there or context.recipe.rollout.engine != "none"
