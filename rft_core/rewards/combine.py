"""Scores of several functions -> one reward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np

from rft_core.errors import RewardFunctionError
from rft_core.rewards.rows import Scored
from rft_core.rewards.settings import RewardFunction

MAX_REWARD = 1e30  # sums of squares stay within float64 and credit within float32; a mistake rather than a reward


def combine(
    functions: Sequence[RewardFunction],
    by_function: Sequence[Sequence[Scored]],
    missing: str,
    rollout_ids: Sequence[str] = (),
) -> tuple[list[float | None], list[str | None]]:
    """(rewards, reasons): per row one of the two is null. A reason names every component without a score.

    The sum of weight x contribution over the functions that scored the row. A gated function adds 0; one that does not
    apply adds nothing and is missed by nobody. One of weight 0 is a measure: it makes no row scored that the others
    could not score. Without functions every row is unscored. Raises RewardFunctionError for sums that are no finite
    reward.
    """
    size = len(by_function[0]) if by_function else len(rollout_ids)
    some_weigh = any(function.weight for function in functions)
    sums, present, lacking = np.zeros(size), np.zeros(size, bool), np.zeros(size, bool)
    for function, scores in zip(functions, by_function, strict=True):
        values = np.array([np.nan if scored.value is None else scored.value for scored in scores], float)
        scored_here = ~np.isnan(values)
        gated = np.array([scored.absence == "gated" for scored in scores], bool)
        absent = np.array([scored.absence is not None for scored in scores], bool)
        with np.errstate(over="ignore", invalid="ignore"):
            sums[scored_here] += function.weight * contributions(function, values[scored_here])
        if function.weight or not some_weigh:
            present |= scored_here | gated
        lacking |= ~scored_here & ~absent
    unscored = ~present if missing == "sum_present" else ~present | lacking
    wild = np.flatnonzero(~unscored & ~(np.abs(sums) <= MAX_REWARD))
    if wild.size:
        row = int(wild[0])
        parts = {function.component: scores[row].value for function, scores in zip(functions, by_function, strict=True)}
        raise RewardFunctionError(
            f"the weighted sum of rewards must be finite and at most {MAX_REWARD:g} in size, "
            f"row {rollout_ids[row] if rollout_ids else row} gives {sums[row]} from {parts}"
        )
    reasons: list[str | None] = [None] * size
    for row in np.flatnonzero(unscored):
        reasons[row] = _reason(functions, [scores[row] for scores in by_function])
    rewards = [None if without else value for without, value in zip(unscored.tolist(), sums.tolist(), strict=True)]
    return rewards, reasons


def contributions(function: RewardFunction, values: np.ndarray) -> np.ndarray:
    """Scores after centre, scale and clip, before the weight. Any shape."""
    if function.center != 0.0 or function.scale != 1.0:
        values = (values - function.center) * function.scale
    return values if function.clip is None else np.clip(values, *function.clip)


def gate_is_open(gate: tuple[str, str, float], scored: Scored) -> bool | None:
    """Whether the earlier component lets a row pass; null when it has no score to say so."""
    if scored.value is None:
        return False if scored.absence is not None else None
    return OPERATORS[gate[1]](scored.value, gate[2])


def _reason(functions: Sequence[RewardFunction], row: Sequence[Scored]) -> str:
    lacking = [
        f"{function.component}: {scored.reason}"
        for function, scored in zip(functions, row, strict=True)
        if scored.value is None and scored.absence is None
    ]
    return "; ".join(lacking) or "no reward function applies to this row"


OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
