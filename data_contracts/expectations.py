"""What can be expected of a table's rows. A rule is declared once and checked by two engines.

`Rule.faults` is the vectorised Arrow check that runs on every internal table. The same rule becomes a Great
Expectations expectation for the report: a built-in one where there is one (BUILT_IN), else one of our own that carries
the rule's name and asks `faults`. Nulls pass every rule except `given_when`: nullability is the schema's matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.schemas import canonical_json

Faults = Callable[[pa.Table], Any]
"""Rows that break a rule: a boolean Arrow array of the table's length; null counts as no fault."""


@dataclass(frozen=True)
class Rule:
    """`name`, in snake case, is the expectation's too; `must` completes "COLUMN must ...".

    `is_fast` is false for rules that look at values in Python; check_table leaves them to the suite.
    """

    name: str
    columns: tuple[str, ...]
    must: str
    faults: Faults
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_fast: bool = True


def one_of(column: str, *values: str) -> Rule:
    known = pa.array(values, pa.large_string())

    def faults(table: pa.Table) -> Any:
        return pc.and_(pc.is_valid(table[column]), pc.invert(pc.is_in(table[column], value_set=known)))

    must = f"be one of {', '.join(values)}"
    return Rule("expect_column_values_to_be_in_set", (column,), must, faults, {"value_set": list(values)})


def at_least(column: str, low: float) -> Rule:
    """NaN breaks it too."""

    def faults(table: pa.Table) -> Any:
        return pc.invert(pc.greater_equal(table[column], low))

    must = f"be at least {low}"
    return Rule("expect_column_values_to_be_at_least", (column,), must, faults)


def matches(column: str, pattern: str, must: str) -> Rule:
    """`pattern` must be understood alike by RE2 and Python."""

    def faults(table: pa.Table) -> Any:
        return pc.invert(pc.match_substring_regex(table[column], pattern))

    return Rule("expect_column_values_to_match_pattern", (column,), must, faults)


def filled(column: str) -> Rule:
    """A text or list of length 1 or more."""

    def faults(table: pa.Table) -> Any:
        values = table[column]
        is_list = pa.types.is_large_list(values.type)
        return pc.equal(pc.list_value_length(values) if is_list else pc.binary_length(values), 0)

    return Rule("expect_column_values_to_be_filled", (column,), "not be empty", faults)


def finite(column: str, unless: str | None = None) -> Rule:
    """Numbers, or numbers within lists and maps; `unless` names a column that excuses the row where it is given."""

    def faults(table: pa.Table) -> Any:
        excused = pc.is_valid(table[unless]) if unless else pa.scalar(False)
        return pc.and_(_any_element(table[column], lambda leaf: pc.invert(pc.is_finite(leaf))), pc.invert(excused))

    must = "be finite" + (f" unless {unless} is given" if unless else "")
    columns = (column, unless) if unless else (column,)
    return Rule(f"expect_column_values_to_be_finite{'_unless_excused' if unless else ''}", columns, must, faults)


def json_text(column: str, kind: type | tuple[type, ...] = (dict, list)) -> Rule:
    """Canonical JSON (sorted keys, no spaces) of an object, a list or either."""

    def faults(table: pa.Table) -> Any:
        encoded = table[column].combine_chunks().dictionary_encode()
        texts = encoded.dictionary
        exponents = pc.match_substring_regex(texts, "[0-9]e").to_pylist()
        rows = zip(texts.to_pylist(), exponents, strict=True)
        is_fault = pa.array([not _is_canonical(text, has_exponent, kind) for text, has_exponent in rows], pa.bool_())
        return pc.fill_null(is_fault.take(encoded.indices), False)

    kinds = kind if isinstance(kind, tuple) else (kind,)
    must = f"be canonical JSON of {' or '.join('an object' if one is dict else 'a list' for one in kinds)}"
    return Rule("expect_column_values_to_be_canonical_json", (column,), must, faults, is_fast=False)


def aligned(column: str, other: str) -> Rule:
    """Lists of equal length in every row."""

    def faults(table: pa.Table) -> Any:
        return pc.not_equal(pc.list_value_length(table[column]), pc.list_value_length(table[other]))

    must = f"have the length of {other}"
    return Rule("expect_column_pair_lists_to_be_aligned", (column, other), must, faults)


def within(low: str, high: str) -> Rule:
    def faults(table: pa.Table) -> Any:
        return pc.greater(table[low], table[high])

    return Rule("expect_column_pair_values_to_be_ordered", (low, high), f"be at most {high}", faults)


