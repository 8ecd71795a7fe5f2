"""Rounds of a step: more prompts while groups lack signal, and greedy baselines. A step's tables are the union."""

from __future__ import annotations

import pyarrow as pa

from data_contracts.ledger import BASELINE
from data_contracts.refs import TableRef
from rft_core.data.settings import ExpertSettings
from rft_core.resampling import groups_with_signal
from tasks.context import RunContext


def read_all(context: RunContext, refs: list[TableRef], columns: list[str] | None = None) -> pa.Table:
    """The rounds' tables as one."""
    return pa.concat_tables([context.store.read(ref, columns) for ref in refs])


def expert_weights(context: RunContext, examples: TableRef | None) -> dict[str, float] | None:
    """Weights of expert examples by id, from their data set's sources; null where all count alike."""
    experts = context.recipe.experts
    if examples is None or not isinstance(experts, ExpertSettings) or not experts.source_weights:
        return None
    rows = context.store.read(examples, ["example_id", "dataset"])
    pairs = zip(rows["example_id"].to_pylist(), rows["dataset"].to_pylist(), strict=True)
    return {example: experts.source_weights[name] for example, name in pairs if name in experts.source_weights}


def wants_another(context: RunContext, step: int, rewards: list[TableRef]) -> bool:
    """Whether dynamic sampling goes on: the step is not full, and another round is allowed.

    A step whose credit is committed has the rounds that its ledger names: their tables may be deleted by now.
    """
    algorithm = context.recipe.algorithm
    number = len(rewards)
    is_there = context.ledger.get(context.phase, step, "rollouts", number) is not None
    if context.ledger.get(context.phase, step, "advantages") is not None:
        return is_there and number < BASELINE
    if number > algorithm.max_resample_rounds or not (is_there or context.recipe.rollout.engine != "none"):
        return False  # an offline run makes none
    kept = groups_with_signal(read_all(context, rewards), algorithm)
    return len(kept) < context.recipe.rollout.prompts_per_step
