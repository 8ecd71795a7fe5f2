"""The evaluation stage: held-out rollouts and their rewards -> metrics with intervals."""

from __future__ import annotations

import time

import pyarrow as pa
from prefect.client.schemas.objects import State

from data_contracts.refs import PolicyRef, TableRef, content_key
from rft_core.evaluation import evaluate
from tasks.context import opened
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, report, reuse, stage_task, write


@stage_task("evaluation")
def measure_policy(
    run: str, slot: Slot, policy: PolicyRef, rollouts: list[TableRef], rewards: list[TableRef]
) -> State[TableRef]:
    """Accuracy, mean reward and pass@k of a policy, bootstrapped over prompts."""
    context = opened(run)
    began = time.monotonic()
    recipe = context.recipe
    component = recipe.correct_component
    settings = {"evaluation": recipe.evaluation.content(), "correct_component": component, "step": slot.step}
    key = content_key(
        "evaluations",
        inputs=[*rollouts, *rewards],
        settings=settings,
        identity={"policy": policy.policy_id},
        seed=recipe.seed,
        semantics=SEMANTICS["evaluation"],
    )
    refs = reuse(context, slot, {"evaluations": key})
    reused = refs is not None
    if refs is None:
        table = evaluate(
            pa.concat_tables([context.store.read(ref) for ref in rollouts]),
            pa.concat_tables([context.store.read(ref) for ref in rewards]),
            policy,
            slot.step,
            recipe.evaluation,
            component,
            recipe.seed,
        )
        refs = {"evaluations": write(context, "evaluations", key, table, [*rollouts, *rewards], settings)}
    commit(context, slot, refs, began=began, reused=reused, policy=policy)
    rows = context.store.read(refs["evaluations"], ["metric", "value"]).to_pylist()
    return report(context, slot, {row["metric"]: row["value"] for row in rows}, refs["evaluations"], reused)
