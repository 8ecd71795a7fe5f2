"""`rft show`: rows of a run's tables, filtered by step and by an SQL condition that can read nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from rich.console import Console

from data_contracts.refs import MAIN
from data_contracts.retention import PRUNED_STAGES
from data_contracts.schemas import RECORDS
from flows.inspect.deleted import deletions_of, refuse_deleted
from flows.inspect.run import AT_STEP, RunView, near, open_run
from flows.inspect.terminal import print_columns
from rft_core.errors import SettingsError
from rft_core.sql import confined_connection

TEXT_SHOWN = 120
TOKENS_SHOWN = 6
_ROW = "__row__"


def show(
    root: str,
    run: str,
    record: str,
    *,
    step: int | None = None,
    where: str | None = None,
    limit: int | None = 20,
    phase: str | None = None,
) -> pa.Table:
    """The rows of a record that the run's ledger names, with `at_step`, the step that they belong to; of a run with
    phases those of `phase`, or of all that have the record, with the phase of each row in the column `phase`.

    `record` is a record (training stages) or `evaluation-rollouts`, `evaluation-rewards`. `where` is an SQL condition
    over the columns. Raises SettingsError when the record, the step or the condition is wrong, DeletedTable when no row
    that was asked for is left.
    """
    view = open_run(root, run)
    if record not in TABLES:
        raise SettingsError(f"RECORD must be one of {', '.join(TABLES)}, got {record!r}: {near(record, TABLES)}")
    table = _rows_of(view.of_phase(phase), record, step) if phase else _rows_of_all(view, record, step)
    if where is not None:
        table = _filter(table, where, limit)
    return table if limit is None else table.slice(0, limit)


def left_out(root: str, run: str, record: str, step: int | None = None, phase: str | None = None) -> list[str]:
    """A sentence for each deletion because of which `show` gives fewer rows than there were."""
    stage = _stage_of(record)
    if stage not in PRUNED_STAGES or (record in DATASETS and step is None):  # the whole data set stays
        return []
    view = open_run(root, run)
    return [
        deletion.sentence
        for deletion in deletions_of(view.of_phase(phase) if phase else view, [stage])
        if step is None or step in deletion.steps
    ]


def jsonl_lines(table: pa.Table) -> Iterator[str]:
    """Complete rows, one JSON object a line."""
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            yield json.dumps(row, ensure_ascii=False, default=_bytes_as_text)


def print_rows(table: pa.Table, record: str, console: Console) -> None:
    """The record's main columns: long texts cut, token lists by their first tokens; then the names of the others."""
    names = [name for name in ("phase", *SHOWN[record]) if name in table.column_names]
    if table.num_rows == 0:
        console.print("no rows", style="dim")
        return
    rows = [
        [_short(value) for value in row.values()] for row in table.select(names).to_pylist(maps_as_pydicts="strict")
    ]
    print_columns(console, record, names, rows)
    others = [name for name in table.column_names if name not in names]
    if others and console.is_terminal:
        console.print(f"also: {', '.join(others)} (--format jsonl shows all)", style="dim", highlight=False)


def _rows_of_all(view: RunView, record: str, step: int | None) -> pa.Table:
    """Where no phase has such rows, what is wrong is said of the newest."""
    if view.phases == [MAIN]:
        return _rows_of(view, record, step)
    name, stages = TABLES[record]
    stages = ("prompts",) if record in DATASETS and step is not None else stages
    having = [
        part for part in view.by_phase() if any(step in (None, entry.step) for entry, _ in part.refs(stages, name))
    ]
    tables = [(part.phase, _rows_of(part, record, step)) for part in having or [view.of_phase()]]
    return pa.concat_tables(
        rows.append_column("phase", pa.repeat(pa.scalar(phase, pa.large_string()), rows.num_rows))
        for phase, rows in tables
    )


def _rows_of(view: RunView, record: str, step: int | None) -> pa.Table:
    name, stages = TABLES[record]
    found = view.refs(stages, name)
    if not found:
        raise SettingsError(f"run {view.name} has no {record} table yet")
    if record in (*DATASETS, "quarantine"):
        return _data_rows(view, record, step)
    steps = sorted({entry.step for entry, _ in found})
    if step is not None and step not in steps:
        raise SettingsError(f"--step must be among the steps with {record} ({_span(steps)}), got {step}")
    return _rows_left(view, record, step)


def _stage_of(shown: str) -> str:
    """The stage whose tables retention deletes under that name."""
    return "prompts" if shown in DATASETS else shown.replace("_", "-")


