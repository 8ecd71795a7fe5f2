"""Which data stays, by rule, and the deletion of the rest.

A run keeps its newest `keep_last` checkpoints, those of every `keep_every`-th step, those of pinned steps, and the
tables of the same steps. Beside them stays what a replay to its newest policy or to a pinned one reads, what the run
needs to go on, and everything that a pinned run, a live one or one that is not pruned names in its ledger. Metrics and
sources (updates, evaluations, the data set) are small and stay always. Manifests are never deleted.

`retention.lock` below the root keeps a deletion and the commit of something that names the deleted data apart.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from data_contracts.checkpoints import (
    checkpoint_folder,
    checkpoint_manifest,
    delete_checkpoint,
    is_complete,
    is_half_deleted,
    num_bytes,
)
from data_contracts.errors import ContractError, DamagedTable
from data_contracts.ledger import Entry, Ledger
from data_contracts.pins import Pins
from data_contracts.refs import MAIN, PolicyRef, TableRef
from data_contracts.store import Store
from data_contracts.tombstones import Tombstone

CHECKPOINT = "checkpoint"
# Stages whose tables a rule may delete, and the last stage of the step that reads them. What an entry of another stage
# names stays always.
LAST_READER = {
    "prompts": "rewards",
    "rollouts": "update",
    "rewards": "advantages",
    "token-scores": "advantages",
    "advantages": "update",
    "evaluation-rollouts": "evaluation",
    "evaluation-rewards": "evaluation",
}
PRUNED_STAGES = tuple(LAST_READER)
INTERRUPTED = "an interrupted pruning"  # the rule of what a crash left behind a tombstone
AT_ONCE = 64  # so many deletions under one lock: a run that commits waits for as many


class Rules(Protocol):
    """The retention settings of a run."""

    @property
    def keep_last(self) -> int: ...
    @property
    def keep_every(self) -> int | None: ...


@dataclass(frozen=True)
class RetainedRun:
    """What retention has to know of a phase of a run. `saved` are its checkpoints that a replay can begin from, by
    version; `ahead`: its rollouts come from policies so many versions back. The rules keep the newest policy of each
    phase, on which later ones stand.
    """

    name: str
    ledger: Ledger
    rules: Rules
    pins: Pins
    saved: dict[int, PolicyRef]
    ahead: int = 0
    is_live: bool = False
    phase: str = MAIN

    @property
    def newest(self) -> int:
        return max((entry.step for entry in self.entries("update")), default=0)

    def entries(self, stage: str | None = None) -> list[Entry]:
        return self.ledger.entries(stage, self.phase)


@dataclass(frozen=True)
class Kept:
    """Why things of a run stay, by version or step: checkpoints, all tables of a step, what a replay of it reads."""

    checkpoints: dict[int, str]
    steps: dict[int, str]
    replayed: dict[int, str]


@dataclass(frozen=True)
class Item:
    """A table or checkpoint that is there. `stays` says why; None: it goes, by `rule`. `made_by` can make it again."""

    what: TableRef | PolicyRef
    run: str
    stage: str
    step: int
    num_bytes: int
    rule: str
    made_by: str
    stays: str | None = None
    phase: str = MAIN

    @property
    def name(self) -> str:
        return self.what.name if isinstance(self.what, TableRef) else _name_of(self.what)


def rule_text(rules: Rules) -> str:
    every = f", keep_every {rules.keep_every}" if rules.keep_every else ""
    return f"keep_last {rules.keep_last}{every}"


def kept_by_rule(newest: int, saved: list[int], rules: Rules, pins: Pins, ahead: int = 0) -> Kept:
    """What rules and pins keep of a run whose newest policy has that version and whose complete checkpoints are
    `saved`. A kept policy without a checkpoint keeps the nearest earlier one, and what lies between.
    """
    saved = sorted(saved)
    checkpoints = dict.fromkeys(saved[-rules.keep_last :], f"keep_last {rules.keep_last}")
    if rules.keep_every:
        for version in saved:
            if version % rules.keep_every == 0:
                checkpoints.setdefault(version, f"keep_every {rules.keep_every}")
    pinned = {step: f"step {step} is pinned" for step in sorted(pins.steps) if step <= newest}
    wanted = {newest: "the newest policy", **pinned}
    steps = {0: "the start of the run", **checkpoints, **wanted}
    for version in range(max(0, newest - ahead), newest):
        wanted.setdefault(version, "rollouts ahead come from it")
    replayed: dict[int, str] = {}
    for version, why in wanted.items():
        start = max((other for other in saved if other <= version), default=0)
        for step in range(start + 1, version + 1):
            replayed.setdefault(step, f"policy {version} is replayed through it")
        if start:
            checkpoints.setdefault(start, why if start == version else f"policy {version} is replayed from it")
    return Kept(checkpoints, steps, replayed)


def saved_checkpoints(root: Path, ledger: Ledger, phase: str = MAIN) -> dict[int, PolicyRef]:
    """Version -> policy of the phase's complete checkpoints."""
    policies = [entry.policy for entry in ledger.entries(CHECKPOINT, phase) if entry.policy is not None]
    return {policy.version: policy for policy in policies if is_complete(checkpoint_folder(root, policy))}


def held(store: Store, runs: list[RetainedRun], pruned: set[str], with_tables: bool) -> dict[str, str]:
    """Name of every table and checkpoint that some run wants to stay, and why; what goes is in none.

    `runs` are all runs below the root: what those that are not pruned name stays.
    """
    stays: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: run.name not in pruned):  # a run's own reasons come first
        for name, why in _held_by(store, run, run.name in pruned, with_tables):
            stays.setdefault(name, why)
    return stays


