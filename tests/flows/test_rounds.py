"""Steps of several rounds: fresh prompts for groups without signal, and greedy baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.cli import app
from flows.inspect.deleted import deletions_of
from flows.inspect.run import open_run
from flows.rerun import rerun
from flows.train import train
from rft_core.recipes import load_recipe
from tests.flows.small_runs import SAMPLED, weights_digest
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [*SAMPLED, "steps=3"]
# Two of the digits: a tiny random model writes one in some completions, and in none of some groups.
DIGIT = """
def digit(rows):
    return [float(any(letter in "78" for letter in row.completion_text)) for row in rows]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def run(root: Path, model: Path, *overrides: str, name: str = "x") -> None:
    root.mkdir(exist_ok=True)
    (root / "digit.py").write_text(DIGIT)
    reward = f"reward.functions.0={{name: custom, path: {root}/digit.py:digit, label: numeric_answer}}"
    chosen = load_recipe("dapo", [*SMALL, f"model.path={model}", reward, *overrides])
    train(recipe=chosen, run=name, root=str(root))


def tables(root: Path, stage: str, step: int, name: str = "x") -> dict[int, list[dict[str, Any]]]:
    """Rows of a stage by round."""
    entries = [entry for entry in Ledger(root / "runs" / name).entries(stage) if entry.step == step]
    return {entry.round: Store(str(root)).read(entry.refs[stage]).to_pylist() for entry in entries}


def test_fresh_prompts_take_the_place_of_groups_without_signal(tmp_path, model):
    run(tmp_path, model)
    num_rounds = []
    for step in (1, 2, 3):
        prompts, rewards = tables(tmp_path, "prompts", step), tables(tmp_path, "rewards", step)
        assert prompts.keys() == rewards.keys() == tables(tmp_path, "rollouts", step).keys()
        ids = [row["prompt_id"] for rows in prompts.values() for row in rows]
        assert len(ids) == len(set(ids)) == 4 * len(prompts)  # no prompt twice
        (credit,) = tables(tmp_path, "advantages", step).values()
        assert len(credit) == 16 * len(prompts)  # every row of every round has its reason
        spread: dict[str, set[float]] = {}
        for row in (row for rows in rewards.values() for row in rows):
            spread.setdefault(row["group_id"], set()).add(dict(row["components"])["numeric_answer"])
        with_signal = [group for group, scores in spread.items() if len(scores) > 1]
        trained = {row["group_id"] for row in credit if row["is_trained"]}
        assert trained == set(with_signal[:4])
        assert {row["drop_reason"] for row in credit if not row["is_trained"]} <= {"filtered"}
        before = [group for group in with_signal if group.split("/")[1] in ids[: -4 or None]]
        assert len(prompts) == 4 or len(with_signal) >= 4
        assert len(prompts) == 1 or len(before) < 4  # the last round was needed
        num_rounds.append(len(prompts))
    assert max(num_rounds) > 1
    run(tmp_path / "again", model)
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "again")


def test_an_offline_rerun_takes_the_rounds_that_are_there(tmp_path, model):
    run(tmp_path, model)
    rerun("x", "rewards", "y", ["reward.functions.0.weight=2", "algorithm.max_resample_rounds=9"], root=str(tmp_path))
    for step in (1, 2, 3):
        assert tables(tmp_path, "rollouts", step).keys() >= tables(tmp_path, "rewards", step, "y").keys()
    assert not (tmp_path / "runs/y/generated.jsonl").exists()
    rerun("x", "advantages", "z", ["algorithm={name: grpo}"], root=str(tmp_path))
    assert weights_digest(tmp_path, "z") != weights_digest(tmp_path)


def test_a_run_goes_on_after_the_tables_of_its_rounds_were_pruned(tmp_path, model):
    run(tmp_path, model, "steps=5")
    rounds = [len(tables(tmp_path, "prompts", step)) for step in range(1, 6)]
    assert max(rounds) > 1
    done = CliRunner().invoke(app, ["prune", "x", "--yes", "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert deletions_of(open_run(str(tmp_path), "x"), ["rewards"])
    run(tmp_path, model, "steps=6")
    entries = Ledger(tmp_path / "runs/x").entries("prompts")
    assert [sum(entry.step == step for entry in entries) for step in range(1, 6)] == rounds
    run(tmp_path / "straight", model, "steps=6")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "straight")


def test_remax_compares_with_the_greedy_completion(tmp_path, model):
    remax = "algorithm={name: remax}"
    run(tmp_path, model, remax)
    rollouts, rewards = tables(tmp_path, "rollouts", 2), tables(tmp_path, "rewards", 2)
    assert rollouts.keys() == rewards.keys() == {0, 100}
    assert {row["purpose"] for row in rollouts[100]} == {"baseline"} and len(rollouts[100]) == 4
    assert {json.loads(row["sampling"])["temperature"] for row in rollouts[100]} == {0.0}
    reward = {row["rollout_id"]: row["reward"] for rows in rewards.values() for row in rows}
    greedy = {row["prompt_id"]: reward[row["rollout_id"]] for row in rollouts[100]}
    prompt = {row["rollout_id"]: row["prompt_id"] for row in rollouts[0]}
    (credit,) = tables(tmp_path, "advantages", 2).values()
    assert len(credit) == 16
    for row in credit:
        assert row["advantage"] == reward[row["rollout_id"]] - greedy[prompt[row["rollout_id"]]]
    run(tmp_path, model, remax, "steps=5")  # goes on from a replay
    run(tmp_path / "straight", model, remax, "steps=5")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "straight")


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus"])
def test_kl_in_the_reward_is_kept_as_token_scores(tmp_path, model, name):
    algorithm = f"algorithm={{name: {name}, reward_kl_coefficient: 0.5}}"
    run(tmp_path, model, algorithm)
    for step in (1, 3):
        (scores,) = (
            Store(str(tmp_path)).read(entry.refs["token_scores"]).to_pylist()
            for entry in Ledger(tmp_path / "runs/x").entries("token-scores")
            if entry.step == step
        )
        assert len(scores) == 2 * 16
        gaps = {(row["rollout_id"], row["scorer"]): row["values"] for row in scores}
        differ = [gaps[key, "old"] != gaps[key, "reference"] for key, scorer in gaps if scorer == "old"]
        assert all(differ) if step > 1 else not any(differ)  # the first policy is its reference
        (rollouts,) = tables(tmp_path, "rollouts", step).values()
        for row in rollouts:  # the trainer's own logprobs, of an engine that it shares weights with
            assert gaps[row["rollout_id"], "old"] == pytest.approx(row["behaviour_logprobs"], abs=1e-4)
    rerun("x", "update", "y", [], root=str(tmp_path))  # credit is there: nothing is scored
    assert Ledger(tmp_path / "runs/y").entries("token-scores") == []
    assert weights_digest(tmp_path, "y") == weights_digest(tmp_path)
    rerun("x", "advantages", "z", ["algorithm.reward_kl_coefficient=0"], root=str(tmp_path))
    assert weights_digest(tmp_path, "z") != weights_digest(tmp_path)
