"""`rft compare`: two runs side by side. Settings that differ, their evaluations with intervals, the time of stages."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from flows.inspect.learned import ORDER, paired_change
from flows.inspect.run import RunView, open_run
from flows.inspect.status import HEAD_KEYS, evaluations_of, head_of, timings_of
from flows.inspect.terminal import print_columns
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import Change, difference
from rft_core.settings import Settings

Row = dict[str, Any]


def compare(root: str, first: str, second: str) -> dict[str, Any]:
    """`runs`: both heads; `settings` that differ; `evaluations` of equal steps side by side, each with its interval;
    `last`: those of each run's last policy, with the paired difference second - first over the prompts that both asked;
    `timings` by stage. What one run has alone is null in the other. Interval and num_prompts are null and 0 where
    nothing can be paired: no prompt in common, other graders, likelihoods of given completions. Of a run with phases
    evaluations are those of its newest phase.

    Raises SettingsError for an unknown run, and for a recipe that is not valid in this release.
    """
    views = (open_run(root, first), open_run(root, second))
    parts = (views[0].of_phase(), views[1].of_phase())
    found = [{(row["metric"], row["step"]): row for row in evaluations_of(part)} for part in parts]
    timings = [timings_of(view) for view in views]
    return {
        "runs": [head_of(view) for view in views],
        "settings": [_setting(change) for change in difference(*(_recipe(view) for view in views))],
        "evaluations": [
            {
                "metric": metric,
                "step": step,
                "first": found[0].get((metric, step)),
                "second": found[1].get((metric, step)),
            }
            for metric, step in sorted({*found[0], *found[1]}, key=lambda key: (_place(key[0]), key[1]))
        ],
        "last": [_last(parts, metric, found) for metric in sorted({m for of in found for m, _ in of}, key=_place)],
        "timings": [
            {"stage": stage, "first": _median(timings[0], stage), "second": _median(timings[1], stage)}
            for stage in dict.fromkeys([*timings[0], *timings[1]])
        ],
    }


def print_comparison(found: dict[str, Any], console: Console) -> None:
    """For people; plain tab-separated lines when the output is not a terminal."""
    names = [head["run"] for head in found["runs"]]
    heads = [(key, *(_shown(head.get(key)) for head in found["runs"])) for key in HEAD_KEYS[1:]]
    print_columns(console, "runs", ["what", *names], heads)
    settings = [(row["setting"], _shown(row["first"]), _shown(row["second"])) for row in found["settings"]]
    print_columns(console, "settings that differ", ["setting", *names], settings)
    last = [(row["metric"], _measured(row["first"]), _measured(row["second"]), _change(row)) for row in found["last"]]
    print_columns(console, "last evaluations", ["metric", *names, "difference"], last)
    timings = [(row["stage"], _seconds(row["first"]), _seconds(row["second"])) for row in found["timings"]]
    print_columns(console, "median time of a stage", ["stage", *names], timings)


def _setting(change: Change) -> Row:
    first, second = (
        value.model_dump(mode="json") if isinstance(value, Settings) else value for value in (change.old, change.new)
    )
    return {"setting": change.path, "first": first, "second": second, "is_content": change.is_content}


def _last(views: tuple[RunView, RunView], metric: str, found: list[dict[tuple[str, int], Row]]) -> Row:
    """The last evaluations that have a metric."""
    rows = [max((row for (name, _), row in of.items() if name == metric), key=_step, default=None) for of in found]
    last: Row = {"metric": metric, "first": rows[0], "second": rows[1]}
    nothing = {"difference": None, "low": None, "high": None, "num_prompts": 0}
    if rows[0] is None or rows[1] is None:
        return last | nothing
    paired = paired_change(views[0], rows[0]["step"], views[1], rows[1]["step"], metric)
    if paired is None:
        return last | nothing | {"difference": rows[1]["value"] - rows[0]["value"]}
    return last | {
        "difference": paired.value,
        "low": paired.low,
        "high": paired.high,
        "num_prompts": paired.num_prompts,
    }


def _recipe(view: RunView) -> Recipe:
    try:
        return Recipe.model_validate(view.recipe)
    except ValidationError as error:
        raise SettingsError(
            f"the recipe of run {view.name!r} must be valid in this release to be compared, found: "
            f"{error.errors()[0]['msg']}; rft status shows each run by itself"
        ) from error


def _place(metric: str) -> tuple[int, str]:
    return (ORDER.index(metric) if metric in ORDER else len(ORDER), metric)


def _step(row: Row) -> int:
    return int(row["step"])


def _median(timings: dict[str, dict[str, float]], stage: str) -> float | None:
    return timings[stage]["median_seconds"] if stage in timings else None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)


def _measured(row: Row | None) -> str:
    return "-" if row is None else f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}] step {row['step']}"


def _change(row: Row) -> str:
    if row["difference"] is None:
        return "-"
    if row["low"] is None:
        return f"{row['difference']:+.3f}, not paired"
    return f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] over {row['num_prompts']} prompts"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
