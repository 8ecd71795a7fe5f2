"""New rewards for the stored rollouts of a run, and what they change. Generates nothing, trains nothing.

The new tables lie in the store beside the old ones, under the keys that a rerun from the rewards looks for. A summary
with their refs is kept in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from data_contracts.files import LocalFiles
from data_contracts.ledger import EXPERTS
from data_contracts.refs import MAIN, TableRef
from flows.inspect.run import RunView, open_run
from flows.inspect.terminal import print_columns
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import absolute_overrides, difference, with_overrides
from rft_core.rewards import Grader, build_grader
from rft_core.rewards.compare import Comparison
from rft_core.rewards.scoring_models import resolve_scoring_models
from tasks.phases import models_of
from tasks.provenance import versions
from tasks.scoring import rewards_key, said_of_unknown, score_blocks

KEPT_COLUMNS = ["rollout_id", "reward", "components", "component_status"]
MAX_FLIPS = 12  # shown of each function


def rescore(
    root: Path,
    run: str,
    overrides: list[str],
    step: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    phase: str | None = None,
) -> dict[str, Any]:
    """Score the train rollouts of the run's phase, or of its newest, with its rewards as changed by `overrides`.

    Raises SettingsError for overrides of anything else, DeletedTable for rollouts that retention deleted.
    """
    view = open_run(str(root), run).of_phase(phase)
    recipe = models_of(root, run).recipe(view.phase or MAIN)
    changed = with_overrides(recipe, absolute_overrides(overrides, Path.cwd()))
    for change in difference(recipe, changed):
        if not change.path.startswith("reward"):
            raise SettingsError(f"rescoring changes reward.* alone, got {change.path}: use rft rerun")
    changed = changed.model_copy(update={"reward": resolve_scoring_models(changed.reward, root)})
    grader = build_grader(changed.reward)
    stored = [
        (entry.step, ref)
        for entry, ref in view.refs("rewards", "rewards")
        if step in (None, entry.step) and entry.round != EXPERTS  # what the data says, no function said
    ]
    if not changed.reward.functions:
        raise SettingsError(f"run {run!r} has no reward functions: its data says what its completions are worth")
    if not stored:
        raise SettingsError(f"run {run!r} has no rewards" + (f" of step {step}" if step is not None else "") + " yet")
    data = view.dataset_ref() if grader.has_conditions else None
    if data is not None and (unknown := grader.unknown_fields(view.store.read(data))):
        raise SettingsError(said_of_unknown(unknown))
    comparison, tables = Comparison(), []
    for done, (at, old) in enumerate(stored):
        new = _score_again(view, changed, grader, old)
        before, after = (view.store.read(ref, KEPT_COLUMNS) for ref in (old, new))
        comparison.add(before, after, at)
        tables.append({"step": at, "old": old.name, "new": new.name})
        if progress is not None:
            progress(done + 1, len(stored), f"step {at}")
    result = {
        "run": run,
        "phase": view.phase,
        "settings": [change.sentence for change in difference(recipe, changed)],
        "grader": grader.digest,
        "functions": comparison.functions(),
        "steps": comparison.steps,
        "tables": tables,
        "generated_tokens": 0,
    }
    content = json.dumps(result, indent=1).encode()
    LocalFiles(view.folder / "rescores").write(f"{grader.digest[:12]}.json", content)
    return result


def _score_again(view: RunView, recipe: Recipe, grader: Grader, old: TableRef) -> TableRef:
    """The table of the new grader, made unless it is there."""
    made_from = [TableRef.from_json(value) for value in view.store.manifest(old)["provenance"]["inputs"]]
    rollouts, prompts = made_from
    key = rewards_key(recipe, grader.digest, rollouts, prompts)
    if (found := view.store.find("rewards", key)) is not None:
        return found
    provenance = {
        "versions": versions(),
        "inputs": [ref.to_json() for ref in made_from],
        "settings": recipe.reward.content(),
        "identity": {"grader": grader.digest},
        "seed": recipe.seed,
    }
    tokenizer = _tokenizer(recipe) if grader.has_steps else None
    return score_blocks(view.store, grader, (rollouts, prompts), key, provenance, tokenizer=tokenizer)


def _tokenizer(recipe: Recipe) -> Any:
    from rft_core.data.prompts import load_tokenizer

    return load_tokenizer(Path(recipe.model.path), recipe.model.chat_template)


def print_rescore(result: dict[str, Any], console: Console) -> None:
    functions = result["functions"]
    rows = [
        [
            function["name"],
            _number(function["old_mean"]),
            _number(function["new_mean"]),
            _number(function["drift"], "+.4g"),
            f"{function['changed']} of {function['rows']}",
            f"{function['unscored_old']} -> {function['unscored_new']}",
        ]
        for function in functions
    ]
    columns = ["function", "old mean", "new mean", "drift", "rows changed", "unscored"]
    print_columns(console, f"run {result['run']} scored again", columns, rows)
    flips = [
        [function["name"], flip["from"], flip["to"], flip["count"]]
        for function in functions
        for flip in function["flips"][:MAX_FLIPS]
    ]
    print_columns(console, "flips", ["function", "from", "to", "rows"], flips)
    console.print("nothing was generated; the old tables are as they were")


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