def _rows_left(view: RunView, shown: str, step: int | None) -> pa.Table:
    """The rows that were not deleted. Raises DeletedTable when there are none because all were."""
    record, stages = (shown, ("prompts",)) if shown in DATASETS else TABLES[shown]
    table = view.table(stages, record, step=step)
    if not table.num_rows and _stage_of(shown) in PRUNED_STAGES:
        steps = {entry.step for entry, _ in view.refs(stages, record)}
        refuse_deleted(view, _stage_of(shown), steps if step is None else {step})
    return table


def _data_rows(view: RunView, record: str, step: int | None) -> pa.Table:
    """Without a step the whole data set; with one, the prompts or examples that were chosen for it."""
    if step is None or record == "quarantine":
        return view.table("data", record)
    steps = [entry.step for entry, _ in view.refs("prompts", record)]
    if step not in steps:
        raise SettingsError(f"--step must be among the steps with {record} ({_span(steps)}), got {step}")
    return _rows_left(view, record, step)


def _filter(table: pa.Table, where: str, limit: int | None) -> pa.Table:
    """Rows that meet the condition, in order. The connection sees this table and nothing else: no file, no network."""
    import duckdb

    connection = confined_connection()
    query = f"SELECT {_ROW} FROM t WHERE (\n{where}\n) ORDER BY {_ROW}"
    try:
        connection.register("t", table.append_column(_ROW, pa.array(range(table.num_rows), pa.int64())))
        if len(duckdb.extract_statements(query)) != 1:
            raise SettingsError(f"--where must be a single SQL condition, got {where!r}")
        found = connection.execute(query if limit is None else f"{query} LIMIT {int(limit)}").fetchall()
    except duckdb.Error as error:
        raise SettingsError(
            f"--where must be an SQL condition, got {where!r}: {str(error).splitlines()[0]}; "
            f"the columns are {', '.join(table.column_names)}"
        ) from error
    finally:
        connection.close()
    return table.take(pa.array([row for (row,) in found], pa.int64()))


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        first = ", ".join(_short(item) for item in value[:TOKENS_SHOWN])
        return f"[{first}{', ...' if len(value) > TOKENS_SHOWN else ''}] ({len(value)})"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_short(item)}" for key, item in value.items())
    if isinstance(value, bytes):
        value = _bytes_as_text(value)
    text = str(value)
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 3]}..."


def _bytes_as_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    raise TypeError(f"no JSON form of {type(value).__name__}")


def _span(steps: list[int]) -> str:
    return f"{min(steps)}..{max(steps)}" if steps else "none yet"


DATASETS = ("prompts", "examples")

# What RECORD may be: the record, and the stages whose tables it means.
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompts": ("prompts", ("data",)),
    "examples": ("examples", ("data",)),
    "prompt_stats": ("prompt_stats", ("prompts",)),
    "quarantine": ("quarantine", ("data",)),
    "rollouts": ("rollouts", ("rollouts",)),
    "rewards": ("rewards", ("rewards",)),
    "token_scores": ("token_scores", ("token-scores",)),
    "advantages": ("advantages", ("advantages",)),
    "updates": ("updates", ("update",)),
    "evaluations": ("evaluations", ("evaluation",)),
    "evaluation-rollouts": ("rollouts", ("evaluation-rollouts",)),
    "evaluation-rewards": ("rewards", ("evaluation-rewards",)),
}

_ROLLOUT_COLUMNS = [AT_STEP, "rollout_id", "policy_version", "finish_reason", "completion_token_ids", "completion_text"]
_REWARD_COLUMNS = [AT_STEP, "rollout_id", "reward", "components", "status", "reason"]

# Columns of the table view; `--format jsonl` has all of them.
SHOWN: dict[str, list[str]] = {
    "prompts": ["prompt_id", "split", "prompt_text", "answer", "source", "source_row"],
    "examples": ["example_id", "split", "kind", "messages", "label", "source", "source_row"],
    "prompt_stats": [AT_STEP, *RECORDS["prompt_stats"].schema.names],
    "quarantine": ["source", "source_row", "reason", "detail", "raw"],
    "rollouts": _ROLLOUT_COLUMNS,
    "rewards": _REWARD_COLUMNS,
    "token_scores": [AT_STEP, "rollout_id", "segment", "scorer", "model_id", "values"],
    "advantages": [AT_STEP, "rollout_id", "advantage", "weight", "is_trained", "drop_reason"],
    "updates": [
        "policy_version",
        "optimizer_step",
        "loss",
        "entropy",
        "kl",
        "grad_norm",
        "learning_rate",
        "trained_rows",
        "trained_tokens",
        "effective_sample_size",
        "skipped",
    ],
    "evaluations": [name for name in RECORDS["evaluations"].schema.names if name != "policy_id"],
    "evaluation-rollouts": _ROLLOUT_COLUMNS,
    "evaluation-rewards": _REWARD_COLUMNS,
}
