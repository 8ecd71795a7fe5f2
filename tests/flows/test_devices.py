"""Whole runs on each device that there is: what `auto` chooses, and going on from a checkpoint or by replay.

The same seeds and tables; but a GPU's sums need not repeat to the bit, so there a replay is exact or said to be not.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.export import export_run
from flows.train import WATCHERS, train
from rft_core.recipes import load_recipe
from tasks.progress import LogWatcher
from tests.faults.harness import all_digests, generated_blocks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 3
ROWS = 24  # of a step


class Notes(LogWatcher):
    """Keeps what a run notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, line: str) -> None:
        self.lines.append(line)


def recipe_on(recipe_file, device, *overrides):
    """`auto` is CUDA where there is CUDA, so the CPU is asked for by name."""
    chosen = "cpu" if device == "cpu" else "auto"
    return load_recipe(recipe_file, [f"model.device={chosen}", "model.dtype=auto", *overrides])


def updates(root, run):
    store = Store(str(root))
    return [store.read(entry.refs["updates"]).to_pylist()[0] for entry in Ledger(root / "runs" / run).entries("update")]


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_from_data_to_export(recipe_file, tmp_path, device):
    recipe = recipe_on(recipe_file, device, "training.checkpoint_every=null", "evaluation.every=3")
    train(recipe=recipe, run="x", root=str(tmp_path))
    resolved = load_recipe(tmp_path / "runs/x/recipe.yaml")
    assert resolved.model.device == device
    assert resolved.model.dtype in ("float32", "bfloat16")
    ledger = Ledger(tmp_path / "runs/x")
    # Off the CPU every step is kept, since a replay need not be exact there.
    assert [entry.step for entry in ledger.entries("checkpoint")] == ([3] if device == "cpu" else [1, 2, 3])
    assert [entry.step for entry in ledger.entries("evaluation")] == [0, 3]
    rows = updates(tmp_path, "x")
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    assert all(row["off_policy_rows"] == 0 and row["skipped"] is None for row in rows)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    exported = AutoModelForCausalLM.from_pretrained(export_run(tmp_path, "x"))
    base = AutoModelForCausalLM.from_pretrained(recipe_file.parent / "model")
    pairs = list(zip(exported.parameters(), base.parameters(), strict=True))
    assert all(torch.isfinite(new).all() for new, _ in pairs)
    assert any(not torch.equal(new, old) for new, old in pairs)
    before = all_digests(tmp_path, "x"), generated_blocks(tmp_path, "x")
    train(recipe=recipe, run="x", root=str(tmp_path))
    assert (all_digests(tmp_path, "x"), generated_blocks(tmp_path, "x")) == before


@pytest.mark.parametrize("is_replayed", [False, True], ids=["checkpoint", "replay"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_goes_on(recipe_file, tmp_path, monkeypatch, device, is_replayed):
    """Stopped after two of three steps; without its checkpoints both updates are replayed."""
    recipe = recipe_on(recipe_file, device, "training.checkpoint_every=2", "evaluation.every=0")
    train(recipe=recipe, run="x", root=str(tmp_path / "calm"))
    root, notes = tmp_path / "stopped", Notes()
    train(recipe=recipe.model_copy(update={"steps": 2}), run="x", root=str(root))
    if is_replayed:
        shutil.rmtree(root / "checkpoints")
    monkeypatch.setitem(WATCHERS, "x", notes)
    train(recipe=recipe, run="x", root=str(root))
    said = "\n".join(notes.lines)
    assert ("policy 2 restored from its checkpoint" in said) is not is_replayed
    assert said.count("replayed in") == 2 * is_replayed
    assert len(generated_blocks(root, "x")) == len(set(generated_blocks(root, "x"))) == 3 * STEPS
    is_exact = "replayed inexactly" not in said
    assert is_exact or device != "cpu"
    last = updates(root, "x")[-1]
    assert last["off_policy_rows"] == (0 if is_exact else ROWS)
    assert math.isfinite(last["loss"])
    assert json.loads((root / "runs/x/state.json").read_text())["state"] == "completed"
    if device == "cpu":
        assert all_digests(root, "x") == all_digests(tmp_path / "calm", "x")
