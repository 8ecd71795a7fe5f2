"""Check data the way the data stage would, without a run: counts, reasons with their lines, checks of the columns."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from data_contracts.reasons import REASONS
from data_contracts.schemas import QUARANTINE
from data_contracts.validation import Report, check_table, merged, validate
from rft_core.data.dataset import Dataset
from rft_core.data.row_pipeline import RowSettings
from rft_core.data.settings import DataSettings, RecordName
from rft_core.errors import ContractError, ModelUnreadable, RowsRejected, SettingsError
from rft_core.model_folder import resolve_model_path
from rft_core.phases import phase_recipes, without_phases
from rft_core.recipes import data_with_overrides, load_recipe
from tasks.sources import blocks_of, dataset_record

DEFAULT_RECIPE = "quickstart"
NUM_LINES, NUM_ROWS = 10, 20  # shown of each reason; shown in all
MAX_RAW_CHARACTERS = 400


@dataclass
class Reasons:
    """Every reason that occurred: how often, what was done, on which lines first, and the first rows themselves."""

    counts: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    lines: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, quarantine: pa.Table) -> None:
        columns = ("reason", "action", "source", "source_row")
        for reason, action, source, row in zip(*(quarantine[name].to_pylist() for name in columns), strict=True):
            self.counts[reason, action] += 1
            if len(self.lines[reason, action]) < NUM_LINES:
                self.lines[reason, action].append(f"{source}:{row}")
        self.rows += [_shown(row) for row in quarantine.slice(0, NUM_ROWS - len(self.rows)).to_pylist()]

    def to_json(self) -> list[dict[str, Any]]:
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return [
            {
                "reason": reason,
                "action": action,
                "rows": count,
                "lines": self.lines[reason, action],
                "meaning": f"the row {REASONS[reason].meaning}",
            }
            for (reason, action), count in ordered
        ]


def validate_data(settings: RowSettings, quarantine: Path | None = None) -> dict[str, Any]:
    """What the data stage would make of the data. `ok` says whether a run would take it, `problem` why not.

    `quarantine` is written as the rows come: Parquet if it ends so, else JSON lines.
    """
    dataset, reasons = Dataset(settings.data), Reasons()
    record = dataset_record(settings.data)
    problem = None
    reports: list[Report] = []
    with _writer(quarantine) as write:
        try:
            for block in blocks_of(dataset, settings):
                check_table(block.table, record)
                reports.append(validate(block.table, record))
                reasons.add(block.quarantine)
                write(block.quarantine)
        except RowsRejected as rejected:
            problem = str(rejected)
            reasons.add(rejected.quarantine)
            write(rejected.quarantine)
        except ContractError as error:  # of the file as a whole: no row was judged
            problem = str(error)
    checks = merged(reports).to_json()["checks"] if reports else []
    failed = [f"{check['name']} on {check['column']}: {check['detail']}" for check in checks if not check["ok"]]
    return {
        "ok": problem is None and not failed,
        "record": settings.data.record,
        "problem": problem or "; ".join(failed) or None,
        "tokenizer": str(settings.model_folder) if settings.model_folder else None,
        "counts": dataset.summary(),
        "notes": dataset.notes,
        "reasons": reasons.to_json(),
        "first_rows": reasons.rows,
        "checks": checks,
    }


def validation_settings(
    root: Path, path: str, record: RecordName, recipe: str | None, sets: list[str], without_tokenizer: bool
) -> RowSettings:
    """The recipe's data settings with this source and record; without a recipe the defaults. Of a recipe with phases
    the first that reads such records counts.

    A model that is not there is an error when the recipe names it, and no tokenizer otherwise.
    """
    base = load_recipe(recipe or DEFAULT_RECIPE, sets if recipe else [])
    phases = list(phase_recipes(base).values())
    own = next((own for own in phases if own.data.record == record), phases[0])
    changes: dict[str, Any] = {"source": _absolute(path), "mixture": [], "heldout_source": None, "record": record}
    if not recipe:
        data = _with_sets(DataSettings(**changes), sets)
        reward = None
    else:
        data = DataSettings(**{**own.data.model_dump(), **changes})
        reward = without_phases(own).reward
    folder = None
    if not without_tokenizer:
        try:
            folder = resolve_model_path(base.model.path, root)
        except (ModelUnreadable, SettingsError):
            if recipe:
                raise
    return RowSettings(data, reward, folder, base.model.chat_template)


def _with_sets(data: DataSettings, sets: list[str]) -> DataSettings:
    if not sets:
        return data
    if foreign := [text for text in sets if not text.startswith("data.")]:
        raise SettingsError(f"without --recipe only data.* can be set, got {foreign[0]}")
    return data_with_overrides(data, sets)


def _absolute(path: str) -> str:
    """A local path as the data stage wants it; URLs and named sources as they are."""
    return path if ":" in path else str(Path(path).expanduser().resolve())


@contextmanager
def _writer(path: Path | None) -> Iterator[Any]:
    """A function that appends a quarantine table to the file."""
    if path is None:
        yield lambda table: None
        return
    with ExitStack() as stack:
        if path.suffix == ".parquet":
            writer = stack.enter_context(pq.ParquetWriter(path, QUARANTINE.schema))
            yield writer.write_table
        else:
            file = stack.enter_context(open(path, "w", encoding="utf-8"))
            yield lambda table: file.writelines(
                json.dumps({**row, "raw": _text(row["raw"])}, ensure_ascii=False) + "\n" for row in table.to_pylist()
            )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "raw": _text(row["raw"])[:MAX_RAW_CHARACTERS]}


def print_validation(result: dict[str, Any], console: Console) -> None:
    from flows.inspect.terminal import print_columns, print_plain

    print_columns(console, result["record"], ["what", "rows"], [[name, count] for name, count in _totals(result)])
    for note in result["notes"]:
        print_plain(console, note)
    if result["tokenizer"] is None:
        print_plain(console, "checked without a tokenizer: lengths, BOS, EOS and masks were not looked at")
    columns = ["reason", "action", "rows", "lines"]
    reasons = [[row["reason"], row["action"], row["rows"], _lines(row)] for row in result["reasons"]]
    print_columns(console, "reasons", columns, reasons)
    rows = [[row["source_row"], row["reason"], row["detail"], row["raw"][:60]] for row in result["first_rows"][:5]]
    print_columns(console, "first rows", ["line", "reason", "detail", "raw"], rows)
    checks = [[check["name"], check["column"], "ok" if check["ok"] else check["detail"]] for check in result["checks"]]
    print_columns(console, "checks", ["expectation", "column", "result"], checks)
    print_plain(console, "ok" if result["ok"] else f"would not pass: {result['problem']}")


def _totals(result: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in result["counts"].items() if name not in REASONS]


def _lines(reason: dict[str, Any]) -> str:
    more = reason["rows"] - len(reason["lines"])
    return ", ".join(reason["lines"]) + (f" and {more} more" if more else "")
