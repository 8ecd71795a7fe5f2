"""The update stage: advantages -> the next policy, its metrics, and a checkpoint when one is due."""

from __future__ import annotations

import time
from typing import Any

from prefect.client.schemas.objects import State

from data_contracts.checkpoints import checkpoint_folder, is_complete
from data_contracts.refs import PolicyRef, TableRef
from tasks.context import RunContext, opened
from tasks.policy import inexact, run_update, update_settings, updated_policy_id
from tasks.progress import Summary
from tasks.retention import is_kept_for_good, prune_checkpoints
from tasks.rounds import read_all
from tasks.stage import Slot, commit, report, reuse, stage_task, write


@stage_task("update")
def update_policy(run: str, slot: Slot, rollouts: list[TableRef], advantages: TableRef) -> State[PolicyRef]:
    """One policy update. The resident policy is dirty while it runs."""
    context = opened(run)
    began = time.monotonic()
    before = context.policy(slot.step - 1)
    settings = update_settings(context)
    key = updated_policy_id(before, [*rollouts, advantages], settings)
    refs = reuse(context, slot, {"updates": key})
    reused = refs is not None
    if refs is None:
        for engine in context.workplace.kept:
            engine.rest()
        state = context.policies.materialise(before)
        is_exact = context.policies.is_exact
        trained = before if is_exact else inexact(before)
        context.policies.begin_update()
        paths = context.recipe.algorithm.paths()
        tables = read_all(context, rollouts), context.store.read(advantages)
        teacher_path = context.recipe.teacher.path if "teacher" in settings else None
        table = run_update(context, state, *tables, trained, settings, slot.name, paths, teacher_path)
        parent: dict[str, Any] = {"parent_policy": before.policy_id, "parent_is_exact": is_exact}
        if paths:
            parent["algorithm_paths"] = paths  # for a replay: what is read there is held against the settings
        if teacher_path:
            parent["teacher_path"] = teacher_path
        ref = write(context, "updates", key, table, [*rollouts, advantages], settings, **parent)
        refs = {"updates": ref}
    made = PolicyRef(refs["updates"].key, slot.step)
    commit(context, slot, refs, began=began, reused=reused, policy=made)
    if not reused:
        context.policies.end_update(made)
    keep_checkpoint(context, slot.step, made)
    return report(context, slot, _summary(context, refs["updates"]), made, reused)


def keep_checkpoint(context: RunContext, step: int, policy: PolicyRef) -> None:
    """Save the policy when its step is due; a checkpoint that a crash prevented is made up for, a deleted one of the
    past is not, for what it is replayed from may be deleted too.
    """
    is_last = step == context.recipe.steps
    if not is_last and step % (context.recipe.training.checkpoint_every or 1):
        return
    is_known = context.ledger.get(context.phase, step, "checkpoint") is not None
    if is_known and is_complete(checkpoint_folder(context.root, policy)):
        return
    is_past = is_known or context.ledger.get(context.phase, step + 1, "update") is not None
    is_wanted = context.should_remake and is_kept_for_good(context, step)
    if is_past and not is_last and not is_wanted:
        return
    began = time.monotonic()
    folder = context.policies.save(policy)
    commit(context, Slot(step, "checkpoint"), {}, began=began, policy=policy)
    context.watcher.noted(f"checkpoint of policy {step}: {folder}")
    prune_checkpoints(context)


def _summary(context: RunContext, ref: TableRef) -> Summary:
    table = context.store.read(ref)
    rows = table.to_pylist()
    # Filtering may leave fewer groups than optimizer steps: what the last one did that had any.
    last = next((row for row in reversed(rows) if row["skipped"] is None), rows[-1])
    summary: Summary = {
        "loss": last["loss"],
        "grad norm": last["grad_norm"],
        "entropy": last["entropy"],
        "tokens": last["trained_tokens"],
    }
    if last["kl"] is not None:
        summary["kl"] = last["kl"]
    if last["value_loss"] is not None:
        summary["value loss"] = last["value_loss"]
    if last["effective_sample_size"] is not None:
        summary["effective sample size"] = last["effective_sample_size"]
    if last["skipped"] is not None:
        summary["skipped"] = last["skipped"]
    return summary
