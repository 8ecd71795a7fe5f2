"""Which prompts a step takes. A pure function of the data set's light columns, the step, the settings, and what earlier
steps measured: no state but tables.

No step takes a prompt twice. Epochs of a data set follow each other without a gap, and each holds every train prompt
once; `targeted` alone knows no epochs. In a mixture each place in the stream of prompts belongs to a data set by a
seeded draw, and each data set has an order and epochs of its own.

P train prompts of one data set, S steps from the first to the one asked for, D data sets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rft_core.data.settings import DataSettings, ExpertSettings
from rft_core.errors import ContractError
from rft_core.seeds import derive, permutation, uniforms

USES_STATS = frozenset({"easy_to_hard", "targeted"})
UNMEASURED_PASS_RATE = 0.5  # of a prompt whose rollouts were all unscored, or are under way
DRAWS_AT_ONCE = 1_000_000  # bounds memory: 16 MB
NUM_SHOWN = 3


@dataclass(frozen=True)
class Measured:
    """What is known about prompts: record prompt_stats, null before the first step was scored, and the prompts of each
    step drawn since, whose rollouts the statistics do not hold yet."""

    stats: pa.Table | None = None
    under_way: Sequence[pa.Table] = ()


def light_columns(data: DataSettings) -> list[str]:
    """Columns of record prompts that the choice needs: few, so that a large data set is never read whole."""
    columns = ["split"]
    if len(data.mixture) > 1:
        columns.append("dataset")
    if data.order in USES_STATS:
        columns.append("prompt_id")
    if data.order == "difficulty":
        columns += ["prompt_id", "metadata"]
    return columns


def with_difficulty(columns: pa.Table, name: str) -> pa.Table:
    """The column `metadata` replaced by `difficulty`: the number under that name, null where there is none."""
    numbers = [_number(json.loads(text), name) for text in columns["metadata"].to_pylist()]
    return columns.drop_columns("metadata").append_column("difficulty", pa.array(numbers, pa.float64()))


def select_prompts(
    columns: pa.Table,
    step: int,
    count: int,
    data: DataSettings,
    weights: dict[str, float],
    seed: int,
    measured: Measured | None = None,
) -> np.ndarray:
    """int64[count]: the rows of the train prompts of `step` (from 1), in order.

    `columns` are the light columns of the whole data set, with_difficulty where that is the order. `weights` has one
    entry per data set of a mixture, by the name in the column `dataset`; with fewer than two the rows are one data set.
    Raises ContractError when there are fewer than `count` train prompts, none of a data set, or one without a
    difficulty where that is the order.
    """
    train = pc.indices_nonzero(pc.equal(columns["split"], "train")).to_numpy().astype(np.int64)
    if count > len(train):
        raise ContractError(
            f"a step needs {count} different train prompts, found {len(train)}; lower "
            + ("experts.per_step" if isinstance(data, ExpertSettings) else "rollout.prompts_per_step")
            + " or data.heldout_fraction, or give more data"
        )
    choose = ORDERS[data.order]
    measured = measured or Measured()
    if len(weights) < 2:
        stream = _Stream(columns, train, np.full(step, count), data, seed, (), measured)
        return train[choose(stream)]
    rows_D = _rows_by_dataset(columns, train, weights)
    taken_SD, owner = _shares(step, count, list(weights.values()), [len(rows) for rows in rows_D], seed)
    chosen = np.empty(count, np.int64)
    for index, (name, rows) in enumerate(zip(weights, rows_D, strict=True)):
        if taken_SD[-1, index]:
            stream = _Stream(columns, rows, taken_SD[:, index], data, seed, (name,), measured)
            chosen[owner == index] = rows[choose(stream)]
    return chosen


@dataclass(frozen=True)
class _Stream:
    """The train prompts of one data set. `taken_S` is how many of them each step takes, the last the one asked for.

    `label` is the data set's name among several: it sets their seeds apart.
    """

    columns: pa.Table
    rows_P: np.ndarray
    taken_S: np.ndarray
    data: DataSettings
    seed: int
    label: tuple[str, ...]
    measured: Measured

    @property
    def count(self) -> int:
        return int(self.taken_S[-1])

    @property
    def total(self) -> int:
        return len(self.rows_P)

    @cached_property
    def prompt_ids(self) -> pa.ChunkedArray:
        return self.columns["prompt_id"].take(pa.array(self.rows_P))

    def shuffled(self, epoch: int) -> np.ndarray:
        """int64[P]: the prompts in an order that each epoch has anew."""
        return permutation(derive(self.seed, "prompts", *self.label, epoch), self.total)

    def measured_P(self, column: str) -> np.ndarray:
        """float64[P]: a column of the statistics, 0 for a prompt that has none."""
        if self.measured.stats is None:
            return np.zeros(self.total)
        values = self.measured.stats[column].to_numpy().astype(np.float64)
        return np.append(values, 0.0)[self._stats_row_P]

    @cached_property
    def _stats_row_P(self) -> np.ndarray:
        """int32[P]: each prompt's row in the statistics; one past the last for a prompt that has none."""
        stats = self.measured.stats
        assert stats is not None, "asked for by measured_P alone"
        at = pc.index_in(self.prompt_ids, value_set=stats["prompt_id"].combine_chunks())
        return at.fill_null(stats.num_rows).to_numpy()


