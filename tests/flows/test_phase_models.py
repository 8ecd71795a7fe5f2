"""What one phase hands to the next: reward models, adapters, critics, and folders that are made again."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.inspect.lineage import lineage_of
from flows.inspect.run import open_run
from flows.inspect.status import status_of
from rft_core.policy import Policy
from rft_core.rewards import build_grader
from rft_core.rewards.settings import RewardSettings
from tests.faults.harness import all_digests, flip_a_byte
from tests.flows.phase_runs import distance, policy, run, table
from tests.flows.small_runs import logprobs
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_damaged_model_of_a_finished_phase_is_made_again(copied, model):
    before = all_digests(copied, "x")
    kept = copied / "checkpoints" / policy(copied, "warm-up")
    flip_a_byte(kept / "model.safetensors")
    run(copied, model, "sft_then_grpo", "phases.1.steps=3")
    after = all_digests(copied, "x")
    assert {name: after[name] for name in before if not name.startswith("weights")} == {
        name: digest for name, digest in before.items() if not name.startswith("weights")
    }
    assert after["weights of warm-up"] == before["weights of warm-up"]
    assert len(list((copied / "damaged").iterdir())) == 1


@pytest.fixture(scope="module")
def judged(on_server, model, tmp_path_factory):
    root = tmp_path_factory.mktemp("judged")
    run(root, model, "reward_model_then_grpo")
    return root


def test_a_reward_model_rewards_the_phase_after_it(judged, model):
    first = table(judged, "judge", 1, "update", "updates")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)  # a new head gives 0 for all
    judge = judged / "checkpoints" / policy(judged, "judge")
    recipe = open_run(str(judged), "x").of_phase("grpo").recipe
    assert recipe["model"]["path"] == str(model)  # no language model was trained before
    assert recipe["reward"]["functions"][0]["reward_model"]["path"] == "phase:judge"
    rewards = table(judged, "grpo", 1, "rewards")
    assert {row["status"] for row in rewards} == {"scored"}
    scores = [dict(row["components"])["reward_model"] for row in rewards]
    assert len({round(score, 6) for score in scores}) > 1

    section = {"path": str(judge), "normalise": "stored", "device": "cpu", "dtype": "float32"}
    functions = [{"name": "reward_model", "reward_model": section}]
    grader = build_grader(RewardSettings.model_validate({"functions": functions}))
    store, entry = Store(str(judged)), Ledger(judged / "runs/x").get("grpo", 1, "rollouts")
    prompts = Ledger(judged / "runs/x").get("grpo", 1, "prompts").refs["prompts"]
    again = grader.score(store.read(entry.refs["rollouts"]), store.read(prompts)).to_pylist()
    by_id = {row["rollout_id"]: row["reward"] for row in again}
    grader.close()
    assert scores == pytest.approx([by_id[row["rollout_id"]] for row in rewards], abs=1e-6)
    assert distance(model, judged / "checkpoints" / policy(judged, "grpo")) > 1e-3
    assert table(judged, "grpo", 1, "update", "updates")[0]["kl"] == 0.0


def test_lineage_leads_from_rewards_to_the_model_that_gave_them(judged):
    rewards = Ledger(judged / "runs/x").get("grpo", 1, "rewards").refs["rewards"]
    lineage = lineage_of(str(judged), rewards.name)
    assert {"from": rewards.name, "to": f"policy/{policy(judged, 'judge')}"} in lineage["edges"]
    assert "sums_pairs.jsonl" in {node["key"] for node in lineage["nodes"] if node["record"] == "source"}


def test_an_adapter_is_merged_for_the_phase_after_it(tmp_path, model, monkeypatch):
    root, loaded, load = tmp_path / "root", [], Policy.load.__func__

    def load_alone(kind: type[Policy], *arguments: Any, **named: Any) -> Policy:
        gc.collect()
        assert [earlier for earlier in loaded if earlier() is not None] == []  # the phase before let go of its own
        made = load(kind, *arguments, **named)
        loaded.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Policy, "load", classmethod(load_alone))
    run(root, model, "sft_then_grpo", "model.lora_rank=2")
    first = policy(root, "warm-up")
    merged = root / "merged" / first
    assert not (root / "checkpoints" / first / "model.safetensors").exists()
    assert distance(model, merged) > 1e-4
    assert len(loaded) == 3  # to train, to merge, to train
    first_update, second = (table(root, "grpo", step, "update", "updates")[0] for step in (1, 2))
    assert first_update["kl"] == 0.0 and second["kl"] > 0  # the adapter is off for the reference
    module = AutoModelForCausalLM.from_pretrained(merged)
    for row in table(root, "grpo", 1, "rollouts")[:4]:
        assert torch.tensor(row["behaviour_logprobs"]).double() == pytest.approx(logprobs(module, row), abs=1e-4)
    files = {path.name: path.read_bytes() for path in merged.iterdir()}
    shutil.rmtree(merged)
    run(root, model, "sft_then_grpo", "model.lora_rank=2", "phases.1.steps=3")
    assert {path.name: path.read_bytes() for path in merged.iterdir()} == files  # made again, byte for byte
    assert status_of(str(root), "x")["step"] == 5


def test_ppo_starts_its_critic_from_the_reward_model(tmp_path, model):
    root = tmp_path / "root"
    ppo = ["phases.1.algorithm={name: ppo}", "phases.1.critic={path: 'phase:judge', learning_rate: 0.003}"]
    run(root, model, "reward_model_then_grpo", *ppo)
    began = json.loads((root / "runs/x/run.json").read_text())["phases"]["grpo"]
    assert began["critic.path"] == policy(root, "judge") == began["reward.functions.0.reward_model.path"]
    # The first value of a token is the score that the reward model gives behind it.
    scores = [row for row in table(root, "grpo", 1, "token-scores", "token_scores") if row["scorer"] == "critic"]
    assert any(value != 0.0 for row in scores for value in row["values"])
    updates = Ledger(root / "runs/x").get("grpo", 2, "update").refs["updates"]
    edges = lineage_of(str(root), "x")["edges"]
    assert {"from": updates.name, "to": f"policy/{policy(root, 'judge')}"} in edges
    assert (root / "checkpoints" / policy(root, "grpo") / "critic").is_dir()
