"""Rollouts, rewards and evaluation of completions that the data set gives: the stages where nothing is sampled."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.refs import PolicyRef, TableRef, content_key
from data_contracts.validation import check_table
from rft_core.environments import RolloutPlan, given_rollouts, plan_blocks
from rft_core.rewards.given import GIVEN, given_rewards
from tasks.context import RunContext, opened
from tasks.progress import Summary
from tasks.rollouts import evaluation_plan, heldout_prompts, training_plan
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, first_validation, report, reuse, stage_task, write

EXAMPLES_PER_BLOCK = 256  # rendering is cheap: a block bounds memory and what a crash loses


@stage_task("rollouts")
def render_rollouts(run: str, slot: Slot, examples: TableRef) -> State[TableRef]:
    """The completions of one step's examples, or of the held-out ones when the slot is an evaluation's."""
    context = opened(run)
    began = time.monotonic()
    plan = _plan(context, slot)
    settings = {
        "purpose": plan.purpose,
        "step": plan.step,
        "data": context.data_of(slot.round).content(),
        "examples": context.recipe.evaluation.prompts if plan.purpose == "evaluation" else None,
    }
    key = content_key(
        "rollouts",
        inputs=[examples],
        settings=settings,
        identity={"tokenizer": context.identity["tokenizer"]},
        seed=context.recipe.seed,
        semantics=SEMANTICS["given"],
    )
    refs = reuse(context, slot, {"rollouts": key})
    reused = refs is not None
    if refs is None:
        refs = {"rollouts": _render(context, slot, examples, plan, key, settings)}
    commit(context, slot, refs, began=began, reused=reused)
    lengths = pc.list_value_length(context.store.read(refs["rollouts"], ["completion_token_ids"]).column(0))
    summary: Summary = {"rollouts": refs["rollouts"].rows, "tokens": pc.sum(lengths).as_py() or 0}
    return report(context, slot, summary, refs["rollouts"], reused)


def _plan(context: RunContext, slot: Slot) -> RolloutPlan:
    """Held-out completions are the same at every step, so they are made once."""
    policy = PolicyRef(GIVEN, 0)
    if slot.stage == "rollouts":
        return training_plan(context, slot, policy)
    return replace(evaluation_plan(context, slot, policy), step=0, id_prefix=f"{context.prefix}eval-given")


def _render(
    context: RunContext, slot: Slot, examples: TableRef, plan: RolloutPlan, key: str, settings: dict[str, Any]
) -> TableRef:
    from rft_core.data.prompts import Renderer, load_stop_ids

    data = context.data_of(slot.round)
    if plan.purpose == "evaluation":
        table = heldout_prompts(context.store, examples, context.recipe.evaluation.prompts)
    else:
        table = context.store.read(examples)
    renderer = Renderer(context.tokenizer, data, load_stop_ids(context.model_folder))
    provenance = context.source_provenance([examples], settings)
    writer = context.store.writer("rollouts", key, provenance)
    blocks = plan_blocks(table, EXAMPLES_PER_BLOCK, "example_id")
    for index, block in enumerate(blocks):
        if index in writer.committed:
            continue
        made = given_rollouts(block, plan, renderer, data)
        check_table(made, "rollouts")
        provenance |= first_validation(context, "rollouts", made)
        writer.commit(index, made)
        context.watcher.advanced(slot.name, min((index + 1) * EXAMPLES_PER_BLOCK, table.num_rows), table.num_rows, "")
    return writer.close()


@stage_task("rewards")
def read_rewards(run: str, slot: Slot, rollouts: TableRef, examples: TableRef) -> State[TableRef]:
    """What the data set says that its completions are worth."""
    context = opened(run)
    began = time.monotonic()
    key = content_key(
        "rewards",
        inputs=[rollouts, examples],
        settings={},
        identity={"grader": GIVEN},
        seed=context.recipe.seed,
        semantics=SEMANTICS["given"],
    )
    refs = reuse(context, slot, {"rewards": key})
    reused = refs is not None
    if refs is None:
        table = context.store.read(rollouts)
        wanted = pc.is_in(
            context.store.read(examples, ["example_id"])["example_id"], value_set=pc.unique(table["prompt_id"])
        )
        rewards = given_rewards(table, context.store.take(examples, pc.indices_nonzero(wanted).to_numpy()))
        refs = {"rewards": write(context, "rewards", key, rewards, [rollouts, examples], {})}
    commit(context, slot, refs, began=began, reused=reused)
    mean = pc.mean(context.store.read(refs["rewards"], ["reward"])["reward"]).as_py()
    summary: Summary = {"rows": refs["rewards"].rows} | ({} if mean is None else {"reward": mean})
    return report(context, slot, summary, refs["rewards"], reused)


@stage_task("evaluation")
def measure_likelihood(
    run: str, slot: Slot, policy: PolicyRef, rollouts: TableRef, rewards: TableRef
) -> State[TableRef]:
    """Held-out loss of a policy, and by how much it prefers what it should."""
    from rft_core.given_evaluation import evaluate_given

    context = opened(run)
    began = time.monotonic()
    recipe = context.recipe
    algorithm = context.algorithm
    reference = _reference_id(context) if algorithm.is_measured_by_margin else None
    settings = {
        "step": slot.step,
        "has_reference": reference is not None,
        "positions": algorithm.positions,
        "model": recipe.model.content(),
    }
    key = content_key(
        "evaluations",
        inputs=[rollouts, rewards],
        settings=settings,
        identity={"policy": policy.policy_id, "reference": reference},
        seed=recipe.seed,
        semantics=SEMANTICS["given"],
    )
    refs = reuse(context, slot, {"evaluations": key})
    reused = refs is not None
    if refs is None:
        resident = context.policies.materialise(policy).policy
        table = evaluate_given(
            context.store.read(rollouts),
            context.store.read(rewards),
            resident,
            context.policies.reference(recipe.evaluation.reference) if reference is not None else None,
            policy,
            slot.step,
            recipe.training.micro_batch_tokens,
            recipe.seed,
            algorithm.positions,
            context.progress(slot.name),
        )
        refs = {"evaluations": write(context, "evaluations", key, table, [rollouts, rewards], settings)}
    commit(context, slot, refs, began=began, reused=reused, policy=policy)
    rows: pa.Table = context.store.read(refs["evaluations"], ["metric", "value"])
    return report(context, slot, {row["metric"]: row["value"] for row in rows.to_pylist()}, refs["evaluations"], reused)


def _reference_id(context: RunContext) -> str | None:
    """What margins are measured against: the named model, else where the run began. None where nothing is trained and
    no model is named: against itself a policy has a margin of 0, which would say nothing."""
    if context.recipe.evaluation.reference is not None:
        return context.identity["reference"]
    return context.root_policy.policy_id if context.recipe.steps > 0 else None
