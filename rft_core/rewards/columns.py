"""Scores of functions -> the columns of the table `rewards` that hold them by component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from data_contracts.schemas import RECORDS
from rft_core.rewards.rows import Scored
from rft_core.rewards.settings import RewardFunction

SCORED = "scored"


def components_column(functions: list[RewardFunction], by_function: list[list[Scored]], size: int) -> pa.Array:
    """Maps component -> score; a function's metrics follow it."""
    names, values, offsets = [], [], [0]
    for row in _rows(by_function, size):
        for function, scored in zip(functions, row, strict=True):
            names.append(function.component)
            values.append(scored.value)
            for name, metric in sorted(scored.metrics.items()):
                names.append(f"{function.component}/{name}")
                values.append(metric)
        offsets.append(len(names))
    return _maps("components", offsets, names, values)


def statuses_column(functions: list[RewardFunction], by_function: list[list[Scored]], size: int) -> pa.Array:
    """Maps component -> "scored", "scored: NOTE", or why there is no score."""
    names = [function.component for function in functions] * size
    statuses = [_status(scored) for row in _rows(by_function, size) for scored in row]
    return _maps("component_status", [row * len(functions) for row in range(size + 1)], names, statuses)


def _rows(by_function: list[list[Scored]], size: int) -> list[tuple[Scored, ...]]:
    """Each row's scores; empty where there are no functions."""
    return list(zip(*by_function, strict=True)) or [()] * size


def _maps(column: str, offsets: Sequence[int], keys: list[str], items: list[Any]) -> pa.Array:
    kind = RECORDS["rewards"].schema.field(column).type
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys, kind.key_type), pa.array(items, kind.item_type), type=kind
    )


def _status(scored: Scored) -> str:
    if scored.value is None:
        return scored.reason or "no reason given"
    return f"{SCORED}: {scored.reason}" if scored.reason else SCORED