def sequential(stream: _Stream) -> np.ndarray:
    """In the order of the data set, again and again."""
    return _by_epochs(stream, lambda epoch: np.arange(stream.total))


def shuffled(stream: _Stream) -> np.ndarray:
    """In a fresh random order each epoch."""
    return _by_epochs(stream, stream.shuffled)


def difficulty(stream: _Stream) -> np.ndarray:
    """By the number in the metadata, ascending, ties in the order of the data set; each epoch alike.

    Every train prompt needs a number: where one without should go, nobody but the user knows.
    """
    order = np.argsort(_difficulties(stream), kind="stable")
    return _by_epochs(stream, lambda epoch: order)


def easy_to_hard(stream: _Stream) -> np.ndarray:
    """Prompts that were drawn least often come first, so that all are drawn once before any is drawn again; among them
    by measured pass rate, highest first; among equals in the epoch's shuffled order. The first epoch is thus shuffled.
    """
    draws_P = stream.measured_P("draws").astype(np.int64)
    for prompts in stream.measured.under_way:
        draws_P += pc.is_in(stream.prompt_ids, value_set=prompts["prompt_id"].combine_chunks()).to_numpy()
    attempts_P, passes_P = stream.measured_P("attempts"), stream.measured_P("passes")
    rate_P = np.where(attempts_P > 0, passes_P / np.where(attempts_P > 0, attempts_P, 1), UNMEASURED_PASS_RATE)
    chosen = np.empty(0, np.int64)
    for num_draws in np.unique(draws_P):
        candidates = stream.shuffled(int(num_draws))
        candidates = candidates[draws_P[candidates] == num_draws]
        chosen = np.append(chosen, candidates[np.argsort(-rate_P[candidates], kind="stable")])
        if len(chosen) >= stream.count:
            break
    return chosen[: stream.count]


def targeted(stream: _Stream) -> np.ndarray:
    """Thompson sampling of the pass rate (as BOTS, arXiv 2510.26374): one draw per prompt from its posterior
    Beta(1 + passes, 1 + failures), and the prompts whose draw is nearest data.target_pass_rate. A prompt never seen has
    the uniform prior.

    Each prompt has a uniform of its own, so its draw does not depend on the others.
    """
    from scipy.special import betaincinv

    draw_P = uniforms(derive(stream.seed, "targeted", *stream.label, len(stream.taken_S)), stream.total)
    attempts_P, passes_P = stream.measured_P("attempts"), stream.measured_P("passes")
    seen = np.flatnonzero(attempts_P > 0)
    failures = attempts_P[seen] - passes_P[seen]
    draw_P[seen] = betaincinv(1 + passes_P[seen], 1 + failures, draw_P[seen])
    distance_P = np.abs(draw_P - stream.data.target_pass_rate)
    return np.argsort(distance_P, kind="stable")[: stream.count]


def _by_epochs(stream: _Stream, plain: Callable[[int], np.ndarray]) -> np.ndarray:
    """The step's places in a sequence of epochs. A step that crosses into a new epoch takes no prompt twice: those it
    has already are moved behind the step in the new epoch's order."""
    start = int(stream.taken_S.sum()) - stream.count
    epoch, offset = divmod(start, stream.total)
    chosen = _epoch_order(epoch, stream, plain)[offset : offset + stream.count]
    if len(chosen) < stream.count:
        following = _epoch_order(epoch + 1, stream, plain)
        chosen = np.concatenate([chosen, following[: stream.count - len(chosen)]])
    return chosen


def _epoch_order(epoch: int, stream: _Stream, plain: Callable[[int], np.ndarray]) -> np.ndarray:
    """int64[P]: the order of an epoch, after the step that crosses into it moved its own prompts behind itself.

    That move touches no more places than the step has, so with two steps or more an epoch the end of the epoch before
    is its plain order; with fewer we walk up from the last epoch that began with a step.
    """
    total, ends_S = stream.total, np.cumsum(stream.taken_S)

    def crossing(index: int) -> tuple[int, int]:
        """How many prompts the step that crosses into an epoch takes, and how many of them before it."""
        step = int(np.searchsorted(ends_S, index * total))
        count = int(stream.taken_S[step])
        num_before = index * total - (int(ends_S[step]) - count)
        return (count, num_before) if num_before < count else (count, 0)

    if total >= 2 * int(stream.taken_S.max()):
        first = max(epoch - 1, 0)
    else:
        first = next(index for index in range(epoch, -1, -1) if index == 0 or crossing(index)[1] == 0)
    current = plain(first)
    for index in range(first + 1, epoch + 1):
        count, num_taken = crossing(index)
        taken = current[total - num_taken :]
        current = plain(index)
        is_taken = np.isin(current, taken)
        cut = int(np.searchsorted(np.cumsum(~is_taken), count - num_taken)) + 1 if num_taken else 0
        head, head_is_taken = current[:cut], is_taken[:cut]
        current = np.concatenate([head[~head_is_taken], head[head_is_taken], current[cut:]])
    return current


