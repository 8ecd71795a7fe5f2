"""How many sandboxed programs are judged in a second: correct small ones, with three tests of each kind."""

from __future__ import annotations

import time

from rft_core.rewards import code
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction

COUNT = 100
FUNCTION = "def add(a, b):\n    return a + b  # number {number}\n"
SCRIPT = "a, b = map(int, input().split())\nprint(a + b)  # number {number}\n"
KINDS = {
    "assert": (FUNCTION, "assert add(2, 3) == 5\nassert add(-1, 1) == 0\nassert add(10, 5) == 15\n"),
    "calls": (FUNCTION, {"inputs": [[2, 3], [-1, 1], [10, 5]], "outputs": [5, 0, 15], "fn_name": "add"}),
    "stdio": (SCRIPT, {"inputs": ["2 3", "-1 1", "10 5"], "outputs": ["5", "0", "15"]}),
    "pytest": (FUNCTION, "".join(f"def test_{n}():\n    assert add({n}, 1) == {n + 1}\n" for n in range(3))),
}


def rate(kind: str, count: int, workers: int | None) -> float:
    """Programs per second, the start of the workers with it."""
    program, tests = KINDS[kind]
    scorer = code.build(RewardFunction(name="code", code={"raw": True, "workers": workers}), None)
    rows = [
        RewardRow(str(number), str(number), [], program.format(number=number), None, {"tests": tests}, "stop")
        for number in range(count)
    ]
    began = time.perf_counter()
    scores = scorer.score(rows)
    seconds = time.perf_counter() - began
    assert all(scored.value == 1.0 for scored in scores), scores
    return count / seconds


def measure() -> list[tuple[str, str, float, str]]:
    """(name, metric, value, unit) of each kind of tests."""
    return [("sandboxed programs", f"tests of kind {kind}", rate(kind, COUNT, None), "programs/s") for kind in KINDS]
