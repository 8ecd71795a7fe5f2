"""Pruning of a run's own checkpoints while it trains. It costs the same however many runs and steps there are."""

from __future__ import annotations

from pathlib import Path

from data_contracts.checkpoints import (
    checkpoint_folder,
    checkpoint_manifest,
    delete_checkpoint,
    is_complete,
    is_half_deleted,
)
from data_contracts.errors import DamagedTable
from data_contracts.ledger import Entry, read_entry
from data_contracts.pins import read_pins
from data_contracts.retention import deleting, kept_by_rule, rule_text
from data_contracts.tombstones import Tombstone
from tasks.context import RunContext


def prune_checkpoints(context: RunContext) -> list[Path]:
    """Delete this run's checkpoints that no rule and no pin keeps and no other run names; gives their folders."""
    pins = read_pins(context.folder, context.phase)
    if pins.is_whole_run:
        return []
    settings = context.recipe.retention
    pruned = []
    with deleting(context.root):
        present = _present(context)
        saved = [version for version, (_, is_whole) in present.items() if is_whole]
        newest = max(entry.step for entry in context.ledger.entries("update", context.phase))
        kept = kept_by_rule(newest, saved, settings, pins, context.recipe.rollout.ahead)
        for version, (entry, is_whole) in present.items():
            if version in kept.checkpoints or (is_whole and _is_named_elsewhere(context, entry)):
                continue
            folder = checkpoint_folder(context.root, entry.policy)
            delete_checkpoint(folder, Tombstone(rule=rule_text(settings), run=context.name))
            context.pruned.add(entry.policy.policy_id)
            pruned.append(folder)
    return pruned


def is_kept_for_good(context: RunContext, step: int) -> bool:
    """Whether a checkpoint of the step would stay however many follow it."""
    pins, every = read_pins(context.folder, context.phase), context.recipe.retention.keep_every
    return pins.is_whole_run or step in pins.steps or (every is not None and step % every == 0)


def _present(context: RunContext) -> dict[int, tuple[Entry, bool]]:
    """Version -> checkpoint entry, and whether the data is whole or what a crash left of a deletion. What was found
    deleted is not looked at again.
    """
    found = {}
    for entry in context.ledger.entries("checkpoint", context.phase):
        if entry.policy is None or entry.policy.policy_id in context.pruned:
            continue
        folder = checkpoint_folder(context.root, entry.policy)
        if is_complete(folder) or is_half_deleted(folder):
            found[entry.policy.version] = (entry, is_complete(folder))
        elif (checkpoint_manifest(folder) or {}).get("deleted"):
            context.pruned.add(entry.policy.policy_id)
    return found


def _is_named_elsewhere(context: RunContext, checkpoint: Entry) -> bool:
    """Whether another run has made or taken over the policy: then its ledger says so at the same step, in a file whose
    name is known, so that no ledger has to be read.
    """
    for folder in (context.root / "runs").iterdir():
        if folder.name == context.name:
            continue
        try:
            update = read_entry(folder, checkpoint.phase, checkpoint.step, "update")
        except DamagedTable as damage:  # what it names is not known
            context.watcher.noted(f"checkpoint {checkpoint.step} is not deleted: {damage}")
            return True
        if update is not None and update.policy == checkpoint.policy:
            return True
    return False
