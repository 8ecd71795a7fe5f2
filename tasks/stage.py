"""The five moves of every task: reuse, read, call, write, report. Here are the first, the fourth and the fifth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from prefect import Task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.states import Completed
from prefect.tasks import exponential_backoff, task

from data_contracts.errors import (
    ContractError,
    DamagedTable,
    DeletedTable,
    FatalError,
    StorageUnavailable,
    TransientError,
)
from data_contracts.ledger import Entry
from data_contracts.refs import MAIN, PolicyRef, TableRef
from data_contracts.retention import committing, is_done
from data_contracts.validation import check_table, refuse_failed, validate
from tasks.context import RunContext, opened
from tasks.progress import Summary, describe

RETRY_JITTER = 0.5


@dataclass(frozen=True)
class Slot:
    """A place in the ledger. The flow leaves the phase out: `run_stage` puts in the one that the run is at.

    >>> Slot(12, "rollouts").name, Slot(12, "rollouts", 1, "warm-up").name
    ('rollouts-00012', 'warm-up/rollouts-00012-1')
    """

    step: int
    stage: str
    round: int = 0
    phase: str = MAIN

    @property
    def name(self) -> str:
        prefix = "" if self.phase == MAIN else f"{self.phase}/"
        suffix = f"-{self.round}" if self.round else ""
        return f"{prefix}{self.stage}-{self.step:05d}{suffix}"


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a retry can help is the exception's type."""
    return isinstance(state.result(raise_on_failure=False), TransientError)


def stage_task(stage: str) -> Callable[[Callable[..., Any]], Task[..., Any]]:
    """A Prefect task with our rules: no Prefect caching (the store is the cache), no stored results."""
    return task(name=stage, cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_transient)


def run_stage(context: RunContext, stage: Task[..., Any], slot: Slot, *arguments: Any) -> Any:
    """Call a stage task under its run name, which carries its step; gives what the task committed.

    No tags: Prefect asks for concurrency slots by tag before each task, over a connection that the server closed
    while the last stage worked, and waits two seconds to try again.
    """
    settings = context.recipe.execution
    slot = replace(slot, phase=context.phase)
    if _is_past(context, slot):
        stage = pass_by
    named = stage.with_options(
        task_run_name=slot.name,
        retries=settings.retries,
        retry_delay_seconds=exponential_backoff(backoff_factor=settings.retry_delay_seconds),
        retry_jitter_factor=RETRY_JITTER,
    )
    context.watcher.started(slot.name)
    return named(context.name, slot, *arguments, return_state=True).result()


def reuse(context: RunContext, slot: Slot, keys: dict[str, str]) -> dict[str, TableRef] | None:
    """The slot's tables if they are committed: by the ledger of this run, or under the same keys by any run.

    A damaged table is set aside and made again, a deleted one is made again in its place; one that is another run's
    work cannot be, and raises DamagedTable or DeletedTable.
    """
    context.began = time.monotonic()
    entry = context.ledger.get(context.phase, slot.step, slot.stage, slot.round)
    if entry is not None:
        try:
            for ref in entry.refs.values():
                context.store.check(ref)
        except DamagedTable as damage:
            if entry.pinned_from:
                raise
            _set_aside(context, entry.refs, damage)
        except DeletedTable:
            if entry.pinned_from:
                raise
        else:
            return entry.refs
    found: dict[str, TableRef] = {}
    for record, key in keys.items():
        try:
            ref = context.store.find(record, key)
        except DamagedTable as damage:
            context.watcher.noted(f"made again: {damage}")
            context.store.set_aside(record, key)
            return None
        if ref is None:
            tombstone = context.store.tombstone(record, key)
            if tombstone is not None:
                context.watcher.noted(f"made again: {tombstone.sentence(f'{record}/{key[:12]}')}")
            return None
        found[record] = ref
    return found


def _set_aside(context: RunContext, refs: dict[str, TableRef], damage: DamagedTable) -> None:
    context.watcher.noted(f"made again: {damage}")
    for ref in refs.values():
        try:
            context.store.check(ref)
        except DamagedTable:
            context.store.set_aside(ref.record, ref.key)


