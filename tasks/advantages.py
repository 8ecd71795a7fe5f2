"""The advantage stage: rollouts and rewards -> credit, one row per train rollout segment."""

from __future__ import annotations

import time

import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.refs import TableRef, content_key
from rft_core.credit import compute_advantages
from rft_core.seeds import derive
from tasks.context import RunContext, opened
from tasks.policy import algorithm_identity
from tasks.progress import Summary
from tasks.rounds import expert_weights, read_all
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, report, reuse, stage_task, write


@stage_task("advantages")
def assign_credit(
    run: str,
    slot: Slot,
    rollouts: list[TableRef],
    rewards: list[TableRef],
    token_scores: list[TableRef],
    experts: TableRef | None = None,
) -> State[TableRef]:
    """Advantages of one step over all its rounds, with the reason of every row that is not trained. `experts` is the
    data set of expert examples, where their sources have weights."""
    context = opened(run)
    began = time.monotonic()
    recipe = context.recipe
    settings = {
        "algorithm": recipe.algorithm.content(),
        "max_completion_tokens": recipe.rollout.max_completion_tokens,
        "current_version": slot.step - 1,
        "component_weights": recipe.component_weights,
    }
    if context.algorithm.needs_critic:
        settings["value_lambda"] = recipe.critic.value_lambda
    if context.algorithm.dynamic_sampling:
        settings["max_groups"] = recipe.rollout.prompts_per_step
    if experts is not None and recipe.experts is not None:
        settings["source_weights"] = recipe.experts.source_weights
    inputs = [*rollouts, *rewards, *token_scores, *([experts] if experts is not None else [])]
    key = content_key(
        "advantages",
        inputs=inputs,
        settings=settings,
        identity=algorithm_identity(context),
        seed=recipe.seed,
        semantics=SEMANTICS["advantages"],
    )
    refs = reuse(context, slot, {"advantages": key})
    reused = refs is not None
    if refs is None:
        table, metrics = compute_advantages(
            read_all(context, rollouts),
            read_all(context, rewards),
            recipe.algorithm,
            recipe.rollout.max_completion_tokens,
            slot.step - 1,
            component_weights=recipe.component_weights,
            token_scores=read_all(context, token_scores) if token_scores else None,
            value_lambda=recipe.critic.value_lambda,
            max_groups=recipe.rollout.prompts_per_step,
            expert_weights=expert_weights(context, experts),
            seed=derive(recipe.seed, "advantages", slot.step),
        )
        refs = {"advantages": write(context, "advantages", key, table, inputs, settings, metrics=metrics)}
    commit(context, slot, refs, began=began, reused=reused)
    return report(context, slot, _summary(context, refs["advantages"]), refs["advantages"], reused)


def _summary(context: RunContext, ref: TableRef) -> Summary:
    """Rows trained, and how many were left out or carry no signal, by reason."""
    table = context.store.read(ref, ["is_trained", "drop_reason"])
    summary: Summary = {"rows": table.num_rows, "trained": pc.sum(table["is_trained"]).as_py() or 0}
    for count in pc.value_counts(table["drop_reason"].combine_chunks()).to_pylist():
        if count["values"] != "none":
            summary[count["values"]] = count["counts"]
    return summary
