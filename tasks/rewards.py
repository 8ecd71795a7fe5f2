"""The reward stage: rollouts -> rewards, one row per rollout, with a status beside each score."""

from __future__ import annotations

import time

import numpy as np
import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.errors import ContractError, SettingsError
from data_contracts.refs import TableRef
from rft_core.rewards import num_timeouts
from tasks.context import RunContext, opened
from tasks.progress import Summary
from tasks.scoring import rewards_key, said_of_unknown, score_blocks
from tasks.stage import Slot, commit, first_validation, report, reuse, stage_task

NUM_SHOWN = 3


@stage_task("rewards")
def score_rollouts(run: str, slot: Slot, rollouts: TableRef, prompts: TableRef) -> State[TableRef]:
    """Score every rollout; what cannot be scored is a row with its reason."""
    context = opened(run)
    began = time.monotonic()
    key = rewards_key(context.recipe, context.identity["grader"], rollouts, prompts)
    refs = reuse(context, slot, {"rewards": key})
    reused = refs is not None
    if refs is None:
        refs = {"rewards": _score(context, slot, rollouts, prompts, key)}
    if context.beside is not None:
        context.beside.forget(rollouts.key)
    commit(context, slot, refs, began=began, reused=reused)
    return report(context, slot, _summary(context, refs["rewards"]), refs["rewards"], reused)


def _score(context: RunContext, slot: Slot, rollouts: TableRef, prompts: TableRef, key: str) -> TableRef:
    """As the store keeps them; see tasks/scoring.py."""
    beside = context.beside
    return score_blocks(
        context.store,
        context.grader,
        (rollouts, prompts),
        key,
        context.source_provenance([rollouts, prompts], context.recipe.reward.content()),
        tokenizer=context.tokenizer if context.grader.has_steps else None,
        progress=context.progress(slot.name),
        on_first=lambda rewards: first_validation(context, "rewards", rewards),
        made=lambda index: beside.take(rollouts.key, index) if beside is not None else None,
    )


def probe_rewards(context: RunContext, dataset: TableRef) -> None:
    """Call the reward functions once on real prompts before anything expensive.

    Raises RewardFunctionError, or ContractError when they cannot read so many answers that scoring would fail.
    """
    if any(not entry.pinned_from for entry in context.ledger.entries("rewards", context.phase)):
        return  # they have scored rollouts of this run already
    if context.grader.has_conditions:
        _check_conditions(context, dataset)
    if context.grader.has_conditions or any(
        entry.pinned_from for entry in context.ledger.entries("data", context.phase)
    ):
        _check_answers(context, dataset)  # the data stage did not ask these functions
    context.grader.probe(context.store.take(dataset, np.arange(min(2, dataset.rows))))


def _check_conditions(context: RunContext, dataset: TableRef) -> None:
    unknown = context.grader.unknown_fields(context.store.read(dataset))
    if unknown:
        raise SettingsError(said_of_unknown(unknown))


def _check_answers(context: RunContext, dataset: TableRef) -> None:
    unreadable = context.grader.unreadable_answers(context.store.read(dataset))
    if unreadable:
        shown = "; ".join(f"{bad.prompt_id}: {bad.component}: {bad.reason}" for bad in unreadable[:NUM_SHOWN])
        found = f"{len(unreadable)} of {dataset.rows} answers cannot be read by the rewards: {shown}"
        if len(unreadable) > context.recipe.reward.max_unscored_fraction * dataset.rows:
            raise ContractError(found)
        context.watcher.noted(f"{found}; their rollouts will be unscored")


def _summary(context: RunContext, ref: TableRef) -> Summary:
    rewards = context.store.read(ref, ["reward", "status", "component_status"])
    summary: Summary = {"rows": rewards.num_rows}
    mean = pc.mean(rewards["reward"]).as_py()
    if mean is not None:
        summary["reward"] = mean
    unscored = pc.sum(pc.equal(rewards["status"], "unscored")).as_py() or 0
    if unscored:
        summary["unscored"] = unscored
    if timeouts := num_timeouts(rewards):
        summary["timeouts"] = timeouts
    return summary