def write(
    context: RunContext,
    record: str,
    key: str,
    table: pa.Table,
    inputs: list[TableRef],
    settings: dict[str, Any],
    **more: Any,
) -> TableRef:
    """Check a table against its contract and commit it."""
    check_table(table, record)
    provenance = {**context.source_provenance(inputs, settings), **first_validation(context, record, table), **more}
    return context.store.write(record, key, table, provenance, context.began)


def first_validation(context: RunContext, record: str, table: pa.Table) -> dict[str, Any]:
    """The whole suite on the first table of a record in a run; later tables get the vectorised checks alone."""
    if record in context.validated or any(record in entry.refs for entry in context.ledger.entries()):
        return {}
    context.validated.add(record)
    validation = validate(table, record)
    refuse_failed(validation)
    return {"validation": validation.to_json()}


def commit(
    context: RunContext,
    slot: Slot,
    refs: dict[str, TableRef],
    *,
    began: float,
    reused: bool = False,
    policy: PolicyRef | None = None,
    notes: dict[str, Any] | None = None,
) -> Entry:
    """Append the slot's tables to the run's ledger."""
    entry = Entry(
        context.phase,
        slot.step,
        slot.stage,
        slot.round,
        refs,
        policy=policy,
        seconds=round(time.monotonic() - began, 3),
        reused=reused,
        notes=notes or {},
    )
    with committing(context.root):
        if context.ledger.get(context.phase, slot.step, slot.stage, slot.round) is None:
            _refuse_deleted(context, refs)
        return context.ledger.commit(entry)


def _refuse_deleted(context: RunContext, refs: dict[str, TableRef]) -> None:
    """Until the ledger names a table, a pruning of another run that names it may have deleted it."""
    for ref in refs.values():
        tombstone = context.store.tombstone(ref.record, ref.key)
        if tombstone is not None:
            raise StorageUnavailable(f"{tombstone.sentence(ref.name)} while it was taken up; trying again makes it")


@stage_task("past")
def pass_by(run: str, slot: Slot, *_: Any) -> State[TableRef]:
    """Stands in for a stage whose table retention deleted and nothing of this run reads any more."""
    context = opened(run)
    entry = context.ledger.get(context.phase, slot.step, slot.stage, slot.round)
    if entry is None:
        raise FatalError(f"run {run} must have committed {slot.name} before its table was deleted")
    (ref,) = entry.refs.values()
    return report(context, slot, {"deleted": "yes"}, ref, reused=True)


def _is_past(context: RunContext, slot: Slot) -> bool:
    """Whether the slot's table was deleted, and what it was for is done."""
    entry = context.ledger.get(context.phase, slot.step, slot.stage, slot.round)
    if entry is None or not is_done(context.ledger, entry) or (context.should_remake and not entry.pinned_from):
        return False
    try:
        return any(context.store.tombstone(ref.record, ref.key) for ref in entry.refs.values())
    except (ContractError, DamagedTable):  # the stage itself deals with it
        return False


def report(context: RunContext, slot: Slot, summary: Summary, result: Any, reused: bool) -> State[Any]:
    """Tell the watcher and the UI, and end the task: Cached when nothing had to be done."""
    context.watcher.finished(slot.name, {**summary, **({"reused": "yes"} if reused else {})})
    if TaskRunContext.get() is not None and not reused:
        rows = [{"what": name, "value": value} for name, value in summary.items()]
        create_table_artifact(rows, key=artifact_key(context.name, slot.stage, context.phase), description=slot.name)
    return Completed(name="Cached" if reused else "Completed", message=describe(summary), data=result)


def artifact_key(run: str, what: str, phase: str = MAIN) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    name = "-".join([run, *([] if phase == MAIN else [phase]), what])
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def only(refs: dict[str, TableRef], record: str) -> TableRef:
    """The table of a record among a stage's tables."""
    if record not in refs:
        raise FatalError(f"the stage must have made {record}, found {sorted(refs)}")
    return refs[record]
