"""Runs that take the other branch: adapters, a reference, several optimizer steps, evaluation and export of a run."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_contracts.errors import DamagedTable
from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.evaluate import evaluation_recipe
from flows.export import export_run
from flows.train import train
from rft_core.errors import RolloutsFailed, SettingsError
from rft_core.policy import Policy
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests, flip_a_byte, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 2


def updates(root, run, step):
    ref = Ledger(root / "runs" / run).get("main", step, "update").refs["updates"]
    return Store(str(root)).read(ref).to_pylist()


def test_lora_trains_adapters_that_merge_into_a_model_folder(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["model.lora_rank=4", "training.checkpoint_every=null"])
    train(recipe=recipe, run="x", root=str(tmp_path))
    # Adapters are small: each step is kept.
    assert [entry.step for entry in Ledger(tmp_path / "runs/x").entries("checkpoint")] == [1, 2]
    merged = AutoModelForCausalLM.from_pretrained(export_run(tmp_path, "x", tmp_path / "merged"))
    base = AutoModelForCausalLM.from_pretrained(recipe_file.parent / "model")
    moved = [
        (new - old).abs().max().item()
        for (name, new), (_, old) in zip(merged.named_parameters(), base.named_parameters(), strict=True)
        if "proj" in name
    ]
    assert min(moved) > 0
    adapter = export_run(tmp_path, "x", tmp_path / "adapter", merged=False)
    assert (adapter / "adapter_config.json").is_file()
    train(recipe=load_recipe(recipe_file), run="y", root=str(tmp_path))
    with pytest.raises(SettingsError, match="--adapter needs a run under LoRA, 'y' trained all weights"):
        export_run(tmp_path, "y", tmp_path / "none", merged=False)


def test_a_kl_term_reports_kl_that_starts_at_zero(recipe_file, tmp_path):
    train(recipe=load_recipe(recipe_file, ["algorithm.kl_coefficient=0.1"]), run="x", root=str(tmp_path))
    first, second = updates(tmp_path, "x", 1)[0], updates(tmp_path, "x", 2)[0]
    assert abs(first["kl"]) < 1e-6
    assert second["kl"] > 1e-4


def test_several_optimizer_steps_per_batch(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["training.mini_batches=2", "training.epochs=2", "training.schedule=cosine"])
    train(recipe=recipe, run="x", root=str(tmp_path))
    rows = updates(tmp_path, "x", 2)
    assert [row["optimizer_step"] for row in rows] == [5, 6, 7, 8]
    assert rows[-1]["ratio_max"] > 1.0
    rates = [row["learning_rate"] for step in (1, 2) for row in updates(tmp_path, "x", step)]
    assert rates == sorted(rates, reverse=True)


def test_the_checkpoint_is_a_model_folder_whose_weights_are_those_of_training(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file)
    result = train(recipe=recipe, run="x", root=str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(result["checkpoint"])
    exported = AutoModelForCausalLM.from_pretrained(export_run(tmp_path, "x"))
    for one, other in zip(loaded.parameters(), exported.parameters(), strict=True):
        assert torch.equal(one, other)
    tokenizer = AutoTokenizer.from_pretrained(result["checkpoint"])
    assert tokenizer.chat_template == Policy.load(recipe.model, recipe_file.parent / "model", 0).tokenizer.chat_template


def test_an_altered_checkpoint_is_not_exported(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["steps=1"])
    checkpoint = train(recipe=recipe, run="x", root=str(tmp_path))["checkpoint"]
    flip_a_byte(Path(checkpoint) / "model.safetensors")
    with pytest.raises(DamagedTable, match=rf"must have SHA-256 .*delete the folder {checkpoint} and run `rft run`"):
        export_run(tmp_path, "x", tmp_path / "exported")
    assert not list(tmp_path.glob("*exported*"))


MEDDLING = """
import os, random, warnings
import numpy, torch

def meddle():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    numpy.random.seed(1)
    numpy.seterr(all="raise")
    random.seed(1)
    warnings.simplefilter("error")
    os.environ.clear()
    os.chdir("/")

meddle()

def low_letters(rows):
    assert torch.get_default_dtype() == torch.float64, "what the file set must hold when it is called"
    meddle()
    return [sum(c in "abcdefghijklm" for c in row.completion_text) / (len(row.completion_text) or 1) for row in rows]
