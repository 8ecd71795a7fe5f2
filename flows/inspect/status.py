"""`rft status` and `rft runs`: where a run is, what it counted, how long its stages take, what it scored."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError
from rich.console import Console

from data_contracts.errors import DamagedTable
from data_contracts.refs import MAIN
from flows.inspect.deleted import deletions_of, spans
from flows.inspect.run import RunView, list_run_names, open_run
from flows.inspect.terminal import print_columns
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import recipe_digest

EVALUATION_COLUMNS = ["step", "policy_version", "suite", "metric", "value", "low", "high", "num_prompts"]
COUNTED = {"rewards": "status", "advantages": "drop_reason"}  # the column whose values are counted
HEAD_KEYS = ("run", "state", "phase", "step", "steps", "recipe_digest", "last_checkpoint", "weights_digest")


def status_of(root: str, run: str) -> dict[str, Any]:
    """The machine-readable status. Raises SettingsError for an unknown run."""
    view = open_run(root, run)
    return {
        **head_of(view),
        "phases": [phase_of(part) for part in map(view.of_phase, view.phases)],
        "pins": list(dict.fromkeys(name for part in map(view.of_phase, view.phases) for name in part.pins().names())),
        "deleted": [deletion.to_json() for deletion in deletions_of(view)],
        "counts": counts_of(view),
        "timings": timings_of(view),
        "evaluations": evaluations_of(view),
    }


def list_runs(root: str) -> list[dict[str, Any]]:
    """The heads of all status objects, newest run first. A run that cannot be read is `damaged`, with its error."""
    heads = []
    for name in list_run_names(root):
        try:
            heads.append(head_of(open_run(root, name)))
        except (DamagedTable, SettingsError) as error:
            heads.append(
                {
                    **dict.fromkeys(HEAD_KEYS),
                    "run": name,
                    "state": "damaged",
                    "step": 0,
                    "steps": 0,
                    "error": str(error),
                }
            )
    return heads


def head_of(view: RunView) -> dict[str, Any]:
    """Run, state, the newest phase that began, step of steps over all phases, digests. `error` is there only when the
    run recorded one.
    """
    checkpoints = view.checkpoints()
    kept = [checkpoint for checkpoint in checkpoints if checkpoint.is_there]
    head = {
        "run": view.name,
        "state": view.state,
        "phase": view.of_phase().phase,
        "step": view.last_step,
        "steps": view.steps,
        "recipe_digest": view.head.get("recipe_digest") or _recipe_digest(view),
        "last_checkpoint": str(kept[-1].folder) if kept else None,
        "weights_digest": checkpoints[-1].weights_digest if checkpoints else None,
    }
    return {**head, "error": view.error} if view.error else head


def phase_of(view: RunView) -> dict[str, Any]:
    """How far a phase is, and the weights that it left."""
    checkpoints = view.checkpoints()
    digest = checkpoints[-1].weights_digest if checkpoints else None
    return {"phase": view.phase, "step": view.last_step, "steps": view.steps, "weights_digest": digest}


def counts_of(view: RunView) -> dict[str, int]:
    """Rows of the training stages; dropped_<reason> counts advantage rows, quarantined_<reason> source rows.

    `generated_tokens` is what engines really produced for this run, training and evaluation, crashes included.
    """
    found = {ref for part in view.by_phase() if (ref := part.dataset_ref()) is not None}
    datasets = {
        record: sum(ref.rows for ref in found if ref.record == record) for record in sorted({r.record for r in found})
    }
    counts = {
        **(datasets or {"prompts": 0}),
        "rollouts": _rows(view, "rollouts", "rollouts"),
        "rewards": _rows(view, "rewards", "rewards"),
        "unscored": 0,
        "advantages": _rows(view, "advantages", "advantages"),
        "evaluation_rollouts": _rows(view, "evaluation-rollouts", "rollouts"),
        "generated_tokens": generated_tokens(view),
    }
    for record, column in COUNTED.items():
        parts = [counts_in(record, view.table(record, record, [column]))]
        parts += [tombstone.facts.get("counts", {}) for _, tombstone in view.deleted(record, record)]
        for part in parts:
            counts.update({name: counts.get(name, 0) + count for name, count in part.items()})
    rejected = view.table("data", "quarantine", ["reason"])["reason"]
    counts.update({f"quarantined_{reason}": n for reason, n in _tally(rejected).items()})
    return counts


def counts_in(record: str, table: pa.Table) -> dict[str, int]:
    """How many rows of a table were unscored, or dropped and why: kept when the table is deleted."""
    if record == "rewards":
        return {"unscored": _how_many(table["status"], "unscored")}
    return {f"dropped_{reason}": n for reason, n in _tally(table["drop_reason"]).items() if reason != "none"}


def generated_tokens(view: RunView) -> int:
    """The sum over the run's append-only count; a line that a crash cut short is left out."""
    path = view.folder / "generated.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline is a line cut short, or nothing
    return sum(_tokens_of(line) for line in lines)


