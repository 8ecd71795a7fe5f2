"""Two runs side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import app
from flows.inspect.compare import compare, print_comparison
from rft_core.errors import SettingsError
from tests.flows.sample_run import build_sample_run


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """Both evaluate at the start and after step 4: there the first is two thirds through its rise, the second at its
    end. The held-out prompts are 2 and 3; their completions are right where 4, 7, 0, 3 and 1, 4, 7, 0 are below 6 or 8.
    """
    folder = tmp_path_factory.mktemp("runs")
    build_sample_run(folder, "slow", steps=6, evaluate_every=4)
    build_sample_run(folder, "quick", steps=4, evaluate_every=4)
    return str(folder)


def test_settings_evaluations_and_times_are_set_side_by_side(root):
    found = compare(root, "slow", "quick")
    assert [(head["run"], head["step"], head["steps"]) for head in found["runs"]] == [("slow", 6, 6), ("quick", 4, 4)]
    assert found["settings"] == [{"setting": "steps", "first": 6, "second": 4, "is_content": True}]
    last = {row["metric"]: row for row in found["last"]}
    assert list(last)[:3] == ["sampled_accuracy", "greedy_accuracy", "mean_reward"]
    sampled = last["sampled_accuracy"]
    assert (sampled["first"]["value"], sampled["second"]["value"]) == (0.75, 1.0)  # 3 of 4 of either prompt, and all
    assert (sampled["difference"], sampled["low"], sampled["high"], sampled["num_prompts"]) == (0.25, 0.25, 0.25, 2)
    assert [row["step"] for row in found["evaluations"] if row["metric"] == "sampled_accuracy"] == [0, 4]
    assert all(row["first"]["step"] == row["second"]["step"] == row["step"] for row in found["evaluations"])
    times = {row["stage"]: (row["first"], row["second"]) for row in found["timings"]}
    # 4 + step / 10 seconds a step, over six steps and over four.
    assert times["rollouts"] == pytest.approx((4.35, 4.25))


def test_a_run_compared_with_itself_differs_in_nothing(root):
    found = compare(root, "slow", "slow")
    assert found["settings"] == []
    assert {row["difference"] for row in found["last"]} == {0.0}


def test_what_one_run_has_alone_is_null_in_the_other(root, tmp_path):
    build_sample_run(tmp_path, "slow", steps=6, evaluate_every=4)
    build_sample_run(tmp_path, "short", steps=2, evaluate_every=2)
    found = compare(str(tmp_path), "slow", "short")
    steps = [
        (row["step"], row["first"] is None, row["second"] is None)
        for row in found["evaluations"]
        if row["metric"] == "mean_reward"
    ]
    assert steps == [(0, False, False), (2, True, False), (4, False, True)]
    assert [(row["first"]["step"], row["second"]["step"]) for row in found["last"]] == [(4, 2)] * len(found["last"])


def test_an_id_that_asks_something_else_is_not_paired(tmp_path):
    """As where two runs have different files of one name."""
    build_sample_run(tmp_path, "slow", steps=6, evaluate_every=4)
    build_sample_run(tmp_path, "quick", steps=4, evaluate_every=4)
    before = {row["metric"]: row["num_prompts"] for row in compare(str(tmp_path), "slow", "quick")["last"]}
    assert before["sampled_accuracy"] == 2
    build_sample_run(tmp_path, "other", steps=4, evaluate_every=4, prompts=3)  # held out are 3, 4 and 5, not 2 and 3
    after = {row["metric"]: row for row in compare(str(tmp_path), "slow", "other")["last"]}
    assert after["sampled_accuracy"]["num_prompts"] == 1


def test_the_command_prints_both_and_gives_json(root):
    called = CliRunner().invoke(app, ["compare", "slow", "quick", "--json", "--root", root])
    assert called.exit_code == 0 and json.loads(called.stdout) == json.loads(json.dumps(compare(root, "slow", "quick")))
    page = io.StringIO()
    print_comparison(compare(root, "slow", "quick"), Console(file=page))
    lines = page.getvalue().splitlines()
    assert "steps\t6\t4" in lines
    (line,) = (line.split("\t") for line in lines if line.startswith("sampled_accuracy"))
    assert line[1].startswith("0.750 [") and line[1].endswith("] step 4") and line[2].startswith("1.000 [")
    assert line[3] == "+0.250 [+0.250, +0.250] over 2 prompts"


def test_a_recipe_that_is_not_valid_is_said(root, tmp_path):
    made = build_sample_run(tmp_path, "old", steps=1)
    recipe = Path(made.root) / "runs/old/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 1", "stepz: 1"))
    with pytest.raises(SettingsError, match="the recipe of run 'old' must be valid in this release"):
        compare(str(tmp_path), "old", "old")
