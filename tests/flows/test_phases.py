"""Runs with phases on a tiny model: what each trains, where it starts, and that a resume goes on where it stopped."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from data_contracts.ledger import Ledger
from flows.cli import app
from flows.evaluate import evaluation_recipe
from flows.export import export_run
from flows.inspect.deleted import deletions_of
from flows.inspect.learned import learned, learned_lines
from flows.inspect.lineage import lineage_of
from flows.inspect.run import open_run
from flows.inspect.show import show
from flows.inspect.status import status_of
from flows.prune import prune, set_pin
from flows.report import build_report
from flows.rerun import rerun
from flows.rescore import rescore
from flows.train import train
from rft_core.errors import ContentChanged, SettingsError
from rft_core.phases import phase_recipes
from rft_core.policy import Policy
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests
from tests.flows.phase_runs import distance, policy, run, table
from tests.flows.small_runs import logprobs
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_grpo_starts_from_what_supervision_left(warmed, model):
    first = table(warmed, "warm-up", 1, "rollouts")
    assert len(first) == 6 and {row["origin"] for row in first} == {"dataset"}
    assert all(row["rollout_id"].startswith("warm-up/step-00001/") for row in first)
    (update,) = table(warmed, "warm-up", 1, "update", "updates")
    module = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.cat([logprobs(module, row) for row in first])
    assert update["loss"] == pytest.approx(-float(tokens.mean()), rel=1e-5)
    assert update["policy_version"] == 1

    middle = warmed / "checkpoints" / policy(warmed, "warm-up")
    assert distance(model, middle) > 1e-3
    sampled = table(warmed, "grpo", 1, "rollouts")
    assert len(sampled) == 16 and all(row["rollout_id"].startswith("grpo/step-00001/") for row in sampled)
    assert {row["policy_version"] for row in sampled} == {0}  # versions count anew
    module = AutoModelForCausalLM.from_pretrained(middle)
    for row in sampled[:4]:
        assert torch.tensor(row["behaviour_logprobs"]).double() == pytest.approx(logprobs(module, row), abs=1e-4)
    first, second = (table(warmed, "grpo", step, "update", "updates")[0] for step in (1, 2))
    assert first["kl"] == 0.0 and second["kl"] > 0  # to where the phase began
    assert first["optimizer_step"] == 1 and first["trained_rows"] > 0
    assert distance(middle, warmed / "checkpoints" / policy(warmed, "grpo")) > 1e-3


def test_seeds_of_phases_differ():
    recipe = load_recipe("sft_then_grpo")
    seeds = [own.seed for own in phase_recipes(recipe).values()]
    assert len({recipe.seed, *seeds}) == 3


def test_status_runs_and_show_tell_phases_apart(warmed):
    status = status_of(str(warmed), "x")
    assert (status["state"], status["phase"], status["step"], status["steps"]) == ("completed", "grpo", 4, 4)
    assert [(part["phase"], part["step"], part["steps"]) for part in status["phases"]] == [
        ("warm-up", 2, 2),
        ("grpo", 2, 2),
    ]
    assert status["last_checkpoint"].endswith(policy(warmed, "grpo"))
    assert status["weights_digest"] == status["phases"][1]["weights_digest"] != status["phases"][0]["weights_digest"]
    evaluated = [(row["phase"], row["step"], row["metric"]) for row in status["evaluations"]]
    assert evaluated[:2] == [("warm-up", 0, "loss"), ("warm-up", 2, "loss")]
    assert {row[:2] for row in evaluated[2:]} == {("grpo", 0), ("grpo", 2)}
    assert status["counts"]["rollouts"] == 2 * 6 + 2 * 16
    assert {"warm-up/update", "grpo/update", "grpo/rollouts"} <= status["timings"].keys()

    both = show(str(warmed), "x", "updates", limit=None)
    assert both["phase"].to_pylist() == ["warm-up", "warm-up", "grpo", "grpo"]
    of_one = show(str(warmed), "x", "rollouts", step=2, phase="grpo", limit=None)
    assert of_one.num_rows == 16 and "phase" not in of_one.column_names
    assert show(str(warmed), "x", "prompts", limit=None)["phase"].unique().to_pylist() == ["grpo"]
    with pytest.raises(SettingsError, match=r"--phase must be one of run x, got 'grp': did you mean grpo"):
        show(str(warmed), "x", "updates", phase="grp")


def test_the_command_line_tells_phases_apart(warmed):
    def said(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--root", str(warmed)])
        return result.output if result.exception is None or result.exit_code == 0 else str(result.exception)

    status = said("status", "x").splitlines()
    assert {"phase\tgrpo", "step\t4", "phase warm-up\tstep 2 of 2", "phase grpo\tstep 2 of 2"} <= set(status)
    assert any(line.startswith("warm-up\t2\theldout\tloss") for line in status)
    assert said("show", "x", "updates", "--step", "1").splitlines()[0].startswith("phase\tpolicy_version")
    rows = said("show", "x", "advantages", "--step", "1", "--phase", "grpo", "--format", "jsonl").splitlines()
    assert len(rows) == 16 and all(json.loads(row)["rollout_id"].startswith("grpo/step-00001/") for row in rows)
    assert "source/sums_pairs.jsonl" in said("lineage", "x", "--json")
    wrong = said("export", "x", "--to", str(warmed / "no"), "--phase", "g")
    assert "--phase must be one of run x, got 'g'" in wrong
    assert "--step must be a step from 1 to 2 of run x, got 4" in said("pin", "x", "--step", "4")
    assert learned_lines(learned(str(warmed), "x"))[0].startswith("warm-up: loss: ")
    compared = json.loads(said("compare", "x", "x", "--json"))
    assert {row["first"]["phase"] for row in compared["evaluations"]} == {"grpo"}
    assert {row["difference"] for row in compared["last"]} == {0.0}


def test_lineage_leads_from_grpo_to_the_lines_that_supervision_read(warmed):
    lineage = lineage_of(str(warmed), policy(warmed, "grpo"))
    nodes = {node["ref"]: node for node in lineage["nodes"]}
    assert f"policy/{policy(warmed, 'warm-up')}" in nodes
    assert any(node["record"] == "examples" for node in nodes.values())
    assert {node["key"] for node in nodes.values() if node["record"] == "source"} >= {"sums_pairs.jsonl"}
    parents: dict[str, set[str]] = {}
    for edge in lineage["edges"]:
        parents.setdefault(edge["from"], set()).add(edge["to"])
    began = json.loads((warmed / "runs/x/run.json").read_text())["phases"]["grpo"]
    assert parents[f"policy/{began['policy']}"] == {f"policy/{policy(warmed, 'warm-up')}"}
    assert nodes[f"policy/{began['policy']}"]["version"] == 0


def test_the_report_shows_each_phase(warmed):
    page = build_report(str(warmed), "x", warmed / "page.html").read_text()
    assert page.count("<h3>warm-up</h3>") == page.count("<h3>grpo</h3>") == 4
    assert "sft, grpo" in page


def test_a_finished_run_is_left_alone(copied, model, monkeypatch):
    before, entries = all_digests(copied, "x"), sorted((copied / "runs/x/ledger").iterdir())
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("no model may be loaded"))
    run(copied, model, "sft_then_grpo")
    assert all_digests(copied, "x") == before and sorted((copied / "runs/x/ledger").iterdir()) == entries
    with pytest.raises(ContentChanged) as refused:
        run(copied, model, "sft_then_grpo", "phases.0.training.learning_rate=0.1")
    assert "rft rerun x --from update --phase warm-up --set training.learning_rate=0.1" in str(refused.value)


def test_more_steps_are_for_the_newest_phase(copied, model):
    with pytest.raises(ContentChanged, match=r"phases\.0\.steps: 2 -> 3"):
        run(copied, model, "sft_then_grpo", "phases.0.steps=3")
    run(copied, model, "sft_then_grpo", "phases.1.steps=3")
    assert status_of(str(copied), "x")["step"] == 5


def test_what_is_wrong_with_a_later_phase_is_said_at_the_start(tmp_path, model):
    root, later = tmp_path / "root", "phases.1.reward.functions.0.path=/missing.py:varied"
    with pytest.raises(SettingsError, match=r"missing\.py"):  # said before the first phase
        run(root, model, "sft_then_grpo", later)
    assert not (root / "runs").exists()
    broken = "raise ValueError('not now')"
    (root / "other.py").write_text(f"def varied(rows):\n    {broken}\n")
    with pytest.raises(Exception, match="not now"):
        run(root, model, "sft_then_grpo", f"phases.1.reward.functions.0.path={root}/other.py:varied")
    status = status_of(str(root), "x")
    assert (status["state"], status["phase"], status["step"]) == ("failed", "grpo", 2)
    with pytest.raises(ContentChanged, match="content of the grader"):  # it has begun
        run(root, model, "sft_then_grpo")


@pytest.mark.parametrize("phase", ["warm-up", "grpo"])
def test_export_and_evaluation_take_a_phase(copied, phase):
    folder = export_run(copied, "x", copied / "out", phase=phase)
    assert distance(folder, copied / "checkpoints" / policy(copied, phase)) == 0.0
    recipe, name = evaluation_recipe(copied, "x", None, [], phase=phase)
    assert not recipe.phases and recipe.steps == 0
    train(recipe=recipe, run=name, root=str(copied))
    found = {row["metric"]: row["value"] for row in status_of(str(copied), name)["evaluations"]}
    in_run = [row for row in status_of(str(copied), "x")["evaluations"] if (row["phase"], row["step"]) == (phase, 2)]
    assert found.keys() == {row["metric"] for row in in_run}
    metric = "loss" if phase == "warm-up" else "greedy_accuracy"
    assert found[metric] == pytest.approx(next(row["value"] for row in in_run if row["metric"] == metric), rel=1e-6)


def test_export_takes_the_newest_phase_by_default(copied):
    folder = export_run(copied, "x", copied / "out")
    assert distance(folder, copied / "checkpoints" / policy(copied, "grpo")) == 0.0


def test_rerun_of_a_phase_takes_earlier_ones_over(copied):
    rerun("x", "update", "again", ["training.learning_rate=0.001"], root=str(copied))
    old, new = Ledger(copied / "runs/x"), Ledger(copied / "runs/again")
    for entry in old.entries(phase="warm-up"):
        taken = new.get(entry.phase, entry.step, entry.stage, entry.round)
        assert (taken.refs, taken.policy, taken.pinned_from) == (entry.refs, entry.policy, "x")
    assert new.get("grpo", 2, "rollouts").refs == old.get("grpo", 2, "rollouts").refs
    assert new.get("grpo", 1, "update").policy != old.get("grpo", 1, "update").policy
    assert not (copied / "runs/again/generated.jsonl").exists()
    rerun("x", "update", "again", ["training.learning_rate=0.001"], root=str(copied))  # goes on as it was
    with pytest.raises(SettingsError, match=r"phases\.0\.training\.epochs has no effect: what lies before phase grpo"):
        rerun("x", "update", "third", ["phases.0.training.epochs=2"], root=str(copied))


def test_rerun_of_an_earlier_phase_does_later_ones_anew(copied):
    rerun("x", "update", "again", ["training.learning_rate=0.001"], root=str(copied), phase="warm-up")
    old, new = Ledger(copied / "runs/x"), Ledger(copied / "runs/again")
    assert new.get("warm-up", 1, "rollouts").refs == old.get("warm-up", 1, "rollouts").refs
    assert new.get("warm-up", 2, "update").policy != old.get("warm-up", 2, "update").policy
    assert new.get("grpo", 1, "rollouts").refs != old.get("grpo", 1, "rollouts").refs
    assert len(new.entries("update", "grpo")) == 2


def test_rescoring_takes_a_phase(copied):
    other = f"reward.functions.0={{name: custom, path: {copied}/varied.py:varied, weight: 0.5}}"
    result = rescore(copied, "x", [other], phase="grpo")
    assert result["phase"] == "grpo" and result["functions"][0]["rows"] == 32
    with pytest.raises(SettingsError, match="has no reward functions"):
        rescore(copied, "x", [], phase="warm-up")


def test_pruning_keeps_what_a_later_phase_stands_on(copied):
    set_pin(copied, "x", 1, is_removed=False, phase="warm-up")
    assert status_of(str(copied), "x")["pins"] == ["step 1 of warm-up"]
    set_pin(copied, "x", 1, is_removed=True, phase="warm-up")
    before = all_digests(copied, "x")
    result = prune(copied, ["x"], keep_last=1, is_dry=False)
    gone = {(item["phase"], item["what"], item["step"]) for item in result["items"] if item["goes"]}
    assert {("warm-up", "rollouts", 1), ("grpo", "rollouts", 1)} <= gone
    kept = {
        (item["phase"], item["step"]) for item in result["items"] if not item["goes"] and item["what"] == "checkpoint"
    }
    assert kept >= {("warm-up", 2), ("grpo", 2)}
    view = open_run(str(copied), "x")
    assert {deletion.phase for deletion in deletions_of(view)} == {"warm-up", "grpo"}
    assert any("of phase warm-up" in deletion.sentence for deletion in deletions_of(view))
    assert all_digests(copied, "x") == before