def _tokens_of(line: str) -> int:
    """0 for two lines that a crash ran into one."""
    try:
        return int(json.loads(line)["tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


def timings_of(view: RunView) -> dict[str, dict[str, float]]:
    """Median seconds per stage over the entries that this run computed itself."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for entry in view.entries():
        if not entry.reused and not entry.pinned_from:
            seconds[entry.stage if entry.phase == MAIN else f"{entry.phase}/{entry.stage}"].append(entry.seconds)
    return {
        stage: {"median_seconds": statistics.median(values), "total_seconds": sum(values), "entries": len(values)}
        for stage, values in seconds.items()
    }


def evaluations_of(view: RunView) -> list[dict[str, Any]]:
    """Every evaluated metric, ordered by phase and step."""
    rows = [
        {"phase": entry.phase, **row}
        for entry, ref in view.refs("evaluation", "evaluations")
        for row in view.store.read(ref, EVALUATION_COLUMNS).to_pylist()
    ]
    order = view.phases.index
    return sorted(rows, key=lambda row: (order(row["phase"]), row["step"], row["suite"], row["metric"]))


def print_status(status: dict[str, Any], console: Console) -> None:
    """The status for people; plain tab-separated lines when the output is not a terminal."""
    head = [(key, status[key]) for key in (*HEAD_KEYS, "error") if status.get(key) is not None and status[key] != MAIN]
    has_phases = status["phase"] != MAIN
    if has_phases:
        head += [(f"phase {part['phase']}", f"step {part['step']} of {part['steps']}") for part in status["phases"]]
    head += [("pinned", name) for name in status["pins"]]
    print_columns(console, "run", ["what", "value"], head)
    print_columns(console, "counts", ["what", "count"], list(status["counts"].items()))
    deleted = [
        (d["what"], spans(d["steps"]), f"{d['at'][:16].replace('T', ' ')} UTC", d["rule"]) for d in status["deleted"]
    ]
    print_columns(console, "deleted (rft run RECIPE --name RUN --remake)", ["deleted", "steps", "at", "rule"], deleted)
    timings = [(stage, _seconds(t["median_seconds"]), t["entries"]) for stage, t in status["timings"].items()]
    print_columns(console, "time of a stage", ["stage", "median", "times"], timings)
    rows = [
        (
            *([e["phase"]] if has_phases else []),
            e["step"],
            e["suite"],
            e["metric"],
            f"{e['value']:.3f}",
            f"[{e['low']:.3f}, {e['high']:.3f}]",
            e["num_prompts"],
        )
        for e in status["evaluations"]
    ]
    columns = ["step", "suite", "metric", "value", "95 % interval", "prompts"]
    print_columns(console, "evaluations", ["phase"] * has_phases + columns, rows)


def print_runs(heads: list[dict[str, Any]], console: Console) -> None:
    """One line per run."""
    rows = [
        (head["run"], head["state"], f"{head['step']}/{head['steps']}", (head["weights_digest"] or "-")[:12])
        for head in heads
    ]
    print_columns(console, "runs", ["run", "state", "step", "weights"], rows)


def _recipe_digest(view: RunView) -> str | None:
    """Null for a recipe that is not valid (in this release)."""
    try:
        return recipe_digest(Recipe.model_validate(view.recipe))
    except ValidationError:
        return None


def _rows(view: RunView, stage: str, record: str) -> int:
    return sum(ref.rows for _, ref in view.refs(stage, record))


def _how_many(column: pa.ChunkedArray, value: str) -> int:
    return pc.sum(pc.equal(column, value)).as_py() or 0


def _tally(column: pa.ChunkedArray) -> dict[str, int]:
    return {pair["values"]: pair["counts"] for pair in column.value_counts().to_pylist()}


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
