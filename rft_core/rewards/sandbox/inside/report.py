"""What the tests' process concludes."""

from __future__ import annotations

import re

MAX_SHOWN = 160
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs from run to run, and reasons must not


class Verdict:
    """`passed` of `total` tests; `reason` is the first failure. `is_judged` is false when nothing can be said.

    `is_gone`: the program's process ended before its tests did, so not all of them passed.
    """

    is_gone = False

    def __init__(self, passed: int, total: int, reason: str | None, is_judged: bool = True) -> None:
        self.passed, self.total, self.reason, self.is_judged = passed, total, reason, is_judged

    @classmethod
    def unjudged(cls, reason: str) -> Verdict:
        return cls(0, 0, reason, False)

    def to_json(self) -> list:
        return ["verdict", self.passed, self.total, self.reason, self.is_judged, self.is_gone]


def shortened(text: str) -> str:
    text = ADDRESS.sub("", text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def describe(error: BaseException) -> str:
    """`ValueError: what it says`."""
    if isinstance(error, SystemExit) and "__foreign__" in error.__dict__:
        return "the program exits"
    return shortened(f"{type(error).__name__}: {error}")


def missing_module(error: BaseException) -> str | None:
    """Why tests can't be judged when they import what is not there, themselves and not in the program."""
    if isinstance(error, ModuleNotFoundError) and "__foreign__" not in error.__dict__:
        return f"the tests need the module {error.name}, which is not in the sandbox"
    return None
