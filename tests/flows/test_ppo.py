"""The shipped recipe ppo: which rows train, the first loss by hand, what moves, and that runs go on to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.cli import app
from flows.rerun import rerun
from flows.train import train
from rft_core.errors import ContractError, SettingsError
from rft_core.recipes import load_recipe
from tests.faults.harness import REWARD, all_digests
from tests.flows.small_runs import SAMPLED
from tests.tiny import make_tiny_classifier, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [
    *SAMPLED,
    "steps=2",
    "rollout.group_size=2",
    "rollout.max_completion_tokens=8",
    "training.checkpoint_every=1",
    "critic={learning_rate: 0.003, warmup_steps: 1}",
    "evaluation={every: 2, prompts: 3, samples: 1, pass_at: [1]}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, model):
    """A finished run of two steps, the first of which warms the critic up."""
    root = tmp_path_factory.mktemp("ppo")
    run(root, model)
    return root


def run(root: Path, model: Path, *overrides: str, name: str = "x", recipe: str = "ppo") -> None:
    root.mkdir(exist_ok=True)
    (root / "rewards.py").write_text(REWARD)
    reward = f"reward.functions.0={{name: custom, path: {root}/rewards.py:low_letters, label: numeric_answer}}"
    kept = SMALL if recipe == "ppo" else [line for line in SMALL if not line.startswith("critic")]
    chosen = load_recipe(recipe, [*kept, f"model.path={model}", reward, *overrides])
    train(recipe=chosen, run=name, root=str(root))


def rows(root: Path, stage: str, step: int, record: str | None = None, name: str = "x") -> list[dict[str, Any]]:
    entry = Ledger(root / "runs" / name).get("main", step, stage)
    return Store(str(root)).read(entry.refs[record or stage.replace("-", "_")]).to_pylist()


def checkpoint(root: Path, step: int, name: str = "x") -> Path:
    (entry,) = [entry for entry in Ledger(root / "runs" / name).entries("checkpoint") if entry.step == step]
    return root / "checkpoints" / entry.policy.policy_id


def digest(folder: Path) -> str:
    return json.loads((folder / "manifest.json").read_text())["weights_digest"]


def moved(before: dict[str, Any], after: dict[str, Any]) -> float:
    return max(float((after[name] - before[name]).abs().max()) for name in before.keys() & after.keys())


def test_values_of_the_first_step_are_zero_and_returns_are_discounted_rewards(made):
    rollouts = {row["rollout_id"]: row for row in rows(made, "rollouts", 1)}
    rewards = {row["rollout_id"]: row["reward"] for row in rows(made, "rewards", 1)}
    scores = rows(made, "token-scores", 1)
    assert len(scores) == len(rollouts) == 8
    policy = Ledger(made / "runs/x").get("main", 1, "update").policy
    assert policy is not None and {row["scorer"] for row in scores} == {"critic"}
    for row in scores:
        assert row["values"] == [0.0] * len(rollouts[row["rollout_id"]]["completion_token_ids"])
    squares = []
    for row in rows(made, "advantages", 1):
        assert row["is_trained"] and row["drop_reason"] == "none" and row["term"] == "own"
        length = len(rollouts[row["rollout_id"]]["completion_token_ids"])
        # The reward at the last token, through a trace of lambda .95 a token.
        wanted = [rewards[row["rollout_id"]] * 0.95 ** (length - 1 - t) for t in range(length)]
        assert row["returns"] == pytest.approx(wanted, abs=1e-6)
        squares += [value**2 for value in wanted]
    (update,) = rows(made, "update", 1, "updates")
    assert update["value_loss"] == pytest.approx(np.mean(squares) / 2, rel=1e-5)
    assert update["trained_rows"] == update["forward_rows"] == 8 and update["trained_tokens"] == len(squares)


def test_the_warm_up_moves_the_critic_alone_and_then_both_move(made, model):
    first, second = checkpoint(made, 1), checkpoint(made, 2)
    start = load_file(model / "model.safetensors")
    policies = [load_file(folder / "model.safetensors") for folder in (first, second)]
    critics = [load_file(folder / "critic" / "weights.safetensors") for folder in (first, second)]
    assert moved(start, policies[0]) == 0.0 and moved(start, policies[1]) > 1e-3
    bodies = [{name: weight for name, weight in critic.items() if name != "score.weight"} for critic in critics]
    assert bodies[0].keys() <= start.keys()
    assert moved(*critics) > 1e-3
    assert critics[0]["score.weight"].abs().max() > 1e-3  # it began at 0
    one, two = (rows(made, "update", step, "updates")[0] for step in (1, 2))
    assert (one["learning_rate"], two["learning_rate"]) == (0.0, 0.003)
    assert one["policy_loss"] == 0.0 != two["grad_norm"]
    values = [row["values"] for row in rows(made, "token-scores", 2)]
    assert max(max(map(abs, part)) for part in values) > 1e-3
    # What the second step was scored by is what it began with.
    assert two["value_loss"] != one["value_loss"] and two["explained_variance"] is not None


def test_commands_that_look_at_runs_know_the_critic(made, tmp_path):
    def rft(*arguments: str) -> str:
        ended = CliRunner().invoke(app, [*arguments, "--root", str(made)])
        assert ended.exit_code == 0, ended.output
        return ended.output

    assert json.loads(rft("status", "x", "--json"))["state"] == "completed"
    shown = [
        json.loads(line) for line in rft("show", "x", "token_scores", "--step", "2", "--format", "jsonl").splitlines()
    ]
    assert len(shown) == 8 and {row["scorer"] for row in shown} == {"critic"}
    lineage = json.loads(rft("lineage", "x", "--json"))
    assert [node for node in lineage["nodes"] if node["record"] == "token_scores"]
    report = Path(rft("report", "x", "--out", str(tmp_path / "report.html")).strip()).read_text()
    assert "Value loss" in report and "Explained variance" in report
    said = rft("export", "x", "--to", str(tmp_path / "exported"))
    assert "the critic stays in the checkpoint" in said
    assert not (tmp_path / "exported" / "critic").exists()


@pytest.mark.parametrize("kind", ["separate", "shared", "adapters"])
def test_a_run_that_goes_on_gives_the_bits_of_one_that_never_stopped(tmp_path, model, kind):
    """Checkpoints of steps 2, 4 and the last: going on from 3 replays an update, and so does a branch at 4."""
    recipe = ["training.checkpoint_every=2", "training.mini_batches=2", "evaluation.every=0", "model.dtype=bfloat16"]
    if kind == "shared":
        recipe.append("critic={shared_trunk: true, warmup_steps: 1}")
    if kind == "adapters":
        recipe.append("model.lora_rank=4")
    run(tmp_path / "calm", model, *recipe, "steps=5")
    run(tmp_path / "stops", model, *recipe, "steps=3")
    # The checkpoint of step 3 was the last one's; without it the run goes on from 2, by a replay of 3.
    (checkpoint(tmp_path / "stops", 3) / "critic" / "optimizer.safetensors").write_bytes(b"altered")
    run(tmp_path / "stops", model, *recipe, "steps=5")
    calm, stops = (all_digests(tmp_path / name, "x") for name in ("calm", "stops"))
    assert {slot: found for slot, found in stops.items() if slot != "3.checkpoint.0"} == calm
    for file in ("critic/weights.safetensors", "critic/optimizer.safetensors", "optimizer.safetensors"):
        bytes_of = [(checkpoint(tmp_path / name, 5) / file).read_bytes() for name in ("calm", "stops")]
        assert bytes_of[0] == bytes_of[1], file


def test_reruns_take_values_by_the_critic_that_they_train(made, model, tmp_path):
    root = str(made)
    rerun("x", "update", "again", ["training.learning_rate=0.001"], root=root)
    assert (
        rows(made, "update", 1, "updates", "again")[0]["value_loss"]
        == rows(made, "update", 1, "updates")[0]["value_loss"]
    )
    # Another first critic: values, and so advantages, are its own, though policy and rollouts are the same.
    judge = make_tiny_classifier(tmp_path / "judge", seed=3)
    rerun("x", "advantages", "judged", [f"critic.path={judge}"], root=root)
    judged = rows(made, "token-scores", 1, name="judged")
    assert max(abs(value) for row in judged for value in row["values"]) > 0.1
    assert {row["model_id"] for row in judged} == {row["model_id"] for row in rows(made, "token-scores", 1)}
    # A cut completion goes on with the value behind it.
    rerun("x", "advantages", "boot", [f"critic.path={judge}", "algorithm.bootstrap_truncated=true"], root=root)
    scored = rows(made, "token-scores", 1, name="boot")
    cut = {row["rollout_id"] for row in rows(made, "rollouts", 1) if row["finish_reason"] == "length"}
    assert {row["rollout_id"] for row in scored if row["scorer"] == "critic_after"} == cut != set()
    with pytest.raises(SettingsError, match="the critic must be that of the run whose tables are taken over"):
        rerun("x", "rollouts", "branch", [f"critic.path={judge}"], at=2, root=root)
    rerun("x", "rollouts", "branch", ["training.learning_rate=0.001"], at=2, root=root)
    assert digest(checkpoint(made, 2, "branch")) != digest(checkpoint(made, 2))


def test_a_run_without_a_critic_can_go_on_with_one(tmp_path, model):
    run(tmp_path, model, name="grpo", recipe="quickstart")
    rerun("grpo", "rollouts", "ppo", ["algorithm.name=ppo", "steps=3"], at=2, root=str(tmp_path))
    assert {value for row in rows(tmp_path, "token-scores", 2, name="ppo") for value in row["values"]} == {0.0}
    assert rows(tmp_path, "update", 3, "updates", "ppo")[0]["value_loss"] > 0
    with pytest.raises(ContractError, match=r"must hold the returns that a critic is trained on"):
        rerun("grpo", "update", "late", ["algorithm.surrogate=clipped", "algorithm.name=ppo"], root=str(tmp_path))
