"""What a manifest says of data that retention deleted: the manifest stays, so lineage, digest and rows stay known."""

from __future__ import annotations

import datetime
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Tombstone:
    """When data was deleted, by which rule of which run, and what is kept of it.

    `facts` are small values that others would have read from the data. `is_swept` is False from the moment the
    manifest says deleted until the last file is gone: a crash in between leaves files that the next pruning removes.
    """

    rule: str
    run: str
    at: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    facts: dict[str, Any] = field(default_factory=dict)
    is_swept: bool = False

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Self | None:
        """The tombstone of a manifest; None when its data is there."""
        if not manifest.get("deleted"):
            return None
        return cls(**{"rule": "an unknown rule", "run": "", "at": "", **manifest.get("tombstone", {})})

    def put_on(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return {**manifest, "deleted": True, "tombstone": asdict(self)}

    def to_json(self) -> dict[str, str]:
        """What a reader asks for."""
        return {"at": self.at, "rule": self.rule, "run": self.run}

    def sentence(self, what: str, verb: str = "was") -> str:
        """`rollouts/ab12 was deleted on 2026-01-31 12:00 UTC by the rule keep_last 2 of run demo`."""
        when = f" on {self.at[:16].replace('T', ' ')} UTC" if self.at else ""
        return f"{what} {verb} deleted{when} by the rule {self.rule}" + (f" of run {self.run}" if self.run else "")

    def mend(self, root: str) -> str:
        """The command that makes the data again."""
        return remake_command(root, self.run or "RUN")


def remake_command(root: str, run: str) -> str:
    return f"rft run {shlex.quote(f'{root}/runs/{run}/recipe.yaml')} --name {run} --root {shlex.quote(root)} --remake"
