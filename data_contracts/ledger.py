"""A run's append-only record of what was committed, and the lease that lets one process write it.

    runs/<name>/ledger/<phase>.<step>.<stage>.<round>.json   one file per commit, created exclusively
    runs/<name>/lease.json                                  who writes, under which epoch

Resume, rerun and rescore follow the ledger's refs. A process whose epoch is no longer the lease's stops before its
next entry. The folder is local or any POSIX file system.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data_contracts.errors import DamagedTable, FatalError, LeaseLost, RunBusy
from data_contracts.files import LocalFiles, read_json, write_whole
from data_contracts.refs import PolicyRef, TableRef

LOCK_TRIES, LOCK_RETRY_SECONDS = 5, 0.02

BASELINE = 100  # round of greedy completions; rounds of fresh prompts are numbered from 1, and fewer
STAGES = (
    "data",
    "prompts",
    "rollouts",
    "rewards",
    "token-scores",
    "advantages",
    "update",
    "checkpoint",
    "evaluation-rollouts",
    "evaluation-rewards",
    "evaluation",
)


@dataclass(frozen=True)
class Entry:
    """One commit. `refs` are its tables by record name, `policy` what an update or checkpoint made.

    `pinned_from` names the run whose work it is, when a rerun took it over.
    """

    phase: str
    step: int
    stage: str
    round: int
    refs: dict[str, TableRef]
    policy: PolicyRef | None = None
    seconds: float = 0.0
    reused: bool = False
    pinned_from: str | None = None
    epoch: int = 0
    at: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        value["refs"] = {record: ref.to_json() for record, ref in self.refs.items()}
        value["policy"] = self.policy.to_json() if self.policy else None
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        refs = {record: TableRef.from_json(ref) for record, ref in value["refs"].items()}
        policy = PolicyRef.from_json(value["policy"]) if value["policy"] else None
        return cls(**{**value, "refs": refs, "policy": policy})


class Ledger:
    """Entries of one run. Without a lease it can only be read."""

    def __init__(self, folder: Path, lease: Lease | None = None) -> None:
        self.folder = folder
        self.lease = lease
        self._entries: dict[tuple[str, int, str, int], Entry] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read entries that were added since."""
        for path in sorted((self.folder / "ledger").glob("[!.]*.json")):
            try:
                phase, step, stage, round_ = path.stem.split(".")
                slot = (phase, int(step), stage, int(round_))
            except ValueError as error:
                raise _no_entry(path) from error
            if slot not in self._entries:
                self._entries[slot] = _read_entry(path)

    def entries(self, stage: str | None = None, phase: str | None = None) -> list[Entry]:
        """Entries ordered by phase, step, stage and round."""
        chosen = [
            entry
            for entry in self._entries.values()
            if (stage is None or entry.stage == stage) and (phase is None or entry.phase == phase)
        ]
        return sorted(chosen, key=lambda entry: (entry.phase, entry.step, STAGES.index(entry.stage), entry.round))

    def get(self, phase: str, step: int, stage: str, round_: int = 0) -> Entry | None:
        return self._entries.get((phase, step, stage, round_))

    def commit(self, entry: Entry) -> Entry:
        """Append an entry. An entry that is there already must hold the same refs."""
        if self.lease is None:
            raise FatalError(f"the ledger of {self.folder.name} was opened for reading")
        self.lease.check()
        stamped = _stamped(entry, self.lease.epoch)
        slot = (entry.phase, entry.step, entry.stage, entry.round)
        path = _entry_path(self.folder, *slot)
        if not create_exclusively(path, json.dumps(stamped.to_json(), indent=1, sort_keys=True).encode()):
            present = Entry.from_json(json.loads(path.read_text()))
            if present.refs != entry.refs or present.policy != entry.policy:
                raise FatalError(
                    f"{path} must hold {_named(entry)}, found {_named(present)}: "
                    "the stage did not reproduce its result; see the fingerprints in both manifests"
                )
            stamped = present
        self._entries[slot] = stamped
        return stamped


def read_entry(folder: Path, phase: str, step: int, stage: str, round_: int = 0) -> Entry | None:
    """One entry of a run without reading its others; None when there is none. Raises DamagedTable."""
    path = _entry_path(folder, phase, step, stage, round_)
    return _read_entry(path) if path.is_file() else None


