"""The machine-readable status, a run's state, and what `rft run` says at its end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from data_contracts.checkpoints import checkpoint_folder
from data_contracts.errors import DamagedTable
from data_contracts.ledger import Lease
from flows.inspect import learned, learned_lines, list_runs, open_run, print_status, status_of
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import recipe_digest
from tests.flows.sample_run import build_sample_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return build_sample_run(tmp_path_factory.mktemp("status"))


@pytest.fixture(scope="module")
def status(made):
    return status_of(made.root, made.name)


def test_head_follows_the_contract(made, status):
    assert {"run", "state", "step", "steps", "recipe_digest", "last_checkpoint", "weights_digest"} <= status.keys()
    assert (status["run"], status["state"], status["step"], status["steps"]) == ("sample", "completed", 4, 4)
    recipe = Recipe.model_validate(open_run(made.root, made.name).recipe)
    assert status["recipe_digest"] == recipe_digest(recipe)
    assert status["weights_digest"] == "7" * 64
    assert status["last_checkpoint"] == str(checkpoint_folder(Path(made.root), made.policies[-1]))
    json.dumps(status)


def test_counts_conserve_rows(status):
    counts = status["counts"]
    # 4 steps x 2 prompts x 4; evaluations at 0, 2, 4 of 2 prompts x (4 sampled + 1 greedy).
    assert counts["rollouts"] == counts["rewards"] == counts["advantages"] == 32
    assert counts["evaluation_rollouts"] == 30
    assert counts["unscored"] == counts["dropped_unscored"] == 2
    assert counts["dropped_zero_variance"] == 4
    assert counts["quarantined_duplicate"] == counts["quarantined_bad_json"] == 1
    # Training 28 + 28 + 30 + 31. Held-out prompts have 4, 7, 0, 3 and 1, 4, 7, 0 to stay below 2, 5 and 8: right are
    # (1 + 2), (3 + 3), (4 + 4) of 8 sampled and (0 + 1), (1 + 1), (1 + 1) of 2 greedy; 3 tokens each, 4 if right.
    assert counts["generated_tokens"] == 117 + 3 * 30 + (3 + 6 + 8) + (1 + 2 + 2)


def test_a_line_that_a_crash_cut_short_is_not_counted(tmp_path):
    made = build_sample_run(tmp_path, steps=1)
    before = status_of(made.root, made.name)["counts"]["generated_tokens"]
    with open(tmp_path / "runs" / "sample" / "generated.jsonl", "a") as file:
        file.write('{"slot": "rollouts-00002", "tok')
    assert status_of(made.root, made.name)["counts"]["generated_tokens"] == before
    with open(tmp_path / "runs" / "sample" / "generated.jsonl", "a") as file:  # the next one runs into it
        file.write('{"slot": "rollouts-00002", "tokens": 5}\n{"slot": "rollouts-00002", "tokens": 7}\n')
    assert status_of(made.root, made.name)["counts"]["generated_tokens"] == before + 7


@pytest.mark.parametrize("name", ["run.json", "state.json", "ledger/main.00001.update.0.json", "recipe.yaml"])
def test_a_damaged_run_is_named_and_hides_no_other(tmp_path, name):
    made = build_sample_run(tmp_path, steps=1)
    build_sample_run(tmp_path, "other", steps=1)
    (tmp_path / "runs" / "sample" / name).write_bytes(b"{\x00\xff")
    heads = {head["run"]: head for head in list_runs(made.root)}
    assert heads["other"]["state"] == "completed"
    assert (heads["sample"]["state"], Path(name).name in heads["sample"]["error"]) == ("damaged", True)
    with pytest.raises((DamagedTable, SettingsError), match=Path(name).name):
        status_of(made.root, made.name)


def test_a_recipe_of_another_release_and_a_damaged_checkpoint_still_have_a_status(tmp_path):
    made = build_sample_run(tmp_path, steps=1)
    (tmp_path / "runs" / "sample" / "recipe.yaml").write_text("steps: 1\nunknown: 2\n")
    (checkpoint_folder(tmp_path, made.policies[-1]) / "manifest.json").write_text("{}")
    status = status_of(made.root, made.name)
    assert (status["steps"], status["recipe_digest"], status["last_checkpoint"]) == (1, None, None)


def test_timings_are_medians(status):
    # 4.1, 4.2, 4.3, 4.4
    assert status["timings"]["rollouts"]["median_seconds"] == pytest.approx(4.25)
    assert status["timings"]["data"]["median_seconds"] == 1.5


def test_evaluations_follow_the_contract(status):
    rows = status["evaluations"]
    assert [row["step"] for row in rows] == [0] * 4 + [2] * 4 + [4] * 4
    keys = {"phase", "step", "policy_version", "suite", "metric", "value", "low", "high", "num_prompts"}
    assert set(rows[0]) == keys and {row["phase"] for row in rows} == {"main"}
    sampled = {row["step"]: row["value"] for row in rows if row["metric"] == "sampled_accuracy"}
    assert sampled == {0: 3 / 8, 2: 6 / 8, 4: 1.0}


def test_state_running_interrupted_and_crashed(tmp_path):
    made = build_sample_run(tmp_path, steps=1, state="running")
    assert status_of(made.root, made.name)["state"] == "crashed"  # it says running, and nobody holds the lease
    lease = Lease.acquire(tmp_path / "runs" / made.name)
    assert status_of(made.root, made.name)["state"] == "running"
    lease.release()
    (tmp_path / "runs" / made.name / "state.json").write_text('{"state": "failed", "error": "disk full"}')
    assert status_of(made.root, made.name)["state"] == "failed"
    assert status_of(made.root, made.name)["error"] == "disk full"


def test_deleted_checkpoint_keeps_its_digest_only(tmp_path):
    made = build_sample_run(tmp_path, steps=1)
    folder = checkpoint_folder(tmp_path, made.policies[-1])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "deleted": True}))
    status = status_of(made.root, made.name)
    assert status["last_checkpoint"] is None
    assert status["weights_digest"] == "7" * 64


def test_unknown_run_names_near_ones(made):
    with pytest.raises(SettingsError, match="did you mean sample"):
        status_of(made.root, "sampel")
    with pytest.raises(SettingsError, match="there are none yet"):
        status_of(f"{made.root}/elsewhere", "sample")


def test_list_runs_gives_heads(made):
    (head,) = list_runs(made.root)
    assert head["run"] == "sample"
    assert "counts" not in head


def test_piped_output_is_plain_and_whole(status):
    stream = io.StringIO()
    print_status(status, Console(file=stream, width=20))
    lines = stream.getvalue().splitlines()
    assert f"weights_digest\t{'7' * 64}" in lines
    assert "rollouts\t32" in lines
    assert "\x1b" not in stream.getvalue()


def test_learned_pairs_first_and_last_evaluation(made):
    summary = learned(made.root, made.name)
    change = {row["metric"]: row for row in summary["metrics"]}["sampled_accuracy"]
    # Prompt 2 goes from 2/4 to 1, prompt 3 from 1/4 to 1: differences 0.5 and 0.75, resampled over two prompts.
    # (Which prompt has which does not matter to mean and bounds.)
    assert change["difference"] == pytest.approx(0.625)
    assert (change["low"], change["high"]) == pytest.approx((0.5, 0.75))
    # Steps 1, 2 and 3, 4: (2/6 + 4/8) / 2 and (6/8 + 7/8) / 2.
    assert summary["reward"] == {"first": pytest.approx(5 / 12), "last": pytest.approx(13 / 16), "steps": 2}
    lines = learned_lines(summary)
    assert lines[0].startswith(
        "sampled_accuracy: 0.375 [0.275, 0.475] -> 1.000 [0.900, 1.000], paired difference +0.625"
    )
    assert f"checkpoint: {summary['checkpoint']}" in lines
    assert lines[-2:] == ["model folder: rft export sample --to sample-model", "report: rft report sample"]


def test_learned_without_evaluation_or_steps(tmp_path):
    made = build_sample_run(tmp_path, steps=0)
    summary = learned(made.root, made.name)
    assert (summary["metrics"], summary["reward"], summary["checkpoint"]) == ([], None, None)
    assert learned_lines(summary)[0] == "checkpoint: none yet"
