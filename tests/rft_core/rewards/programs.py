"""Programs with tests, and what the code reward makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rft_core.rewards import code
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction

CASES = Path(__file__).parents[2] / "cases"
# Small limits, so that endless programs end soon. Clock time is long: it counts for programs that sleep only.
QUICK = {"raw": True, "cpu_seconds": 1.0, "wall_seconds": 6.0}


def read_cases(name: str) -> list[dict[str, Any]]:
    """Rows of tests/cases: {id, program, tests, expected_score_kind}."""
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


def score(rows: list[tuple[str, Any]], **settings: Any) -> list[Scored]:
    """Scores of (completion, tests) in one batch."""
    scorer = code.build(RewardFunction(name="code", code={**QUICK, **settings}), None)
    return scorer.score(
        [
            RewardRow(f"r{index}", f"p{index}", [], text, None, {"tests": tests}, "stop")
            for index, (text, tests) in enumerate(rows)
        ]
    )


def is_expected(scored: Scored, kind: str, is_partial: bool = False) -> bool:
    """Whether a score is of a case's kind."""
    reason = scored.reason or ""
    if kind == "unscored":
        return scored.value is None and bool(reason)
    if kind in ("full", "full_contained"):
        return scored.value == 1.0
    if kind == "partial" and is_partial:
        return 0 < scored.value < 1
    blames_us = "sandbox" in reason or "tests' process" in reason
    words = {"zero_timeout": "timeout: ", "zero_limit": "limit: "}.get(kind, "")
    return scored.value == 0.0 and bool(reason) and words in reason and not blames_us
