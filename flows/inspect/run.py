"""A run opened for reading: its folder, its ledger, and its tables put together across steps."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_contracts.checkpoints import checkpoint_folder, checkpoint_manifest
from data_contracts.errors import DamagedTable, DeletedTable
from data_contracts.files import read_json
from data_contracts.ledger import Entry, Ledger, is_held
from data_contracts.pins import Pins, read_pins
from data_contracts.refs import MAIN, PolicyRef, TableRef
from data_contracts.schemas import RECORDS
from data_contracts.store import Store
from data_contracts.tombstones import Tombstone
from rft_core.errors import SettingsError
from rft_core.yaml_text import parse_yaml

AT_STEP = "at_step"  # the ledger's step, added to tables that are put together across steps


@dataclass(frozen=True)
class Checkpoint:
    """A saved policy. `is_there` is False when its data is damaged, or deleted as `tombstone` says."""

    step: int
    policy: PolicyRef
    folder: Path
    weights_digest: str
    is_there: bool
    tombstone: Tombstone | None = None


@dataclass(frozen=True)
class RunView:
    """One run, or one `phase` of it, for readers. Everything is read when asked for; nothing is written."""

    root: str
    name: str
    folder: Path
    store: Store
    ledger: Ledger
    phase: str | None = None

    @cached_property
    def head(self) -> dict[str, Any]:
        """run.json: what is known from the start (digests, fingerprint, parent); {} when there is none yet."""
        return _read_json(self.folder / "run.json")

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, or that of the phase, as plain values; it need not be valid for this release."""
        whole = parse_yaml(self.recipe_text, str(self.folder / "recipe.yaml")) or {}
        own = next((phase for phase in whole.get("phases") or [] if phase["name"] == self.phase), None)
        return {**whole, **own, "phases": []} if own else whole

    @cached_property
    def phases(self) -> list[str]:
        """Names of the run's phases, in order; `main` alone where its recipe has none."""
        return [phase["name"] for phase in self.recipe.get("phases") or []] or [self.phase or MAIN]

    def entries(self, stage: str | None = None) -> list[Entry]:
        """The ledger's, ordered by phase, step, stage and round."""
        wanted = [self.phase] if self.phase else self.phases
        return [entry for phase in wanted for entry in self.ledger.entries(stage, phase)]

    def of_phase(self, phase: str | None = None) -> RunView:
        """The run at one phase; without a name the newest that began. Raises SettingsError for an unknown one."""
        if phase is None:
            phase = next((name for name in reversed(self.phases) if self.ledger.entries(phase=name)), self.phases[0])
        if phase not in self.phases:
            raise SettingsError(f"--phase must be one of run {self.name}, got {phase!r}: {near(phase, self.phases)}")
        return replace(self, phase=phase)

    def by_phase(self) -> list[RunView]:
        """The run at each phase that began; at its first where none did."""
        begun = [self.of_phase(name) for name in self.phases if self.ledger.entries(phase=name)]
        return begun or [self.of_phase(self.phases[0])]

    @cached_property
    def recipe_text(self) -> str:
        try:
            return (self.folder / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def steps(self) -> int:
        return int(self.recipe.get("steps", 0))

    @property
    def last_step(self) -> int:
        """The last step whose update is committed; 0 before the first. Of a whole run, steps of all its phases."""
        return len({(entry.phase, entry.step) for entry in self.entries("update")})

    @property
    def state(self) -> str:
        """running | completed | failed | interrupted | crashed; crashed when its process went without a word."""
        recorded = _read_json(self.folder / "state.json").get("state", "running")
        if is_held(self.folder):
            return "running"
        return "crashed" if recorded not in {"completed", "failed", "interrupted"} else recorded

    @property
    def error(self) -> str | None:
        """What ended a failed run, where it was recorded."""
        return _read_json(self.folder / "state.json").get("error")

    def refs(
        self, stages: str | Iterable[str], record: str, without: int | None = None
    ) -> list[tuple[Entry, TableRef]]:
        """The tables of a record that entries of these stages committed, in the ledger's order; not of a round."""
        wanted = [stages] if isinstance(stages, str) else list(stages)
        return [
            (entry, entry.refs[record])
            for stage in wanted
            for entry in self.entries(stage)
            if record in entry.refs and entry.round != without
        ]

    def table(
        self,
        stages: str | Iterable[str],
        record: str,
        columns: list[str] | None = None,
        step: int | None = None,
        without: int | None = None,
    ) -> pa.Table:
        """Rows of every such table that is there, with the ledger's step in column `at_step`. See `deleted`."""
        schema = RECORDS[record].schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
        parts = [schema.empty_table().append_column(AT_STEP, pa.array([], pa.int64()))]
        for entry, ref in self.refs(stages, record, without):
            if step is not None and entry.step != step:
                continue
            try:
                rows = self.store.read(ref, columns)
            except DeletedTable:
                continue
            parts.append(rows.append_column(AT_STEP, pa.repeat(pa.scalar(entry.step, pa.int64()), rows.num_rows)))
        return pa.concat_tables(parts)

    def deleted(
        self, stages: str | Iterable[str], record: str, without: int | None = None
    ) -> list[tuple[Entry, Tombstone]]:
        """Such tables whose data retention deleted, with what is kept of them."""
        refs = self.refs(stages, record, without)
        found = [(entry, self.store.tombstone(ref.record, ref.key)) for entry, ref in refs]
        return [(entry, tombstone) for entry, tombstone in found if tombstone is not None]

    def pins(self) -> Pins:
        return read_pins(self.folder, self.phase or MAIN)

    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints of this run's policies that were ever committed, oldest first."""
        found = []
        for entry in self.entries("checkpoint"):
            if entry.policy is None:
                continue
            folder = checkpoint_folder(Path(self.root), entry.policy)
            manifest = checkpoint_manifest(folder)
            if manifest:
                tombstone = Tombstone.of(manifest)
                is_there = not tombstone and all((folder / name).is_file() for name in manifest["files"])
                digest = manifest["weights_digest"]
                found.append(Checkpoint(entry.step, entry.policy, folder, digest, is_there, tombstone))
        return found

    def last_policy(self) -> PolicyRef | None:
        """The policy after the last committed update; None before the first."""
        entries = self.entries("update")
        return entries[-1].policy if entries else None

    def dataset_ref(self) -> TableRef | None:
        """The table of all prompts, or of all examples, which the data stage committed."""
        found = [ref for record in ("prompts", "examples") for _, ref in self.refs(("data", "prompts"), record)]
        return found[0] if found else None


def open_run(root: str, name: str) -> RunView:
    """Raises SettingsError naming near ones when there is no such run."""
    folder = Path(root) / "runs" / name
    names = list_run_names(root)
    if name not in names:
        raise SettingsError(f"no run {name!r} under {root}: {near(name, names)}")
    return RunView(root, name, folder, Store(root), Ledger(folder))


def list_run_names(root: str) -> list[str]:
    """Names of all runs, newest first."""
    heads = (Path(root) / "runs").glob("*/run.json")
    return [name for _, name in sorted(((_begun_at(path), path.parent.name) for path in heads), reverse=True)]


def _begun_at(head: Path) -> str:
    """When a run began; "" where its head is damaged, which is said when the run itself is opened."""
    try:
        return str(_read_json(head).get("created_at", ""))
    except DamagedTable:
        return ""


def near(name: str, known: Iterable[str], shown: int = 5) -> str:
    """The end of an error message about an unknown name."""
    names = list(known)
    if not names:
        return "there are none yet"
    close = difflib.get_close_matches(name, names, n=shown, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(names[:shown])}"


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) or {}
