"""Reward functions, one file per family, and the grader that sums them. See custom.py for a user's own function.

Names are imported when they are asked for, so that the settings of a recipe load without what functions need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft_core.rewards.grader import REWARDS, Grader, UnreadableAnswer, build_grader, num_timeouts, unscored_reasons
    from rft_core.rewards.rows import RewardRow, Scored

__all__ = [
    "REWARDS",
    "Grader",
    "RewardRow",
    "Scored",
    "UnreadableAnswer",
    "build_grader",
    "num_timeouts",
    "unscored_reasons",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "rows" if name in ("RewardRow", "Scored") else "grader"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