def plan(root: Path, store: Store, runs: list[RetainedRun], stays: dict[str, str], with_tables: bool) -> list[Item]:
    """Every checkpoint and, `with_tables`, every table that these runs name and that is there; `stays` is what `held`
    gives.
    """
    found: dict[str, Item] = {}
    for run in runs:
        for item in [*_checkpoints(root, run), *(_tables(store, run) if with_tables else ())]:
            found.setdefault(item.name, item)
    return [
        item if item.stays or item.rule == INTERRUPTED else replace(item, stays=stays.get(item.name))
        for item in found.values()
    ]


def delete(
    root: Path,
    store: Store,
    items: list[Item],
    held_now: Callable[[], dict[str, str]],
    facts_of: Callable[[Item], dict[str, Any]],
) -> list[Item]:
    """Delete the items that go, unless by now a run holds them; gives those. `facts_of` is kept in their tombstones.

    A table that is found damaged is left as it is.
    """
    gone = []
    waiting = iter([item for item in items if item.stays is None])
    while chunk := list(islice(waiting, AT_ONCE)):
        described = []
        for item in chunk:
            try:
                described.append((item, Tombstone(rule=item.rule, run=item.made_by, facts=facts_of(item))))
            except DamagedTable:
                continue
        with deleting(root):
            stays = held_now()
            for item, tombstone in described:
                if item.rule == INTERRUPTED or item.name not in stays:
                    _delete(root, store, item, tombstone)
                    gone.append(item)
    return gone


def _delete(root: Path, store: Store, item: Item, tombstone: Tombstone) -> None:
    if isinstance(item.what, TableRef):
        store.delete(item.what, tombstone)
    else:
        delete_checkpoint(checkpoint_folder(root, item.what), tombstone)


@contextmanager
def deleting(root: Path) -> Iterator[None]:
    """Nothing is committed meanwhile."""
    with _locked(root, fcntl.LOCK_EX):
        yield


@contextmanager
def committing(root: Path) -> Iterator[None]:
    """Nothing is deleted meanwhile."""
    with _locked(root, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(root: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(root / "retention.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _held_by(store: Store, run: RetainedRun, is_pruned: bool, with_tables: bool) -> Iterator[tuple[str, str]]:
    """What the run wants to stay, and why."""
    if run.is_live or run.pins.is_whole_run or not is_pruned:
        state = "is live" if run.is_live else "is pinned" if run.pins.is_whole_run else "names it"
        for entry in run.entries():
            for name in _names_in(entry):
                yield name, f"run {run.name} {state}"
        return
    kept = kept_by_rule(run.newest, list(run.saved), run.rules, run.pins, run.ahead)
    for version, why in kept.checkpoints.items():
        yield _name_of(run.saved[version]), why
    for entry in run.entries() if with_tables else ():
        why_kept = _why_kept(run, kept, entry)
        if why_kept:
            for ref in entry.refs.values():
                yield ref.name, why_kept
        if entry.stage == "update" and entry.step in kept.replayed:
            for ref in replay_inputs(store, entry):
                yield ref.name, kept.replayed[entry.step]


def _why_kept(run: RetainedRun, kept: Kept, entry: Entry) -> str | None:
    """Why the tables of an entry stay, but for replays; None when a rule may delete them."""
    if entry.stage not in PRUNED_STAGES:
        return "metrics and sources stay"
    if entry.step in kept.steps:
        return kept.steps[entry.step]
    is_past = entry.step <= run.newest and is_done(run.ledger, entry)
    return None if is_past else "the run needs it to go on"


def is_done(ledger: Ledger, entry: Entry) -> bool:
    """Whether all that is made of a step's table is committed: the run itself reads it no more, but for a replay."""
    reader = LAST_READER.get(entry.stage)
    return reader is not None and ledger.get(entry.phase, entry.step, reader) is not None


def replay_inputs(store: Store, update: Entry) -> list[TableRef]:
    """The tables that a replay of an update reads."""
    provenance = store.manifest(update.refs["updates"])["provenance"]
    return [TableRef.from_json(ref) for ref in provenance["inputs"]]


def _checkpoints(root: Path, run: RetainedRun) -> Iterator[Item]:
    for entry in run.entries(CHECKPOINT):
        if entry.policy is None:
            continue
        folder = checkpoint_folder(root, entry.policy)
        item = _item(run, entry, entry.policy, num_bytes(folder))
        if is_half_deleted(folder):
            yield replace(item, rule=INTERRUPTED)
        elif entry.policy in run.saved.values():
            yield item
        elif (manifest := checkpoint_manifest(folder)) is not None and not manifest["deleted"]:
            yield replace(item, stays="damaged: its files are not those of its manifest")


def _tables(store: Store, run: RetainedRun) -> Iterator[Item]:
    for entry in run.entries():
        for ref in entry.refs.values():
            try:
                tombstone = store.tombstone(ref.record, ref.key)
                item = _item(run, entry, ref, store.num_bytes(ref))
            except (ContractError, DamagedTable) as damage:
                yield replace(_item(run, entry, ref, 0), stays=str(damage))
                continue
            if tombstone is None:
                yield item
            elif not tombstone.is_swept:
                yield replace(item, rule=INTERRUPTED)


def _item(run: RetainedRun, entry: Entry, what: TableRef | PolicyRef, size: int) -> Item:
    made_by = entry.pinned_from or run.name
    return Item(what, run.name, entry.stage, entry.step, size, rule_text(run.rules), made_by, phase=run.phase)


def _names_in(entry: Entry) -> Iterator[str]:
    for ref in entry.refs.values():
        yield ref.name
    if entry.policy is not None:
        yield _name_of(entry.policy)


def _name_of(policy: PolicyRef) -> str:
    return f"{CHECKPOINT}/{policy.policy_id}"
