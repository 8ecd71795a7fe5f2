"""The shipped recipes whose rewards a local model gives, each run for two steps on tiny random models."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.train import train
from rft_core.errors import ContentChanged
from rft_core.recipes import load_recipe
from tests.tiny import make_tiny_classifier, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [
    "steps=2",
    "model.device=cpu",
    "model.dtype=float32",
    "data.size=40",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "training.learning_rate=0.01",
    "evaluation={every: 2, prompts: 2, samples: 2, pass_at: [2], correct_component: numeric_answer}",
    "execution.threads=1",
    "reward.max_unscored_fraction=1",
]


def run(root: Path, recipe: str, *changes: str) -> None:
    make_tiny_model(root / "models" / "policy")
    train(recipe=load_recipe(recipe, [*SMALL, "model.path=policy", *changes]), run="x", root=str(root))


def rows(root: Path, step: int) -> list[dict[str, Any]]:
    """Rollouts of a step with their rewards and advantages."""
    ledger, store = Ledger(root / "runs/x"), Store(str(root))
    merged: dict[str, dict[str, Any]] = {}
    for stage in ("rollouts", "rewards", "advantages"):
        for row in store.read(ledger.get("main", step, stage).refs[stage]).to_pylist():
            merged.setdefault(row["rollout_id"], {}).update(row)
    return list(merged.values())


def assert_trained_are_the_scored_ones_of_mixed_groups(made: list[dict[str, Any]]) -> None:
    scores: dict[str, set[float]] = {}
    for row in made:
        if row["reward"] is not None:
            scores.setdefault(row["group_id"], set()).add(row["reward"])
    for row in made:
        assert (row["status"] == "scored") == (row["reward"] is not None)
        is_of_use = row["reward"] is not None and len(scores[row["group_id"]]) > 1
        assert (row["is_trained"] and row["advantage"] != 0) == is_of_use, row
        assert (row["drop_reason"] == "unscored") == (row["reward"] is None)


def assert_weights_moved(root: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(root / "models" / "policy")
    last = Ledger(root / "runs/x").entries("checkpoint")[-1].policy.policy_id
    after = AutoModelForCausalLM.from_pretrained(root / "checkpoints" / last)
    moved = [(a - b).abs().max().item() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert min(moved) > 1e-3


def test_a_reward_model_trains(tmp_path):
    folder = make_tiny_classifier(tmp_path / "models" / "judge", seed=5)
    (folder / "reward_statistics.json").write_text(json.dumps({"mean": 0.25, "std": 0.5, "count": 10}))
    own = "reward.functions.0.reward_model"
    run(
        tmp_path, "reward_model", f"{own}.path=judge", f"{own}.normalise=stored", f"{own}.max_tokens=99",
        f"{own}.dtype=float32", "rollout.max_completion_tokens=6",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    seen: Counter[bool] = Counter()
    for step in (1, 2):
        made = rows(tmp_path, step)
        assert len(made) == 12
        assert_trained_are_the_scored_ones_of_mixed_groups(made)
        for row in made:
            question, completion = (message["content"] for message in json.loads(row["messages"]))
            text = f"[user] {question}<|im_end|>[assistant] {completion}<|im_end|>"
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            is_scored = ids.shape[1] <= 99
            seen[is_scored] += 1
            if not is_scored:
                assert row["reason"].startswith(f"reward_model: {ids.shape[1]} tokens as the model sees them, at most")
                continue
            with torch.no_grad():
                logit = float(module.score(module.model(ids).last_hidden_state[0, -1])[0])
            assert row["reward"] == pytest.approx((logit - 0.25) / 0.5, abs=1e-5)
        assert any(row["is_trained"] for row in made)
    assert min(seen[True], seen[False]) > 0
    assert_weights_moved(tmp_path)


def test_tokens_get_the_steps_from_them_on(tmp_path):
    make_tiny_classifier(tmp_path / "models" / "steps", "token", ("bad", "good"), seed=6)
    own = "reward.functions.1.process_reward_model"
    changes = [f"{own}.path=steps", f"{own}.dtype=float32", "rollout.max_completion_tokens=40"]
    run(tmp_path, "process_supervision", *changes, "algorithm.advantage=per_step_group_zscore", "steps=1")
    made = rows(tmp_path, 1)
    groups: dict[str, list[float]] = {}
    for row in made:
        groups.setdefault(row["group_id"], []).extend(row["step_rewards"])
    assert max(map(len, groups.values())) > 3
    for row in made:
        pool = np.array(groups[row["group_id"]])
        z = (np.array(row["step_rewards"]) - pool.mean()) / (pool.std(ddof=1) + 1e-6)
        wanted = [
            sum(value for end, value in zip(row["step_ends"], z, strict=True) if end >= place)
            for place in range(len(row["completion_token_ids"]))
        ]
        assert row["is_trained"] and row["token_advantages"] == pytest.approx(wanted, abs=1e-5)
    assert_weights_moved(tmp_path)


def test_process_supervision_trains(tmp_path):
    folder = make_tiny_classifier(tmp_path / "models" / "steps", "token", ("bad", "good"), seed=6)
    own = "reward.functions.1.process_reward_model"
    changes = [f"{own}.path=steps", f"{own}.dtype=float32", "rollout.max_completion_tokens=40"]
    run(tmp_path, "process_supervision", *changes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForTokenClassification.from_pretrained(folder).eval()
    num_steps: Counter[int] = Counter()
    for step in (1, 2):
        made = rows(tmp_path, step)
        assert len(made) == 12 and all(row["status"] == "scored" for row in made)
        assert_trained_are_the_scored_ones_of_mixed_groups(made)
        for row in made:
            question = json.loads(row["messages"])[0]["content"]
            steps = [line.strip() for line in row["completion_text"].split("\n") if line.strip()]
            num_steps[len(steps)] += 1
            text, expected = f"<|im_start|>{question}", []
            for part in steps:
                text += part + "\n"
                with torch.no_grad():
                    logits = module(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1]
                expected.append(0.5 * float(logits.softmax(0)[1]))  # the function's weight
            assert row["step_rewards"] == pytest.approx(expected, abs=1e-5)
            components = dict(row["components"])
            assert row["reward"] == pytest.approx(components["numeric_answer"] + min(expected, default=0.0), abs=1e-5)
            for end, part in zip(row["step_ends"], steps, strict=True):
                until = tokenizer.decode(row["completion_token_ids"][: end + 1], skip_special_tokens=True)
                assert until.endswith(part)
    assert max(num_steps) > 1
    assert_weights_moved(tmp_path)
    run(tmp_path, "process_supervision", *changes)  # it is complete
    make_tiny_classifier(folder, "token", ("bad", "good"), seed=7)
    with pytest.raises(ContentChanged, match="content of the grader: "):
        run(tmp_path, "process_supervision", *changes)