"""


def test_a_reward_function_that_meddles_with_the_process_changes_no_update(recipe_file, tmp_path):
    """The same scores, so the same bits."""
    write_recipe(tmp_path / "meddling", recipe_file.parent / "model", steps=2, model__dtype="float32")
    (tmp_path / "meddling" / "rewards.py").write_text(MEDDLING)
    train(recipe=load_recipe(recipe_file), run="x", root=str(tmp_path))
    train(recipe=load_recipe(tmp_path / "meddling" / "recipe.yaml"), run="meddling", root=str(tmp_path))
    for step in (1, 2):
        assert updates(tmp_path, "meddling", step) == updates(tmp_path, "x", step)
    weights = [all_digests(tmp_path, run)["weights"] for run in ("x", "meddling")]
    assert weights[0] == weights[1]


def test_evaluating_a_run_measures_its_last_checkpoint_on_the_same_prompts(recipe_file, tmp_path):
    train(recipe=load_recipe(recipe_file), run="x", root=str(tmp_path))
    recipe, name = evaluation_recipe(tmp_path, "x", None, [])
    train(recipe=recipe, run=name, root=str(tmp_path))
    store = Store(str(tmp_path))

    def metrics(run, step):
        ref = Ledger(tmp_path / "runs" / run).get("main", step, "evaluation").refs["evaluations"]
        return {row["metric"]: row["value"] for row in store.read(ref).to_pylist()}

    # The same weights, prompts and seeds, but read from disk as another model.
    assert metrics(name, 0) == metrics("x", 2)
    assert json.loads((tmp_path / "runs" / name / "state.json").read_text())["state"] == "completed"
    assert evaluation_recipe(tmp_path, "x", None, [])[1] == name
    assert evaluation_recipe(tmp_path, "x", None, ["evaluation.samples=3"])[1] != name
    # After more training the run is evaluated again, not refused as changed content.
    train(recipe=load_recipe(recipe_file, ["steps=3"]), run="x", root=str(tmp_path))
    assert evaluation_recipe(tmp_path, "x", None, [])[1] != name


def test_checkpoints_but_the_newest_are_deleted_and_leave_a_tombstone(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["steps=3", "training.checkpoint_every=1", "retention.keep_last=1"])
    train(recipe=recipe, run="x", root=str(tmp_path))
    policies = [entry.policy.policy_id for entry in Ledger(tmp_path / "runs/x").entries("checkpoint")]
    manifests = [json.loads((tmp_path / "checkpoints" / name / "manifest.json").read_text()) for name in policies]
    assert [manifest["deleted"] for manifest in manifests] == [True, True, False]
    assert (manifests[0]["tombstone"]["rule"], manifests[0]["tombstone"]["run"]) == ("keep_last 1", "x")
    assert [p.name for p in (tmp_path / "checkpoints" / policies[0]).iterdir()] == ["manifest.json"]
    digests = all_digests(tmp_path, "x")
    train(recipe=recipe, run="x", root=str(tmp_path))
    assert all_digests(tmp_path, "x") == digests
    # A crash between tombstone and deletion leaves files; the next turn removes them.
    manifests[0]["tombstone"]["is_swept"] = False
    (tmp_path / "checkpoints" / policies[0] / "manifest.json").write_text(json.dumps(manifests[0]))
    (tmp_path / "checkpoints" / policies[0] / "optimizer.safetensors").write_bytes(b"left over")
    train(recipe=recipe.model_copy(update={"steps": 4}), run="x", root=str(tmp_path))
    assert [p.name for p in (tmp_path / "checkpoints" / policies[0]).iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("override", "reason"),
    [("training.learning_rate=1e300", "non_finite_logits 24"), ("rollout.max_completion_tokens=3000", "context_ex")],
)
def test_a_step_whose_rollouts_all_fail_ends_the_run(recipe_file, tmp_path, override, reason):
    """Weights that a step made infinite, and completions that no context holds: later steps would be for nothing."""
    recipe = load_recipe(recipe_file, ["steps=4", "evaluation.every=0", override])
    with pytest.raises(RolloutsFailed, match=f"all failed: {reason}"):
        train(recipe=recipe, run="x", root=str(tmp_path))
    entries = Ledger(tmp_path / "runs/x").entries()
    assert "rollouts" not in {entry.stage for entry in entries if entry.step == entries[-1].step}
