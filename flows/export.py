"""A run's policy as a Hugging Face model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from data_contracts.checkpoints import checkpoint_damage, checkpoint_folder
from data_contracts.errors import DamagedTable
from data_contracts.ledger import Ledger
from data_contracts.refs import PolicyRef
from data_contracts.retention import saved_checkpoints
from rft_core.errors import SettingsError
from tasks.context import run_folder
from tasks.runs import read_recipe, read_run

EXPORTS = "exports"  # below the artifact root


def export_run(root: Path, run: str, to: Path | None = None, merged: bool = True, ema: bool = False) -> Path:
    """Write the run's newest checkpoint as a model folder; without `to`, once per policy below the root. With `ema` the
    moving average of its weights."""
    folder = run_folder(root, run)
    description = read_run(folder)
    if description is None:
        raise SettingsError(f"no run {run!r} under {root}")
    if not merged and not read_recipe(folder).model.lora_rank:
        raise SettingsError(f"--adapter needs a run under LoRA, {run!r} trained all weights: leave it out")
    if ema and read_recipe(folder).training.ema_decay is None:
        raise SettingsError(f"--ema needs a run with training.ema_decay, {run!r} kept no average: leave it out")
    policy = newest_checkpoint(root, run)
    target = to or root / EXPORTS / f"{policy.policy_id}{'-ema' if ema else ''}"
    marker = target / "rft_policy.json"
    if to is None and marker.is_file():
        return target
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SettingsError(
            f"--to must be a new or empty folder, found {'files in' if to.is_dir() else 'a file at'} {to}"
        )
    _refuse_altered(checkpoint_folder(root, policy))
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_model(root, run, policy, temporary, merged, ema)
    (temporary / marker.name).write_text(json.dumps({"run": run, **policy.to_json()}, indent=1))
    if target.exists():
        target.rmdir()
    temporary.rename(target)
    return target


def has_critic(root: Path, run: str) -> bool:
    """Whether the newest checkpoint of a run holds a critic too."""
    return (checkpoint_folder(root, newest_checkpoint(root, run)) / "critic").is_dir()


def newest_checkpoint(root: Path, run: str) -> PolicyRef:
    """The newest policy of a run that has a complete checkpoint."""
    saved = saved_checkpoints(root, Ledger(run_folder(root, run)))
    if not saved:
        raise SettingsError(f"run {run!r} must have a checkpoint, found none: let it go on to its next one (`rft run`)")
    return saved[max(saved)]


def _refuse_altered(checkpoint: Path) -> None:
    damage = checkpoint_damage(checkpoint)
    if damage is not None:
        raise DamagedTable(
            f"{damage}: its bytes were altered; delete the folder {checkpoint} and run `rft run` again, which replays "
            "the policy from the tables"
        )


def _write_model(root: Path, run: str, policy: PolicyRef, target: Path, merged: bool, ema: bool) -> None:
    from rft_core.checkpoint import export_model, load_checkpoint
    from rft_core.resolve import resolve_algorithm
    from rft_core.score_policy import POLICIES
    from rft_core.train_state import TrainState

    recipe = read_recipe(run_folder(root, run))
    trained = POLICIES[resolve_algorithm(recipe.algorithm).head]
    state = TrainState.start(trained.load(recipe.model, Path(recipe.model.path), recipe.seed))
    load_checkpoint(state, checkpoint_folder(root, policy))
    if ema:
        state.take_ema()
    export_model(state, target, merged)