def given_when(column: str, other: str, *values: str | bool) -> Rule:
    """`column` is given (not null) exactly where `other` is one of `values`; without values, where it is given too."""

    def faults(table: pa.Table) -> Any:
        wanted = pc.is_in(table[other], value_set=pa.array(values)) if values else pc.is_valid(table[other])
        return pc.not_equal(pc.is_valid(table[column]), wanted)

    must = f"be given exactly where {other} is {' or '.join(map(str, values)) if values else 'given'}"
    return Rule("expect_column_to_be_given_exactly_when", (column, other), must, faults)


def implies(column: str, value: Any, other: str, *values: Any) -> Rule:
    """Where `column` is `value`, `other` is one of `values`."""

    def faults(table: pa.Table) -> Any:
        applies = pc.equal(table[column], pa.scalar(value, table.schema.field(column).type))
        allowed = pc.is_in(table[other], value_set=pa.array(values, table.schema.field(other).type))
        return pc.and_(applies, pc.invert(allowed))

    must = f"go with {other} {' or '.join(map(str, values))} where it is {value}"
    return Rule("expect_column_value_to_imply_another", (column, other), must, faults)


def logprobs_where_written(column: str, mask: str) -> Rule:
    """Where the mask is true a log-probability is finite and at most 0 (rounding apart); elsewhere it means nothing."""

    def faults(table: pa.Table) -> Any:
        rows = table.select([column, mask]).combine_chunks()
        has_both = pc.equal(pc.list_value_length(rows[column]), pc.list_value_length(rows[mask])).fill_null(False)
        kept = pc.indices_nonzero(has_both)
        both = rows.take(kept).combine_chunks()
        values, owners = _flat(both[column])
        written, _ = _flat(both[mask])
        is_good = pc.and_(pc.is_finite(values), pc.less_equal(values, 1e-3)).fill_null(False)
        is_bad = pc.and_(written.fill_null(False), pc.invert(is_good)).to_numpy(zero_copy_only=False)
        return _rows_with(kept.to_numpy()[owners[is_bad]], table.num_rows)

    must = f"be finite and at most 0 where {mask} is true"
    return Rule("expect_logprobs_where_tokens_were_written", (column, mask), must, faults)


