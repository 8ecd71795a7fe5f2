"""What a new grader says against an old one: flips of each function, and drift of the means."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rft_core.errors import ContractError

TOTAL = "reward"  # the name of the weighted sum among the functions
MAX_VALUES = 8  # a function with more distinct scores is shown in as many intervals
MAX_EXACT = 64  # distinct scores of a table that are counted as they are; more are rounded first
UNSCORED, ABSENT = -np.inf, np.inf  # stand for what is no score, among scores, which are finite
GATED, OTHER_ROW = -np.finfo(float).max, np.finfo(float).max  # and these, which no score comes near
NAMES = {UNSCORED: "unscored", ABSENT: "absent", GATED: "gated", OTHER_ROW: "not applicable"}
Flip = tuple[float, float]


def component_values(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Scores of one component by row, float64; NaN where it is null, or the row lacks it."""
    maps = column.combine_chunks()
    offsets = np.asarray(maps.offsets)
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    start, end = (int(offsets[0]), int(offsets[-1])) if len(maps) else (0, 0)
    is_it = np.asarray(pc.equal(maps.keys.slice(start, end - start), name), dtype=bool)
    values = np.full(len(maps), np.nan)
    values[rows[is_it]] = maps.items.slice(start, end - start).to_numpy(zero_copy_only=False)[is_it]
    return values


@dataclass
class Drift:
    """One function's scores by two graders, (old, new)."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(2))
    scored: np.ndarray = field(default_factory=lambda: np.zeros(2, int))
    changed: int = 0
    flips: Counter[Flip] = field(default_factory=Counter)

    def add(self, sides: list[np.ndarray]) -> None:
        for side, values in enumerate(sides):
            is_scored = _are_scores(values)
            self.sums[side] += values[is_scored].sum()
            self.scored[side] += is_scored.sum()
        self.changed += int((sides[0] != sides[1]).sum())
        pairs, counts = np.unique(np.stack(list(map(_coarse, sides)), axis=1), axis=0, return_counts=True)
        for (old, new), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.flips[old, new] += count

    def to_json(self) -> dict[str, Any]:
        means = [float(total / count) if count else None for total, count in zip(self.sums, self.scored, strict=True)]
        named = _named(self.flips)
        confusion = [{"from": old, "to": new, "count": count} for (old, new), count in sorted(named.items())]
        flips = [cell for cell in confusion if cell["from"] != cell["to"]]
        return {
            "old_mean": means[0],
            "new_mean": means[1],
            "drift": means[1] - means[0] if means[0] is not None and means[1] is not None else None,
            "rows": self.flips.total(),
            "changed": self.changed,
            "unscored_old": sum(count for (old, _), count in self.flips.items() if old == UNSCORED),
            "unscored_new": sum(count for (_, new), count in self.flips.items() if new == UNSCORED),
            "flips": sorted(flips, key=lambda flip: -flip["count"]),
            "confusion": confusion,
        }


@dataclass
class Comparison:
    """Fills with one pair of tables after another; its size does not depend on their rows."""

    drifts: dict[str, Drift] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def add(self, old: pa.Table, new: pa.Table, step: int) -> None:
        """Rewards of the same rollouts by two graders. Raises ContractError when the rows differ."""
        if not old["rollout_id"].equals(new["rollout_id"]):
            raise ContractError(f"rewards of step {step} must be of the same rollouts in the same order")
        columns = [_columns(table) for table in (old, new)]
        absent = np.full(old.num_rows, ABSENT)
        for name in dict.fromkeys([*columns[0], *columns[1]]):
            self.drifts.setdefault(name, Drift()).add([side.get(name, absent) for side in columns])
        means = [pc.mean(table["reward"]).as_py() for table in (old, new)]
        self.steps.append({"step": step, "rows": old.num_rows, "old_mean": means[0], "new_mean": means[1]})

    def functions(self) -> list[dict[str, Any]]:
        """One object per function, the sum first: means over scored rows, drift, changed rows, flips, all pairs."""
        return [{"name": name, **drift.to_json()} for name, drift in self.drifts.items()]


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    """The sum and every function's scores, without their metrics."""
    maps = table["component_status"].combine_chunks()
    names = pc.unique(maps.keys).to_pylist() if len(maps) else []
    columns = {TOTAL: table["reward"].to_numpy()}
    columns = {name: np.where(np.isnan(values), UNSCORED, values) for name, values in columns.items()}
    for name in names:
        values = component_values(table["components"], name)
        status = pc.map_lookup(maps, query_key=pa.scalar(name, maps.type.key_type), occurrence="first")
        for start, stand_in in (("gated: ", GATED), ("not applicable: ", OTHER_ROW)):
            said = pc.fill_null(pc.starts_with(status, start), False).to_numpy(zero_copy_only=False)
            values = np.where(np.isnan(values) & said, stand_in, values)
        columns[name] = np.where(np.isnan(values), UNSCORED, values)
    return columns


def _are_scores(values: np.ndarray) -> np.ndarray:
    return np.abs(values) < OTHER_ROW


def _coarse(values: np.ndarray) -> np.ndarray:
    """Many different scores to two significant digits."""
    if np.unique(values).size <= MAX_EXACT:
        return values
    is_scored = _are_scores(values) & (values != 0)
    unit = 10.0 ** (np.floor(np.log10(np.abs(values[is_scored]))) - 1)
    rounded = values.copy()
    rounded[is_scored] = np.round(values[is_scored] / unit) * unit
    return rounded


def _named(flips: Counter[Flip]) -> Counter[tuple[str, str]]:
    """Scores as texts; where there are many, the intervals that they lie in."""
    scores = np.array(sorted({value for pair in flips for value in pair if value not in NAMES}))
    names: dict[float, str] = {value: f"{value:.6g}" for value in scores.tolist()}
    if len(set(names.values())) > MAX_VALUES:
        edges = np.linspace(scores[0], scores[-1], MAX_VALUES + 1)
        places = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, MAX_VALUES - 1)
        names = {
            value: f"{edges[place]:.3g} to {edges[place + 1]:.3g}"
            for value, place in zip(scores.tolist(), places.tolist(), strict=True)
        }
    names |= NAMES
    named: Counter[tuple[str, str]] = Counter()
    for (old, new), count in flips.items():
        named[names[old], names[new]] += count
    return named
