"""Small frozen values that stages hand each other instead of tables, models or frames."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from data_contracts.schemas import RECORDS, canonical_json

KEY_LENGTH = 32  # hex digits: 128 bits; collisions are out of reach and paths stay short
MAIN = "main"  # the phase of a run whose recipe names none


@dataclass(frozen=True)
class TableRef:
    """A committed table: where it is (record, key) and what it holds (digest of its files).

    >>> TableRef("rewards", "ab" * 16, "cd" * 32, 64).name
    'rewards/abababababababababababababababab'
    """

    record: str
    key: str
    digest: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.record}/{self.key}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TableRef:
        return cls(**value)


@dataclass(frozen=True)
class PolicyRef:
    """A policy: what made it (policy_id) and how many updates lie behind it. Version 0 is the model folder itself."""

    policy_id: str
    version: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PolicyRef:
        return cls(**value)


@dataclass(frozen=True)
class SourceRow:
    """One row of a raw source. Values are plain JSON: dict, list, str, int, float, bool, null.

    `value` is null when the row could not be parsed; then `reason` and `detail` say why, and `mended` holds what it
    says after repair, where the reason has one.
    """

    source: str
    row: int
    value: dict[str, Any] | None
    raw: bytes
    reason: str | None = None
    detail: str | None = None
    mended: dict[str, Any] | None = None


def digest_of(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def content_key(
    record: str,
    *,
    inputs: list[TableRef],
    settings: dict[str, Any],
    identity: dict[str, Any],
    seed: int,
    semantics: int,
) -> str:
    """The key of a table that does not exist yet: a hash of everything that decides its content.

    `settings` holds the stage's content settings only, `identity` the digests of model, tokenizer and grader. Inputs
    enter by key and digest, so a damaged or edited input never leads to a wrong hit.
    """
    parts = {
        "record": record,
        "version": RECORDS[record].version,
        "inputs": [[ref.record, ref.key, ref.digest] for ref in inputs],
        "settings": settings,
        "identity": identity,
        "seed": seed,
        "semantics": semantics,
    }
    return digest_of(parts)[:KEY_LENGTH]
