"""Is this table what its record promises? `check_table` is quick and raises; `validate` reports every check."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.errors import ContractError
from data_contracts.expectations import Rule, expectation
from data_contracts.schemas import RECORDS, Record
from data_contracts.suites import SUITES

NUM_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 120


@dataclass(frozen=True)
class Check:
    """One expectation and what came of it. `column` joins several with a comma; `examples` are texts."""

    name: str
    column: str
    ok: bool
    unexpected_count: int
    examples: list[str]
    detail: str


@dataclass(frozen=True)
class Report:
    """All checks of a table, the schema first."""

    record: str
    rows: int
    ok: bool
    checks: list[Check]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def check_table(table: pa.Table, record: str) -> None:
    """Schema, nulls, unique keys and every vectorised rule of the record's suite. Edits nothing.

    Raises ContractError that says what must hold, and the first row, column and value where it does not.
    """
    kind = _record(record)
    if mismatch := _schema_mismatch(table.schema, kind):
        raise ContractError(f"{record}: {mismatch}")
    for column in kind.schema:
        if found := _null_fault(table[column.name], column):
            raise ContractError(f"{record}.{column.name} {found}")
    for rule in SUITES[record]:
        if not rule.is_fast:
            continue
        rows = pc.indices_nonzero(rule.faults(table)).to_numpy()
        if len(rows):
            raise ContractError(f"{record}.{_fault_text(table, rule, rows)}")


def validate(table: pa.Table, record: str) -> Report:
    """Run the record's suite in Great Expectations. A table of the wrong schema gets that one check, failed."""
    kind = _record(record)
    mismatch = _schema_mismatch(table.schema, kind)
    schema = Check("expect_table_to_have_schema", "", not mismatch, int(bool(mismatch)), [], mismatch or "as declared")
    if mismatch:
        return Report(record, table.num_rows, False, [schema])
    nulls = [_null_check(table[column.name], column) for column in kind.schema if not column.nullable]
    checks = [schema, *nulls, *_run_suite(table, SUITES[record])]
    return Report(record, table.num_rows, all(check.ok for check in checks), checks)


def merged(reports: list[Report]) -> Report:
    """One report on all blocks of a table: faults are summed, the first examples kept."""
    first, *rest = reports
    for report in rest:
        checks = [_merged_check(one, other) for one, other in zip(first.checks, report.checks, strict=True)]
        first = Report(first.record, first.rows + report.rows, first.ok and report.ok, checks)
    return first


def _merged_check(one: Check, other: Check) -> Check:
    return replace(
        one,
        ok=one.ok and other.ok,
        unexpected_count=one.unexpected_count + other.unexpected_count,
        examples=[*one.examples, *other.examples][:NUM_EXAMPLES],
        detail=one.detail if not one.ok or other.ok else other.detail,
    )


def refuse_failed(report: Report) -> None:
    """Raise ContractError with every check that did not hold."""
    failed = [f"{check.name} on {check.column}: {check.detail}" for check in report.checks if not check.ok]
    if failed:
        raise ContractError(f"the table {report.record} must meet its contract, found " + "; ".join(failed))


def counts_by_reason(quarantine: pa.Table) -> dict[str, int]:
    """Rows of a quarantine table by reason, most frequent first."""
    counts = Counter(quarantine["reason"].to_pylist())
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _record(name: str) -> Record:
    if name not in RECORDS:
        raise ContractError(f"a table must be of a known record ({', '.join(RECORDS)}), got {name!r}")
    return RECORDS[name]


def _schema_mismatch(found: pa.Schema, record: Record) -> str | None:
    """The first difference in words; null when there is none. Column docs may differ: they are not the contract."""
    wanted = record.schema
    if extra := [name for name in found.names if name not in wanted.names]:
        return f"the table must not have a column {extra[0]}"
    if missing := [name for name in wanted.names if name not in found.names]:
        return f"the table must have the column {missing[0]}, found {', '.join(found.names) or 'no columns'}"
    for index, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if want.name != have.name:
            return f"column {index} must be {want.name}, found {have.name}"
        if want.type != have.type:
            return f"column {want.name} must have type {want.type}, found {have.type}"
        if want.nullable != have.nullable:
            return f"column {want.name} must {'allow' if want.nullable else 'not allow'} nulls in its schema"
    for key, value in wanted.metadata.items():
        have = (found.metadata or {}).get(key)
        if have != value:
            shown = "none" if have is None else have.decode(errors="replace")
            return f"the schema's metadata must say {key.decode()} {value.decode()}, found {shown}"
    return None


def _null_fault(values: pa.ChunkedArray, column: pa.Field) -> str | None:
    if column.nullable or not values.null_count:
        return None
    row = pc.indices_nonzero(pc.is_null(values))[0].as_py()
    return f"must not be null, found {values.null_count} null of {len(values)} rows, the first in row {row}"


def _null_check(values: pa.ChunkedArray, column: pa.Field) -> Check:
    fault = _null_fault(values, column)
    return Check(
        "expect_column_values_to_not_be_null",
        column.name,
        not fault,
        values.null_count,
        [],
        fault or "must not be null",
    )


def _fault_text(table: pa.Table, rule: Rule, rows: np.ndarray) -> str:
    row = int(rows[0])
    values = ", ".join(_shown(table[column][row].as_py()) for column in rule.columns)
    more = f" ({len(rows)} rows in all)" if len(rows) > 1 else ""
    return f"{', '.join(rule.columns)} must {rule.must}, found {values} in row {row}{more}"


def _run_suite(table: pa.Table, rules: tuple[Rule, ...]) -> list[Check]:
    """One check per rule. Great Expectations says whether and how often; the examples are rows of the table."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the library is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the library are not ours to mend
        results = _results(table, rules)
    return [_check(table, rule, result) for rule, result in zip(rules, results, strict=True)]


def _results(table: pa.Table, rules: tuple[Rule, ...]) -> list[Any]:
    """Results in the order of the rules, without log lines or progress bars."""
    import great_expectations as gx
    import pandas as pd
    from great_expectations.data_context.types.base import ProgressBarsConfig

    for name in ("great_expectations", "great_expectations.data_context.types.base"):  # the second sets its own level
        logging.getLogger(name).setLevel(logging.ERROR)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    asset = context.data_sources.add_pandas("tables").add_dataframe_asset("table")
    # Arrow-backed columns keep null apart from NaN, and lists as lists.
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    batch = asset.add_batch_definition_whole_dataframe("whole").get_batch({"dataframe": frame})
    suite = gx.ExpectationSuite("suite", expectations=[expectation(rule, at) for at, rule in enumerate(rules)])
    outcome = batch.validate(suite, result_format={"result_format": "BASIC", "partial_unexpected_count": 0})
    return sorted(outcome.results, key=lambda result: result.expectation_config.meta["position"])


def _check(table: pa.Table, rule: Rule, result: Any) -> Check:
    column = ", ".join(rule.columns)
    if not result.success and "unexpected_count" not in result.result:
        raise ContractError(f"the check {rule.name} on {column} could not run: {result.exception_info}")
    rows = pc.indices_nonzero(rule.faults(table)).to_numpy() if not result.success else np.array([], np.int64)
    examples = [
        f"row {row}: " + ", ".join(_shown(table[name][int(row)].as_py()) for name in rule.columns)
        for row in rows[:NUM_EXAMPLES]
    ]
    count = int(result.result.get("unexpected_count", 0))
    return Check(rule.name, column, bool(result.success), count, examples, f"must {rule.must}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_EXAMPLE_CHARACTERS else text[: MAX_EXAMPLE_CHARACTERS - 3] + "..."
