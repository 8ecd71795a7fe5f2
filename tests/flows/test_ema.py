"""The moving average of the weights in whole runs: kept over resume and replay, exported and evaluated on request."""

import json

import pytest
import torch
from safetensors.torch import load_file

from data_contracts.ledger import Ledger
from flows.evaluate import evaluation_recipe
from flows.export import export_run
from flows.train import train
from rft_core.errors import SettingsError
from rft_core.recipes import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 5


def folder_of(root):
    return root / "checkpoints" / Ledger(root / "runs/x").entries("checkpoint")[-1].policy.policy_id


def test_a_resumed_run_has_the_average_of_one_that_never_stopped(recipe_file, tmp_path):
    settings = ["training.ema_decay=0.5", "training.checkpoint_every=2", "evaluation.every=0"]
    for steps in (3, STEPS):  # the checkpoint of step 3 is the last of its run; step 5 goes on from a replay
        train(recipe=load_recipe(recipe_file, [*settings, f"steps={steps}"]), run="x", root=str(tmp_path))
    straight = tmp_path / "straight"
    train(recipe=load_recipe(recipe_file, settings), run="x", root=str(straight))
    folders = [folder_of(root) for root in (tmp_path, straight)]
    averages = [load_file(folder / "ema.safetensors") for folder in folders]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert "ema.safetensors" in json.dumps(manifest)
    exported = export_run(tmp_path, "x", tmp_path / "ema", ema=True)
    plain = export_run(tmp_path, "x", tmp_path / "plain")
    stored, weights = (load_file(folder / "model.safetensors") for folder in (exported, plain))
    assert all(torch.equal(stored[name], averages[0][name]) for name in averages[0])
    assert any(not torch.equal(stored[name], weights[name]) for name in stored)
    recipe, name = evaluation_recipe(tmp_path, "x", None, [], ema=True)
    assert recipe.model.path.endswith("-ema") and name != evaluation_recipe(tmp_path, "x", None, [])[1]


def test_a_run_without_an_average_has_none_to_export(recipe_file, tmp_path):
    train(recipe=load_recipe(recipe_file, ["steps=1", "evaluation.every=0"]), run="x", root=str(tmp_path))
    with pytest.raises(SettingsError, match=r"--ema needs a run with training\.ema_decay, 'x' kept no average"):
        export_run(tmp_path, "x", tmp_path / "ema", ema=True)
    with pytest.raises(SettingsError, match="--ema needs a run, which keeps an average"):
        evaluation_recipe(tmp_path, str(recipe_file.parent / "model"), load_recipe(recipe_file), [], ema=True)
