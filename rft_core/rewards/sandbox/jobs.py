"""What a sandbox is asked, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Script:
    """A program to run once for each (stdin, expected stdout). `command` null is Python."""

    program: str
    cases: tuple[tuple[str, str], ...]
    file: str = "main.py"
    command: tuple[str, ...] | None = None
    tolerance: float = 1e-6

    @property
    def num_tests(self) -> int:
        return len(self.cases)


@dataclass(frozen=True)
class Calls:
    """A Python program whose functions tests call. `tests` is what the tests' process gets, see inside/checker.py."""

    program: str
    tests: dict[str, Any] = field(hash=False)

    @property
    def num_tests(self) -> int:
        return int(self.tests["num_tests"])


@dataclass(frozen=True)
class Judgement:
    """`passed` of `total` tests. `reason` says what failed first; null `total` means that nothing can be said."""

    passed: int
    total: int | None
    reason: str | None = None

    @property
    def is_pass(self) -> bool:
        return bool(self.total) and self.passed == self.total
