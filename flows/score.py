"""Score a file of completions by one reward function, offline: no run, no model, no server.

Rows are read as any source of data is (see data_contracts/formats). A completion is called completion, prediction,
program, response or output; a gold answer answer, gold, solution, ground_truth or reference; prompt, messages,
finish_reason, source and group (rows that are compared with one another) are used where they are; all other fields are
the row's metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from rich.console import Console

from data_contracts.formats import read_source
from data_contracts.refs import SourceRow, digest_of
from data_contracts.schemas import canonical_json
from flows.inspect.terminal import print_columns
from rft_core.recipes import load_recipe
from rft_core.rewards import Grader, build_grader
from rft_core.rewards.scoring_models import resolve_scoring_models
from tasks.scoring import said_of_unknown

COMPLETION = ("completion", "prediction", "program", "response", "output")
ANSWER = ("answer", "gold", "solution", "ground_truth", "reference")
BATCH_ROWS = 1024
MAX_REASONS = 20


def build_scorer(root: Path, reward: str, sets: list[str]) -> Grader:
    """The grader of one function. `reward` is its name, or a user's as FILE.py:function; settings are those of the
    function. Raises SettingsError."""
    function = {"name": "custom", "path": reward} if ".py:" in reward else {"name": reward}
    overrides = [text if text.startswith("reward.") else f"reward.functions.0.{text}" for text in sets]
    if reward == "code":  # what is called a program is one, with a code block or without
        overrides.insert(0, "reward.functions.0.code.raw=true")
    recipe = load_recipe("quickstart", [f"reward.functions={json.dumps([function])}", *overrides])
    return build_grader(resolve_scoring_models(recipe.reward, root))


def score_file(grader: Grader, source: str, out: Path | None) -> dict[str, Any]:
    """Write the rows with `reward` (null = unscored), `status` and `reason` added, in order; gives counts and mean."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    total = 0.0
    unknown: set[tuple[str, str]] | None = None
    rows = iter(read_source(source, {}, None, 0))
    with open(out, "w", encoding="utf-8") if out is not None else nullcontext() as file:
        while batch := list(islice(rows, BATCH_ROWS)):
            read = [_read(row, number) for number, row in enumerate(batch)]
            tables = _tables([row for row in read if isinstance(row, dict)])
            of_batch = grader.unknown_fields(tables[1])
            unknown = of_batch if unknown is None else unknown & of_batch
            for row, scored in zip(batch, _scored(grader, read, tables), strict=True):
                counts[scored["status"]] += 1
                total += scored["reward"] or 0.0
                if scored["reason"]:
                    reasons[scored["reason"]] += 1
                if len(reasons) > 10 * MAX_REASONS:
                    reasons = Counter(dict(reasons.most_common(5 * MAX_REASONS)))
                _write(file, row, scored)
    return {
        "rows": counts.total(),
        "scored": counts["scored"],
        "unscored": counts["unscored"],
        "mean_reward": total / counts["scored"] if counts["scored"] else None,
        "reasons": [{"reason": reason, "rows": count} for reason, count in reasons.most_common(MAX_REASONS)],
        "notes": [said_of_unknown(unknown)] if unknown else [],
        "grader": grader.digest,
    }


def _write(file: TextIO | None, row: SourceRow, scored: dict[str, Any]) -> None:
    if file is not None:
        given = row.value if row.value is not None else {"raw": row.raw.decode(errors="backslashreplace")}
        file.write(json.dumps({**given, **scored}, ensure_ascii=False) + "\n")


def _scored(
    grader: Grader, read: list[dict[str, Any] | str], tables: tuple[pa.Table, pa.Table]
) -> Iterator[dict[str, Any]]:
    """What is added to each row. Rows that cannot be read are unscored with the reason."""
    table = grader.score(*tables) if tables[0].num_rows else None
    rewards = iter(table.to_pylist() if table is not None else [])
    for row in read:
        if isinstance(row, str):
            yield {"reward": None, "status": "unscored", "reason": row}
            continue
        reward = next(rewards)
        notes = [status.removeprefix("scored: ") for _, status in reward["component_status"] if status != "scored"]
        reason = reward["reason"] or ("; ".join(notes) or None)
        metrics = {name: value for name, value in reward["components"] if "/" in name}
        added = {"reward": reward["reward"], "status": reward["status"], "reason": reason}
        yield {**added, "metrics": metrics} if metrics else added


def _read(row: SourceRow, number: int) -> dict[str, Any] | str:
    """The columns that a grader needs, or why the row has none."""
    value = row.value if row.value is not None else row.mended
    if value is None:
        return f"{row.source}:{row.row}: {row.reason}: {row.detail}"
    rest = dict(value)
    text = _first(rest, COMPLETION)
    messages = rest.pop("messages", None)
    prompt = rest.pop("prompt", None)
    if text is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        text, messages = messages[-1].get("content"), messages[:-1]
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")
    if not isinstance(text, str):
        return f"a row must have a text under one of {', '.join(COMPLETION)}; this one has {', '.join(value)}"
    asked = messages if messages is not None else prompt
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    asked = asked if isinstance(asked, list) else []
    answer = _first(rest, ANSWER)
    group = rest.pop("group", rest.pop("group_id", None))
    return {
        "id": f"row-{number:05d}",
        "group_id": str(group) if group is not None else digest_of(asked)[:16] if asked else f"row-{number:05d}",
        "messages": canonical_json([*asked, {"role": "assistant", "content": text}]),
        "completion_text": text,
        "finish_reason": str(rest.pop("finish_reason", None) or "stop"),
        "answer": answer if answer is None or isinstance(answer, str) else canonical_json(answer),
        "source": str(rest.get("source", row.source)),
        "metadata": canonical_json(rest),
    }


def _first(row: dict[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these fields that is not null; all of them are taken out."""
    found = [row.pop(name) for name in names if name in row]
    return next((value for value in found if value is not None), None)


def _tables(rows: list[dict[str, Any]]) -> tuple[pa.Table, pa.Table]:
    """As much of the records rollouts and prompts as a grader reads."""
    size = len(rows)

    def column(name: str) -> pa.Array:
        return pa.array([row[name] for row in rows], pa.large_string())

    same = {"rollout_id": column("id"), "prompt_id": column("id"), "group_id": column("group_id")}
    texts = {name: column(name) for name in ("messages", "completion_text", "finish_reason")}
    status = {"status": ["completed"] * size, "error_reason": pa.nulls(size, pa.large_string())}
    prompts = {name: column(name) for name in ("answer", "metadata", "source")}
    rest = {"prompt_id": column("id"), "dataset": column("source"), "split": ["train"] * size}
    return pa.table({**same, **texts, **status}), pa.table({**rest, **prompts})


def print_score(result: dict[str, Any], reward: str, console: Console) -> None:
    mean = "-" if result["mean_reward"] is None else f"{result['mean_reward']:.4g}"
    columns = ["reward", "rows", "scored", "unscored", "mean"]
    print_columns(console, "scores", columns, [[reward, result["rows"], result["scored"], result["unscored"], mean]])
    for note in result["notes"]:
        console.print(f"note: {note}", markup=False)
    reasons = [[reason["rows"], reason["reason"]] for reason in result["reasons"]]
    print_columns(console, "reasons", ["rows", "reason"], reasons)