def spans_within(column: str, tokens: str) -> Rule:
    """Spans {start, end} of a list column lie, ordered, within the row's list of tokens."""

    def faults(table: pa.Table) -> Any:
        spans, owners = _flat(table[column])
        lengths = pc.list_value_length(table[tokens]).to_numpy(zero_copy_only=False)
        start, end = (spans.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end"))
        return _rows_with(owners[(start < 0) | (start > end) | (end > lengths[owners])], table.num_rows)

    return Rule("expect_spans_within_tokens", (column, tokens), f"lie within {tokens}", faults)


def same_keys(column: str, other: str) -> Rule:
    """Two maps with equal keys in every row. Keys of `column` with a slash (function/metric) stand in it alone."""

    def faults(table: pa.Table) -> Any:
        pairs = zip(table[column].to_pylist(), table[other].to_pylist(), strict=True)
        return pa.array(
            [{key for key, _ in a if "/" not in key} != {key for key, _ in b} for a, b in pairs], pa.bool_()
        )

    return Rule("expect_column_pair_maps_to_have_equal_keys", (column, other), f"have the keys of {other}", faults)


def unique(*columns: str) -> Rule:
    def faults(table: pa.Table) -> Any:
        return _rows_with(repeated_rows(table, columns), table.num_rows)

    name = f"expect_{'compound_columns' if len(columns) > 1 else 'column_values'}_to_be_unique"
    return Rule(name, columns, "be unique", faults)


def repeated_rows(table: pa.Table, columns: tuple[str, ...]) -> np.ndarray:
    """int64: rows whose key occurred in an earlier row."""
    keys = table.select(list(columns)).append_column("__row__", pa.array(np.arange(table.num_rows)))
    first = keys.group_by(list(columns), use_threads=False).aggregate([("__row__", "min")])["__row___min"].to_numpy()
    return np.setdiff1d(np.arange(table.num_rows), first, assume_unique=True)


def _flat(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """The elements of a list column, and the row that each belongs to."""
    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    return pc.list_flatten(array), pc.list_parent_indices(array).to_numpy(zero_copy_only=False)


def _map_items(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """The values of a map column, and the row that each belongs to. `items` of a slice are those of the whole array."""
    parts, counts = [pa.array([], column.type.item_type)], [np.array([], np.int64)]
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        parts.append(chunk.items.slice(offsets[0], offsets[-1] - offsets[0]))
        counts.append(np.diff(offsets))
    return pa.concat_arrays(parts), np.repeat(np.arange(len(column)), np.concatenate(counts))


def _any_element(column: pa.ChunkedArray, is_fault: Callable[[Any], Any]) -> Any:
    """Rows of numbers, lists of numbers or maps to numbers, in which some number is a fault."""
    if pa.types.is_floating(column.type):
        return is_fault(column)
    if pa.types.is_map(column.type):
        leaves, owners = _map_items(column)
    else:
        leaves, owners = _flat(column)
    is_bad = is_fault(leaves).fill_null(False).to_numpy(zero_copy_only=False)
    return _rows_with(owners[is_bad], len(column))


def _rows_with(rows: np.ndarray, total: int) -> pa.Array:
    is_fault = np.zeros(total, dtype=bool)
    is_fault[rows] = True
    return pa.array(is_fault)


def _is_canonical(text: str, has_exponent: bool, kind: type | tuple[type, ...]) -> bool:
    """Most texts are told by a quick reader; it writes exponents otherwise, so that those get the slow way."""
    if not has_exponent:
        try:
            value = orjson.loads(text)
            if orjson.dumps(value, option=orjson.OPT_SORT_KEYS) == text.encode():
                return isinstance(value, kind)
        except ValueError:  # also numbers beyond 64 bits
            pass
    try:
        value = json.loads(text)
        return isinstance(value, kind) and canonical_json(value) == text
    except ValueError:
        return False


def expectation(rule: Rule, position: int) -> Any:
    """The rule as a Great Expectations expectation that finds its way back by `position`. The import takes seconds."""
    import great_expectations.expectations as built_in

    is_single = len(rule.columns) == 1
    domain: dict[str, Any] = {"column": rule.columns[0]} if is_single else {"column_list": list(rule.columns)}
    if rule.name in BUILT_IN:
        kind = getattr(built_in, _class_name(rule.name))
        return kind(**domain, **rule.arguments, meta={"position": position})
    identity = f"{rule.name}: {', '.join(rule.columns)} must {rule.must}"
    _DECLARED[identity] = rule
    if not is_single:
        domain["ignore_row_if"] = "never"  # nulls are the rule's to judge
    return _own_expectation(rule.name, is_single)(**domain, rule=identity, meta={"position": position})


@cache
def _own_expectation(name: str, is_single: bool) -> Any:
    """Our named expectation over one column or several. Its parameter `rule` names the rule that its metric asks."""
    import pandas as pd
    from great_expectations.execution_engine import PandasExecutionEngine
    from great_expectations.expectations import expectation as bases
    from great_expectations.expectations.metrics import map_metric_provider as metrics

    def is_kept(cls: type, values: Any, rule: str, **_: Any) -> Any:
        declared = _DECLARED[rule]
        frame = values.to_frame(declared.columns[0]) if is_single else values[list(declared.columns)]
        faults = declared.faults(pa.Table.from_pandas(frame, preserve_index=False))
        return pd.Series(~faults.fill_null(False).to_numpy(zero_copy_only=False), index=frame.index)

    base: Any
    provider: Any
    if is_single:
        base, provider = bases.ColumnMapExpectation, metrics.ColumnMapMetricProvider
        condition, metric = metrics.column_condition_partial, f"column_values.{name}"
    else:
        base, provider = bases.MulticolumnMapExpectation, metrics.MulticolumnMapMetricProvider
        condition, metric = metrics.multicolumn_condition_partial, f"multicolumn_values.{name}"
    metric_body = {
        "condition_metric_name": metric,
        "condition_value_keys": ("rule",),
        "_pandas": condition(engine=PandasExecutionEngine)(is_kept),
    }
    type(f"Metric{_class_name(name)}", (provider,), metric_body)
    body = {
        "__annotations__": {"rule": str},
        "__module__": __name__,
        "__doc__": "A rule of data_contracts.expectations.",
        "map_metric": metric,
        "success_keys": ("rule", "mostly"),
    }
    return type(base)(_class_name(name), (base,), body)


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


# Those that the library computes on whole columns; others of its own ask Python about each value.
BUILT_IN = {
    "expect_column_values_to_be_in_set",
    "expect_column_values_to_be_unique",
    "expect_compound_columns_to_be_unique",
}

_DECLARED: dict[str, Rule] = {}  # rules that an expectation refers to, by their words
