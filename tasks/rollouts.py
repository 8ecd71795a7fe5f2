"""The rollout stage: prompts -> rollouts, generated and committed block by block."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.ledger import BASELINE, EXPERTS
from data_contracts.refs import PolicyRef, TableRef, content_key
from data_contracts.store import Store
from data_contracts.validation import check_table
from rft_core.engines import COMPUTES_APART, Sampling
from rft_core.environments import RolloutPlan, plan_blocks, roll_out
from rft_core.errors import RolloutsFailed
from tasks.context import RunContext, opened
from tasks.progress import Summary
from tasks.scoring import BlockScorer
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, first_validation, report, reuse, stage_task

# What to do when all rollouts failed, by their reason.
MENDS = {
    "non_finite_logits": "The weights are not finite any more: lower training.learning_rate, or go on from an earlier "
    "step with `rft rerun RUN --from rollouts --at N`",
    "context_exceeded": "Prompt and rollout.max_completion_tokens must fit the model's context: lower the latter",
}


@stage_task("rollouts")
def generate_rollouts(run: str, slot: Slot, prompts: TableRef, policy: PolicyRef) -> State[TableRef]:
    """Completions for one step's prompts, or for the held-out prompts when the slot is an evaluation's."""
    context = opened(run)
    began = time.monotonic()
    plan = training_plan(context, slot, policy) if slot.stage == "rollouts" else evaluation_plan(context, slot, policy)
    settings = _settings(context, plan)
    key = content_key(
        "rollouts",
        inputs=[prompts],
        settings=settings,
        identity={"policy": policy.policy_id},
        seed=context.recipe.seed,
        semantics=SEMANTICS["rollouts"],
    )
    refs = reuse(context, slot, {"rollouts": key})
    reused = refs is not None
    if refs is None:
        refs = {"rollouts": _generate(context, slot, prompts, plan, key, settings)}
    _refuse_all_failed(context, refs["rollouts"])
    commit(context, slot, refs, began=began, reused=reused)
    return report(context, slot, _summary(context, refs["rollouts"]), refs["rollouts"], reused)


def training_plan(context: RunContext, slot: Slot, policy: PolicyRef) -> RolloutPlan:
    """Round BASELINE is one greedy completion per prompt, every other one that is not of experts samples groups."""
    rollout = context.recipe.rollout
    is_baseline = slot.round == BASELINE
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_completion_tokens)
    greedy = Sampling(0.0, 1.0, 0, rollout.max_completion_tokens)
    return RolloutPlan(
        step=slot.step,
        round=slot.round,
        purpose="baseline" if is_baseline else "train",
        group_size=1 if is_baseline else rollout.group_size,
        sampling=greedy if is_baseline else sampling,
        run_seed=context.recipe.seed,
        policy=policy,
        id_prefix=f"{context.prefix}step-{slot.step:05d}"
        + {BASELINE: "-greedy", EXPERTS: "-expert"}.get(slot.round, ""),
        engine=engine_apart(context),
    )


SAMPLED, GREEDY = 0, 1  # rounds of an evaluation


def evaluation_plan(context: RunContext, slot: Slot, policy: PolicyRef) -> RolloutPlan:
    """Round 0 samples, round 1 is greedy; seeds do not depend on the step, so before and after compare."""
    recipe = context.recipe
    is_greedy = slot.round == GREEDY
    sampling = Sampling(
        0.0 if is_greedy else recipe.evaluation.temperature, 1.0, 0, recipe.rollout.max_completion_tokens
    )
    return RolloutPlan(
        step=slot.step,
        round=slot.round,
        purpose="evaluation",
        group_size=1 if is_greedy else recipe.evaluation.samples,
        sampling=sampling,
        run_seed=recipe.seed,
        policy=policy,
        id_prefix=f"{context.prefix}eval-{slot.step:05d}-{slot.round}",
        engine=engine_apart(context),
    )


def engine_apart(context: RunContext) -> str | None:
    """The engine, where it computes the policy by other code than the trainer."""
    engine = context.recipe.rollout.engine
    return engine if engine in COMPUTES_APART else None


def _settings(context: RunContext, plan: RolloutPlan) -> dict[str, Any]:
    rollout = context.recipe.rollout
    return {
        "engine": rollout.engine,
        **({"vllm": rollout.vllm.content()} if rollout.engine == "vllm" else {}),
        "block_groups": groups_per_block(context, plan),
        "batch_tokens": rollout.batch_tokens,
        "script": context.identity.get("script"),
        "step": plan.step,
        "round": plan.round,
        "purpose": plan.purpose,
        "group_size": plan.group_size,
        "sampling": asdict(plan.sampling),
        "prompts": context.recipe.evaluation.prompts if plan.purpose == "evaluation" else None,
        "model": context.recipe.model.content(),
    }


def groups_per_block(context: RunContext, plan: RolloutPlan) -> int:
    """A block holds as many rollouts in an evaluation as in training, where its groups are larger."""
    rollout = context.recipe.rollout
    return max(1, rollout.block_groups * rollout.group_size // plan.group_size)


def _generate(
    context: RunContext, slot: Slot, prompts: TableRef, plan: RolloutPlan, key: str, settings: dict[str, Any]
) -> TableRef:
    """Commit the blocks that are not there yet. A crash loses at most the one in flight."""
    if plan.purpose == "evaluation":
        table = heldout_prompts(context.store, prompts, context.recipe.evaluation.prompts)
    else:
        table = context.store.read(prompts)
    provenance = context.source_provenance([prompts], settings)
    writer = context.store.writer("rollouts", key, provenance)
    groups = groups_per_block(context, plan)
    blocks = plan_blocks(table, groups)
    missing = [index for index in range(len(blocks)) if index not in writer.committed]
    if missing:
        engine = context.engine(plan.policy)
        for kept in context.workplace.kept:
            provenance |= {"engine": kept.provenance}
        scorer = BlockScorer(context.store, context.grader, prompts)
        for index in missing:
            done = index * groups * plan.group_size
            total = table.num_rows * plan.group_size

            def advance(rows: int, _: int, note: str, done: int = done, total: int = total) -> None:
                context.watcher.advanced(slot.name, done + rows, total, note)

            block = roll_out(engine, blocks[index], plan, context.tokenizer, advance)
            check_table(block, "rollouts")
            provenance |= first_validation(context, "rollouts", block)
            tokens = pc.sum(pc.list_value_length(block["completion_token_ids"])).as_py() or 0
            context.count_generated(slot.name, index, block.num_rows, tokens)
            writer.commit(index, block)
            if context.beside is not None:
                context.beside.hand_over(key, index, partial(scorer.score, block))
            context.watcher.advanced(slot.name, done + block.num_rows, total, f"block {index + 1} of {len(blocks)}")
        for note in getattr(engine, "notes", ()):
            context.watcher.noted(note)
    return writer.close()


def heldout_prompts(store: Store, dataset: TableRef, limit: int | None) -> pa.Table:
    """The first held-out prompts in the order of the data set, of which no other row is read."""
    splits = store.read(dataset, ["split"])["split"]
    return store.take(dataset, pc.indices_nonzero(pc.equal(splits, "heldout")).to_numpy()[:limit])


def _refuse_all_failed(context: RunContext, ref: TableRef) -> None:
    """One failed rollout is data; when all fail, every later step would be for nothing."""
    reasons = Counter(context.store.read(ref, ["error_reason"])["error_reason"].to_pylist())
    if not reasons or None in reasons:
        return
    mends = "; ".join(MENDS[reason] for reason in reasons if reason in MENDS)
    raise RolloutsFailed(
        f"some of {ref.rows} rollouts must succeed, found that all failed: "
        + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        + (f". {mends}" if mends else "")
        + f"\nAll rows: {context.store.locate(ref)}"
    )


def _summary(context: RunContext, ref: TableRef) -> Summary:
    rollouts = context.store.read(ref, ["completion_token_ids", "finish_reason", "status"])
    lengths = pc.list_value_length(rollouts["completion_token_ids"])
    cut = pc.sum(pc.equal(rollouts["finish_reason"], "length")).as_py() or 0
    errors = pc.sum(pc.equal(rollouts["status"], "error")).as_py() or 0
    summary: Summary = {
        "rollouts": rollouts.num_rows,
        "tokens": pc.sum(lengths).as_py() or 0,
        "truncated": cut,
    }
    return {**summary, "errors": errors} if errors else summary