def _entry_path(folder: Path, phase: str, step: int, stage: str, round_: int) -> Path:
    return folder / "ledger" / f"{phase}.{step:05d}.{stage}.{round_}.json"


def _read_entry(path: Path) -> Entry:
    try:
        return Entry.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise _no_entry(path) from error


def _no_entry(path: Path) -> DamagedTable:
    found = path.read_text(errors="replace")[:60]
    return DamagedTable(
        f"{path} must be a ledger entry, found {found!r}: delete it and run the same command again, which "
        "finds the tables in the store"
    )


def _stamped(entry: Entry, epoch: int) -> Entry:
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return Entry(**{**{name: getattr(entry, name) for name in entry.__dataclass_fields__}, "epoch": epoch, "at": at})


def _named(entry: Entry) -> str:
    tables = ", ".join(f"{ref.name} ({ref.digest[:8]})" for ref in entry.refs.values())
    return f"{tables} {entry.policy.policy_id[:12] if entry.policy else ''}".strip()


class Lease:
    """The right to write a run. Held by an operating-system lock, fenced by an epoch that rises at each take-over."""

    def __init__(self, folder: Path, epoch: int, descriptor: int) -> None:
        self.folder = folder
        self.epoch = epoch
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: Path, on_orphan: Callable[[dict[str, Any]], object] | None = None) -> Lease:
        """Take the lease, or raise RunBusy with its holder. `on_orphan` gets the record of a holder that died."""
        descriptor = _locked(folder)
        try:
            previous = read_lease(folder)
            if previous is not None and not previous["released"] and on_orphan is not None:
                on_orphan(previous)
            lease = cls(folder, (previous["epoch"] if previous else 0) + 1, descriptor)
            lease.record()
        except BaseException:
            os.close(descriptor)
            raise
        return lease

    def record(self, **details: Any) -> None:
        """Write who holds the lease, with details such as the flow run's id."""
        holder = {
            "epoch": self.epoch,
            "pid": os.getpid(),
            "process_started": process_start(os.getpid()),
            "host": socket.gethostname(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "released": False,
            **details,
        }
        replace_file(self.folder / "lease.json", json.dumps(holder, indent=1).encode())

    def check(self) -> None:
        """Raise LeaseLost when another process took over."""
        current = read_lease(self.folder)
        if current is None or current["epoch"] != self.epoch:
            raise LeaseLost(
                f"run {self.folder.name} must be written under epoch {self.epoch}, found epoch "
                f"{current['epoch'] if current else None}: another process took it over"
            )

    def release(self) -> None:
        try:
            current = read_lease(self.folder)
            if current is not None and current["epoch"] == self.epoch:
                replace_file(self.folder / "lease.json", json.dumps({**current, "released": True}, indent=1).encode())
        finally:
            os.close(self._descriptor)


@contextmanager
def held_still(folder: Path) -> Iterator[None]:
    """Keep writers away without being one: no epoch and no record, so a kill leaves nothing behind. Raises RunBusy."""
    descriptor = _locked(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lease.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)
    holder = read_lease(folder)
    if holder is None or holder["released"]:
        raise RunBusy(f"run {folder.name} must stand still, found that it is being pruned: wait for `rft prune`")
    raise RunBusy(
        f"run {folder.name} must have one writer, found process {holder.get('pid')} on "
        f"{holder.get('host')} holding it since {holder.get('since')}: wait for it, or stop it"
    )


def _lock(descriptor: int) -> bool:
    """Lock without waiting for a holder; but `is_held` looks by taking the lock for an instant, which is waited out."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_RETRY_SECONDS)
        else:
            return True
    return False


def read_lease(folder: Path) -> dict[str, Any] | None:
    """The last holder's record; None when nobody ever held the lease."""
    mend = "delete it when no process works on the run"
    return read_json(folder / "lease.json", ("epoch", "released"), mend)


def is_held(folder: Path) -> bool:
    """Whether a live process holds the lease."""
    try:
        descriptor = os.open(folder / "lease.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def process_start(pid: int) -> str | None:
    """The kernel's start time of a process, which tells a reused pid apart; None when it is gone or unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return None


def create_exclusively(path: Path, data: bytes) -> bool:
    """Write a file that must not exist, whole or not at all. False when it exists."""
    try:
        write_whole(path, data, os.link)
    except FileExistsError:
        return False
    return True


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, over whatever was there."""
    LocalFiles(path.parent).write(path.name, data)
