"""How fast the data stage is, and how much memory it takes: JSONL prompts validated and committed.

Each size runs in a process of its own, with and without the tokenizer of the quick start's model; memory is that of the
process and its workers together. There is no peer: no other system checks and commits its data.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flows.bench.process import run_measured

SIZES = (10_000, 100_000, 1_000_000)
MODEL = "smollm2-135m"


def run(root: Path) -> list[dict[str, Any]]:
    """Rows per second and peak memory for each size."""
    from rft_core.errors import SettingsError
    from rft_core.model_folder import resolve_model_path

    try:
        model: Path | None = resolve_model_path(MODEL, root)
    except SettingsError:
        model = None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            source = Path(folder) / f"prompts-{size}.jsonl"
            write_source(source, size)
            for tokenizer in (None, model) if model else (None,):
                what = f"{size:,} prompts, {'rendered and tokenised' if tokenizer else 'without a tokenizer'}"
                found += _rows(what, size, measure(source, tokenizer))
            source.unlink()
    return found


def write_source(path: Path, size: int) -> None:
    """Prompts of about 250 bytes."""
    with open(path, "w") as file:
        for number in range(size):
            text = (
                f"A shop sells {number % 97 + 3} boxes with {number % 89 + 2} pens each, and order {number} takes "
                f"{number % 13 + 1} boxes of them. How many pens are in order {number}?"
            )
            row = {"prompt": text, "answer": str(number % 13 + 1), "level": number % 5, "topic": "arithmetic"}
            file.write(json.dumps(row) + "\n")


def measure(source: Path, model: Path | None) -> dict[str, Any]:
    """Seconds, peak bytes of all processes, and seconds by kind of work."""
    with tempfile.TemporaryDirectory(dir=source.parent) as root:
        code = "import sys; from flows.bench.data import report; report(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(source), root, str(model or "")]
        measured, peak_bytes = run_measured(command)
        return {**measured, "peak_bytes": peak_bytes}


def _rows(what: str, size: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    def row(metric: str, ours: float, unit: str) -> dict[str, Any]:
        return {"name": what, "metric": metric, "ours": round(ours, 3), "peer": None, "ratio": None, "unit": unit}

    parts = [row(f"processor time: {name}", seconds, "s") for name, seconds in measured["work"].items()]
    return [
        row("time", measured["seconds"], "s"),
        row("speed", size / measured["seconds"], "rows/s"),
        row("peak memory", measured["peak_bytes"] / 2**30, "GiB"),
        *parts,
    ]


def report(source: str, root: str, model: str) -> None:
    """What the child process does: the data stage's work on one source, into a store of its own."""
    from data_contracts.store import Store
    from rft_core.data.row_pipeline import RowSettings
    from rft_core.data.settings import DataSettings
    from tasks.sources import build_dataset

    settings = RowSettings(DataSettings(source=source), None, Path(model) if model else None, None)
    began = time.monotonic()
    keys = {"prompts": "bench", "quarantine": "bench"}
    refs, dataset = build_dataset(Store(root), keys, {name: {} for name in keys}, settings)
    seconds = time.monotonic() - began
    assert refs["prompts"].rows + refs["quarantine"].rows == dataset.counts["rows"], "no row is lost"
    print(json.dumps({"seconds": seconds, "work": dict(dataset.seconds)}))
