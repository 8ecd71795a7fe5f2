"""`rft prune` and `rft pin`: what the rules let go of, across runs; a dry run unless told to delete."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from data_contracts.checkpoints import checkpoint_damage, checkpoint_folder
from data_contracts.errors import RunBusy
from data_contracts.ledger import Ledger, held_still, is_held
from data_contracts.pins import Pins, pin, read_pins, unpin
from data_contracts.refs import MAIN, PolicyRef, TableRef
from data_contracts.retention import Item, RetainedRun, delete, held, plan, saved_checkpoints
from data_contracts.store import Store
from flows.inspect.deleted import spans
from flows.inspect.lineage import policies_in
from flows.inspect.metrics import metrics_in
from flows.inspect.run import RunView, open_run
from flows.inspect.status import COUNTED, counts_in
from flows.inspect.terminal import print_columns, print_plain
from rft_core.config import RetentionSettings
from rft_core.errors import SettingsError


def prune(
    root: Path, names: list[str], keep_last: int | None = None, keep_every: int | None = None, is_dry: bool = True
) -> dict[str, Any]:
    """What goes and what stays, and why; without names the checkpoints of all runs, with names the runs' tables too.

    `keep_last` and `keep_every` stand in for the runs' own settings. Raises SettingsError for an unknown run,
    DamagedTable when a ledger cannot be read: it is not known what that run names, and nothing is deleted.
    """
    given = {"keep_last": keep_last, "keep_every": keep_every}
    overrides = {name: value for name, value in given.items() if value is not None}
    with_tables = bool(names)
    known = {name: open_run(str(root), name) for name in names} if names else _all_runs(root, {})
    chosen, store = dict(known), Store(str(root))
    rules = {name: _rules(view, overrides) for name, view in chosen.items()}
    with ExitStack() as holds:
        live = {name for name, view in chosen.items() if is_held(view.folder)} if is_dry else _hold_still(chosen, holds)
        saved = {name: _saved(root, view, is_dry) for name, view in chosen.items()}

        def held_now() -> dict[str, str]:
            """What runs hold by their ledgers and pins as they are now."""
            views = _all_runs(root, known).values()
            default = RetentionSettings()  # whose run is not pruned keeps everything
            runs = [_retained(v, rules.get(v.name, default), saved.get(v.name, {}), v.name in live) for v in views]
            return held(store, list(chain(*runs)), set(chosen), with_tables)

        stays = held_now()
        pruned = [_retained(view, rules[name], saved[name], name in live) for name, view in chosen.items()]
        items = plan(root, store, list(chain(*pruned)), stays, with_tables)
        gone = [] if is_dry else delete(root, store, items, held_now, lambda item: _facts(known[item.run], item))
    return _summary(items, gone, is_dry)


def set_pin(root: Path, run: str, step: int | None, is_removed: bool, phase: str | None = None) -> Pins:
    """Pin a run, or a step of its phase or of the newest, or take that pin off; gives the pins of run and phase. Raises
    SettingsError.
    """
    view = open_run(str(root), run).of_phase(phase)
    at = view.phase or MAIN
    if is_removed:
        if not unpin(view.folder, step, at):
            has = ", ".join(view.pins().names()) or "no pin"
            raise SettingsError(f"run {run} must be pinned {f'at step {step}' if step else 'whole'}, it has {has}")
    else:
        if step is not None and not 1 <= step <= view.last_step:
            raise SettingsError(f"--step must be a step from 1 to {view.last_step} of run {run}, got {step}")
        pin(view.folder, step, at)
    return view.pins()


def print_prune(result: dict[str, Any], console: Console) -> None:
    """A line per run, kind and reason, what goes first; then the sum."""
    rows = [
        (run, stage, spans(item["step"] for item in group), len(group), _size(_bytes(group)), what)
        for (what, run, stage), group in _grouped(result["items"])
    ]
    print_columns(console, "prune", ["run", "what", "steps", "number", "size", "goes, or why it stays"], rows)
    going = [item for item in result["items"] if item["goes"]]
    if not going:
        print_plain(console, "nothing to delete")
    elif result["dry_run"]:
        print_plain(console, f"would delete {len(going)}, {_size(_bytes(going))}; nothing is deleted without --yes")
    else:
        print_plain(console, f"deleted {result['deleted']}, {_size(result['freed_bytes'])}")


def _all_runs(root: Path, known: dict[str, RunView]) -> dict[str, RunView]:
    """Every folder that has a ledger, also one whose run.json is gone: what it names stays. `known` is brought up to
    date and added to.
    """
    for view in known.values():
        view.ledger.refresh()
    for folder in sorted(path.parent for path in (root / "runs").glob("*/ledger")):
        if folder.name not in known:
            known[folder.name] = RunView(str(root), folder.name, folder, Store(str(root)), Ledger(folder))
    return known


def _saved(root: Path, view: RunView, is_dry: bool) -> dict[str, dict[int, PolicyRef]]:
    """Checkpoints of each phase that may be relied on: before anything is deleted, their bytes are read."""
    saved = {phase: saved_checkpoints(root, view.ledger, phase) for phase in _phases(view)}
    if is_dry:
        return saved
    return {
        phase: {version: ref for version, ref in refs.items() if not checkpoint_damage(checkpoint_folder(root, ref))}
        for phase, refs in saved.items()
    }


def _phases(view: RunView) -> list[str]:
    """As the ledger has them: a run whose recipe is gone keeps what it names."""
    return sorted({entry.phase for entry in view.ledger.entries()}) or [MAIN]


def _retained(
    view: RunView, rules: RetentionSettings, saved: dict[str, dict[int, PolicyRef]], is_live: bool
) -> list[RetainedRun]:
    """One for each phase."""
    retained = []
    for phase in _phases(view):
        recipe = replace(view, phase=phase).recipe
        ahead = int((recipe.get("rollout") or {}).get("ahead", 0))
        pins = read_pins(view.folder, phase)
        retained.append(RetainedRun(view.name, view.ledger, rules, pins, saved.get(phase, {}), ahead, is_live, phase))
    return retained


def _rules(view: RunView, overrides: dict[str, int]) -> RetentionSettings:
    try:
        return RetentionSettings.model_validate({**(view.recipe.get("retention") or {}), **overrides})
    except ValidationError as error:
        detail = error.errors()[0]
        raise SettingsError(f"retention.{detail['loc'][0]} of run {view.name}: {detail['msg']}") from error


def _hold_still(views: dict[str, RunView], holds: ExitStack) -> set[str]:
    """Keep the runs from going on meanwhile; gives those that are live and left alone."""
    live = set()
    for name, view in views.items():
        try:
            holds.enter_context(held_still(view.folder))
        except RunBusy:
            live.add(name)
        view.ledger.refresh()
    return live


def _facts(view: RunView, item: Item) -> dict[str, Any]:
    """What status, report and lineage would have read from a table."""
    ref = item.what
    if not isinstance(ref, TableRef) or view.store.tombstone(ref.record, ref.key):
        return {}
    facts: dict[str, Any] = {"metrics": metrics_in(replace(view, phase=item.phase), ref)}
    if ref.record == "rollouts":
        facts["policies"] = policies_in(view.store, ref)
    if ref.record in COUNTED:
        facts["counts"] = counts_in(ref.record, view.store.read(ref, [COUNTED[ref.record]]))
    return facts


def _summary(items: list[Item], gone: list[Item], is_dry: bool) -> dict[str, Any]:
    deleted = {item.name for item in gone}
    if not is_dry:
        items = [
            replace(item, stays=item.stays or (None if item.name in deleted else "damaged, or taken up meanwhile"))
            for item in items
        ]
    return {
        "dry_run": is_dry,
        "deleted": len(gone),
        "freed_bytes": sum(item.num_bytes for item in gone),
        "items": [
            {
                "run": item.run,
                "what": item.stage,
                "phase": item.phase,
                "step": item.step,
                "ref": item.name,
                "bytes": item.num_bytes,
                "goes": item.stays is None,
                "rule": item.rule,
                "stays_because": item.stays,
            }
            for item in items
        ],
    }


def _grouped(items: list[dict[str, Any]]) -> list[tuple[tuple[str, str, str], list[dict[str, Any]]]]:
    def place(item: dict[str, Any]) -> tuple[bool, str, str, str]:
        reason = f"goes by {item['rule']}" if item["goes"] else f"stays: {item['stays_because']}"
        what = item["what"] if item["phase"] == MAIN else f"{item['phase']}/{item['what']}"
        return (not item["goes"], item["run"], what, reason)

    groups = groupby(sorted(items, key=lambda item: (*place(item), item["step"])), key=place)
    return [((reason, run, what), list(group)) for (_, run, what, reason), group in groups]


def _bytes(items: Iterable[dict[str, Any]]) -> int:
    return sum(item["bytes"] for item in items)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
