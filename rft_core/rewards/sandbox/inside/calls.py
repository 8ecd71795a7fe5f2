"""Runs tests that are pairs of arguments and an expected value for one function of the program."""

from __future__ import annotations

import math

from .mirrors import Remote, content_of
from .peer import Gone
from .report import Verdict, describe, shortened
from .tests_end import TestsEnd, known_names


def run_calls(job: dict, peer: TestsEnd) -> Verdict:
    """A function of that name, else a method of a class Solution, on a fresh instance for each call."""
    passed, reason = 0, None
    for number, (args, expected) in enumerate(job["calls"], start=1):
        failure = _failure(job, peer, args, expected)
        if failure is None:
            passed += 1
            continue
        reason = reason or f"call {number}: {failure}"
        if not job["is_partial"]:
            break
    return Verdict(passed, len(job["calls"]), reason)


def _failure(job: dict, peer: TestsEnd, args: list, expected) -> str | None:
    name = job["function"]
    shown = shortened(f"{name}({', '.join(map(repr, args))})")
    try:
        names = known_names(peer)
        if name in names or "Solution" not in names:
            function = peer.request("global", [name])
        else:
            function = getattr(peer.request("global", ["Solution"])(), name)
        value = function(*args)
        if isinstance(value, Remote) and isinstance(expected, list) and hasattr(type(value), "__iter__"):
            value = list(value)
        if is_match(value, expected, job["tolerance"]) or (
            isinstance(expected, list) and len(expected) == 1 and is_match(value, expected[0], job["tolerance"])
        ):
            return None
        return f"{shown} gives {shortened(repr(value))}, expected {shortened(repr(expected))}"
    except Gone:
        return f"{shown}: the program is gone"
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever the program raises fails the call)
        return f"{shown}: {describe(error)}"


def is_match(value, expected, tolerance: float) -> bool:
    """Equal as JSON has it: a tuple is a list, keys are texts; numbers with a fraction within the tolerance."""
    if isinstance(value, Remote):
        value = content_of(value)
    if isinstance(value, tuple | list) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            is_match(ours, theirs, tolerance) for ours, theirs in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        ours = {str(key): item for key, item in value.items()}
        return len(ours) == len(value) == len(expected) and all(
            str(key) in ours and is_match(ours[str(key)], item, tolerance) for key, item in expected.items()
        )
    if isinstance(expected, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(value, float) and isinstance(expected, int) and not isinstance(expected, bool):
        return value == expected or math.isclose(value, expected, rel_tol=0, abs_tol=tolerance)
    return type(value) in PLAIN and isinstance(value, bool) == isinstance(expected, bool) and value == expected


PLAIN = (type(None), bool, int, float, str)
