"""The shipped recipes for completions that the data gives, two steps of each: which rows train, the first loss by hand
or by the Hugging Face model itself, and that the weights moved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from data_contracts.ledger import Ledger
from flows.evaluate import evaluation_recipe
from flows.export import export_run
from flows.train import train
from rft_core.errors import SettingsError
from rft_core.recipes import load_recipe
from tests.flows.small_runs import SMALL, logprobs, moved, rows, table
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
FEW = ["rollout.prompts_per_step=6", "evaluation={every: 2, prompts: 8}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def run(root: Path, model: Path, recipe: str, *overrides: str, name: str = "x") -> None:
    train(recipe=load_recipe(recipe, [*SMALL, *FEW, f"model.path={model}", *overrides]), run=name, root=str(root))


def metrics(root: Path, step: int) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in table(root, step, "evaluation", "evaluations")}


def test_sft_learns_the_given_answers(tmp_path, model):
    run(tmp_path, model, "sft")
    made = rows(tmp_path)
    assert len(made) == 6 and all(row["is_trained"] and row["reward"] == row["advantage"] == 1.0 for row in made)
    assert {row["origin"] for row in made} == {"dataset"} and {row["term"] for row in made} == {"expert"}
    module = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.cat([logprobs(module, row) for row in made])
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(-float(tokens.mean()), rel=1e-5)
    assert update["trained_tokens"] == len(tokens) and update["off_policy_rows"] == 6
    for row in made:
        assert row["completion_text"] == json.loads(row["messages"])[-1]["content"]
    assert metrics(tmp_path, 2)["loss"] < metrics(tmp_path, 0)["loss"]
    assert moved(tmp_path, model) > 1e-3
    assert not (tmp_path / "runs/x/generated.jsonl").exists()


def test_dft_weighs_tokens_by_their_probability(tmp_path, model):
    run(tmp_path, model, "sft", "algorithm.name=dft")
    module = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.cat([logprobs(module, row) for row in rows(tmp_path)])
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(-float((tokens.exp() * tokens).mean()), rel=1e-5)


def test_dpo_prefers_the_chosen(tmp_path, model):
    run(tmp_path, model, "dpo")
    made = rows(tmp_path)
    assert len(made) == 12 and all(row["is_trained"] for row in made)
    for row in made:
        is_chosen = row["rollout_id"].endswith("/00")
        assert (row["reward"], row["pair_role"]) == ((1.0, "chosen") if is_chosen else (0.0, "rejected"))
        assert row["pair_id"] == row["group_id"]
    first, second = (table(tmp_path, step, "update", "updates")[0] for step in (1, 2))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)  # the policy is its reference
    assert first["rewards_margin"] == first["rewards_accuracy"] == 0.0
    module = AutoModelForCausalLM.from_pretrained(model)
    chosen = [float(logprobs(module, row).sum()) for row in made if row["pair_role"] == "chosen"]
    assert first["logps_chosen"] == pytest.approx(sum(chosen) / 6, rel=1e-5)
    assert second["loss"] != first["loss"]
    assert metrics(tmp_path, 0)["margin"] == metrics(tmp_path, 0)["preference_accuracy"] == 0.0
    assert metrics(tmp_path, 0)["preference_ties"] == 1.0
    assert metrics(tmp_path, 2)["margin"] != 0.0 and metrics(tmp_path, 2)["preference_ties"] == 0.0
    assert moved(tmp_path, model) > 1e-3


def test_evaluating_a_run_on_preferences_measures_its_margin_against_its_start(tmp_path, model):
    run(tmp_path, model, "dpo")
    evaluated, name = evaluation_recipe(tmp_path, "x", None, [])
    assert evaluated.evaluation.reference == str(model)
    train(recipe=evaluated, run=name, root=str(tmp_path))
    again = {row["metric"]: row["value"] for row in table(tmp_path, 0, "evaluation", "evaluations", name)}
    assert again == pytest.approx(metrics(tmp_path, 2), rel=1e-5)
    # Against itself a policy has no margin, and against another model another one.
    alone, name = evaluation_recipe(tmp_path, "x", None, ["evaluation.reference=null"])
    train(recipe=alone, run=name, root=str(tmp_path))
    assert [row["metric"] for row in table(tmp_path, 0, "evaluation", "evaluations", name)] == ["loss"]
    other = make_tiny_model(tmp_path / "other", seed=1)
    against, name = evaluation_recipe(tmp_path, "x", None, [f"evaluation.reference={other}"])
    train(recipe=against, run=name, root=str(tmp_path))
    found = {row["metric"]: row["value"] for row in table(tmp_path, 0, "evaluation", "evaluations", name)}
    assert found["loss"] == again["loss"] and found["margin"] != pytest.approx(again["margin"], rel=0.1)
    with pytest.raises(SettingsError, match=r"evaluation\.reference has no effect"):
        load_recipe("sft", [f"evaluation.reference={model}"])


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo", "mpo"])
def test_other_pair_losses_take_the_same_recipe(tmp_path, model, name):
    overrides = ["algorithm.preference={}"] if name in ("simpo", "orpo", "mpo") else []
    run(tmp_path, model, "dpo", f"algorithm.name={name}", *overrides)
    module = AutoModelForCausalLM.from_pretrained(model)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for row in rows(tmp_path):
        pairs.setdefault(row["pair_id"], {})[row["pair_role"]] = logprobs(module, row)
    averages = [(float(pair["chosen"].mean()), float(pair["rejected"].mean())) for pair in pairs.values()]

    def softplus(x: float) -> float:
        return math.log1p(math.exp(-x))

    def log_odds(a: float) -> float:
        return a - math.log1p(-math.exp(a))

    by_hand = {
        "ipo": 25.0,  # (0 - 1 / 0.2)^2
        "simpo": sum(softplus(2.5 * (c - j) - 1.375) for c, j in averages) / 6,
        "orpo": sum(-c + 0.1 * softplus(log_odds(c) - log_odds(j)) for c, j in averages) / 6,
        "mpo": math.log(2) * (0.8 + 0.2 * 2) - sum(c for c, _ in averages) / 6,
    }
    assert table(tmp_path, 1, "update", "updates")[0]["loss"] == pytest.approx(by_hand[name], rel=1e-5)
    assert moved(tmp_path, model) > 1e-3


def test_kto_takes_completions_one_by_one(tmp_path, model):
    run(tmp_path, model, "kto")
    made = rows(tmp_path)
    assert len(made) == 6 and {row["pair_role"] for row in made} == {"chosen", "rejected"}
    for row in made:
        assert row["reward"] == float(row["pair_role"] == "chosen") and row["pair_id"] == row["rollout_id"]
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(0.5, abs=1e-9)  # 1 - sig(0)
    assert update["rewards_accuracy"] is None
    assert metrics(tmp_path, 0)["margin"] == 0.0
    assert moved(tmp_path, model) > 1e-3


def test_a_reward_model_is_trained_exported_and_rewards(tmp_path, model):
    run(tmp_path, model, "train_reward_model")
    first, second = (table(tmp_path, step, "update", "updates")[0] for step in (1, 2))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)  # a new head gives 0 for all
    assert first["trained_tokens"] == first["trained_rows"] == 12  # the last token of each completion
    assert first["entropy"] is None and first["logps_chosen"] is None
    assert second["rewards_margin"] != 0.0
    assert set(metrics(tmp_path, 2)) == {"margin", "preference_accuracy", "preference_ties"}
    assert moved(tmp_path, model, AutoModelForSequenceClassification) > 1e-3
    folder = export_run(tmp_path, "x", tmp_path / "judge")
    statistics = json.loads((folder / "reward_statistics.json").read_text())
    assert statistics["count"] == 24 and statistics["std"] > 0
    reward = [f"reward.functions.0.reward_model.{setting}" for setting in (f"path={folder}", "normalise=stored")]
    overrides = ["rollout.group_size=2", "rollout.max_completion_tokens=6", "data.size=30", *reward]
    run(tmp_path, model, "reward_model", *overrides, "evaluation.every=0", name="y")
    assert {row["status"] for row in table(tmp_path, 1, "rewards", name="y")} == {"scored"}


def test_a_process_reward_model_judges_each_step(tmp_path, model):
    run(tmp_path, model, "train_process_reward_model")
    made = rows(tmp_path)
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert update["trained_tokens"] == sum(len(row["step_ends"]) for row in made)
    for row in made:
        credit = [row["token_advantages"][end] for end in row["step_ends"]]
        assert credit == [1.0 if label >= 0.5 else -1.0 for label in row["step_rewards"]]
        assert sum(map(abs, row["token_advantages"])) == len(credit)
    assert set(metrics(tmp_path, 2)) == {"step_accuracy"}
    assert moved(tmp_path, model, AutoModelForTokenClassification) > 1e-3


def test_a_run_that_goes_on_gives_the_weights_of_one_that_never_stopped(tmp_path, model):
    """bco keeps a running mean, which a checkpoint must hold and a replay rebuild."""
    often, recipe = "training.checkpoint_every=2", ["kto", "algorithm.name=bco", "evaluation.every=0"]
    run(tmp_path, model, *recipe, often, "steps=3")
    run(tmp_path, model, *recipe, often, "steps=5")
    run(tmp_path / "straight", model, *recipe, often, "steps=5")
    digests = [
        Ledger(root / "runs/x").entries("update")[-1].policy.policy_id for root in (tmp_path, tmp_path / "straight")
    ]
    assert digests[0] == digests[1]
    weights = [
        json.loads((root / "checkpoints" / digests[0] / "manifest.json").read_text())["weights_digest"]
        for root in (tmp_path, tmp_path / "straight")
    ]
    assert weights[0] == weights[1]