def _rows_by_dataset(columns: pa.Table, train: np.ndarray, weights: dict[str, float]) -> list[np.ndarray]:
    owner = pc.index_in(columns["dataset"], value_set=pa.array(list(weights), pa.large_string()))
    owner_of_train = owner.take(pa.array(train)).fill_null(-1).to_numpy()
    if (owner_of_train < 0).any():
        found = columns["dataset"][int(train[np.argmin(owner_of_train)])].as_py()
        raise ContractError(f"data sets must be those of data.mixture ({', '.join(weights)}), found {found!r}")
    rows = [train[owner_of_train == index] for index in range(len(weights))]
    for name, own in zip(weights, rows, strict=True):
        if not len(own):
            raise ContractError(
                f"every part of data.mixture must have train prompts, found none of {name!r}; see quarantine for what "
                "became of its rows, or take the part out"
            )
    return rows


def _shares(
    step: int, count: int, weights_D: list[float], sizes_D: list[int], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """int64[S, D], how many prompts each step takes of each data set, and int64[count], whose each place of the last
    step is. A data set that a step has exhausted gets no more of its places: the others share them by weight."""
    generator = np.random.Generator(np.random.Philox(key=derive(seed, "mixture")))
    edges = np.cumsum(weights_D) / np.sum(weights_D)
    taken, owner_SC = [], np.empty((0, count), np.int64)
    steps_at_once = max(1, DRAWS_AT_ONCE // count)
    for first in range(0, step, steps_at_once):
        draws_SC = generator.random((min(steps_at_once, step - first), count))
        owner_SC = np.minimum(np.searchsorted(edges, draws_SC, side="right"), len(edges) - 1)
        taken_SD = np.stack([(owner_SC == index).sum(axis=1) for index in range(len(edges))], axis=1)
        full = np.flatnonzero((taken_SD > sizes_D).any(axis=1))
        if len(full):
            owner_SC[full], left_SD = _owners_within(draws_SC[full], weights_D, sizes_D)
            taken_SD[full] = sizes_D - left_SD
        taken.append(taken_SD)
    return np.concatenate(taken), owner_SC[-1]


def _owners_within(draws_SC: np.ndarray, weights_D: list[float], sizes_D: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """int64[S, count], the data set of each place, none more often in a step than it has prompts; int64[S, D], how many
    each has left."""
    left_SD, owner_SC = np.tile(sizes_D, (len(draws_SC), 1)), np.empty(draws_SC.shape, np.int64)
    for place in range(draws_SC.shape[1]):
        edges_SD = np.cumsum(np.where(left_SD > 0, weights_D, 0.0), axis=1)
        owner_SC[:, place] = (edges_SD <= draws_SC[:, place, None] * edges_SD[:, -1:]).sum(axis=1)
        left_SD[np.arange(len(left_SD)), owner_SC[:, place]] -= 1
    return owner_SC, left_SD


def _difficulties(stream: _Stream) -> np.ndarray:
    """float64[P]. Raises ContractError that names prompts without a number."""
    values = stream.columns["difficulty"].take(pa.array(stream.rows_P))
    if values.null_count:
        missing = stream.prompt_ids.filter(pc.is_null(values))
        shown = ", ".join(missing.slice(0, NUM_SHOWN).to_pylist()) + (", ..." if len(missing) > NUM_SHOWN else "")
        raise ContractError(
            f"order difficulty needs a number in the metadata field {stream.data.difficulty_field!r} of every train "
            f"prompt, found none in {len(missing)} of {stream.total}: {shown}; set data.difficulty_field to the field "
            "that holds it, or drop those prompts with a custom cleaning operator"
        )
    return values.to_numpy()


def _number(metadata: Any, name: str) -> float | None:
    """The finite number under a name, or under a dotted path; a text that spells one counts (CSV has nothing else).

    >>> _number({"info": {"level": "3"}}, "info.level"), _number({"level": True}, "level")
    (3.0, None)
    """
    value = metadata.get(name) if isinstance(metadata, dict) else None
    if value is None and isinstance(metadata, dict) and "." in name:
        head, _, rest = name.partition(".")
        return _number(metadata.get(head), rest)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


ORDERS: dict[str, Callable[[_Stream], np.ndarray]] = {
    "shuffled": shuffled,
    "sequential": sequential,
    "difficulty": difficulty,
    "easy_to_hard": easy_to_hard,
    "targeted": targeted,
}
