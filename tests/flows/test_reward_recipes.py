"""Shipped recipes of rewards, two steps of each: known completions, rewards by hand, a tiny model that trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.train import train
from rft_core.errors import SettingsError
from rft_core.recipes import load_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [
    "steps=2",
    "model.dtype=float32",
    "model.device=cpu",
    "rollout.engine=scripted",
    "training.learning_rate=0.003",
    "evaluation.every=0",
    "execution.threads=1",
    "execution.retries=0",
]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path) -> Callable[..., list[Row]]:
    """Run a recipe on a script; gives its rows: prompt, rollout, reward and advantage together. Checks that every row
    is there, that all and only rows of groups with a spread are trained, and that the weights moved."""

    def call(recipe: str, script: dict[str, list[Any]], *overrides: str) -> list[Row]:
        (tmp_path / "script.json").write_text(json.dumps(script))
        chosen = [*SMALL, f"model.path={model}", f"rollout.script={tmp_path / 'script.json'}", *overrides]
        train(recipe=load_recipe(recipe, chosen), run="x", root=str(tmp_path))
        rows = rows_of(tmp_path)
        for row in rows:
            group = [other["reward"] for other in rows if other["group_id"] == row["group_id"]]
            has_spread = max(group) - min(group) > 1e-6
            assert row["drop_reason"] == ("none" if has_spread else "zero_variance")
        assert any(row["drop_reason"] == "none" for row in rows)
        assert moved(tmp_path, model) > 1e-3
        return rows

    return call


def rows_of(root: Path) -> list[Row]:
    ledger, store = Ledger(root / "runs/x"), Store(str(root))
    rows = []
    for step in (1, 2):
        parts = [
            store.read(ledger.get("main", step, stage).refs[stage]).to_pylist()
            for stage in ("rollouts", "rewards", "advantages")
        ]
        prompts = store.read(ledger.get("main", step, "prompts").refs["prompts"]).to_pylist()
        by_id = {prompt["prompt_id"]: prompt for prompt in prompts}
        for rollout, reward, advantage in zip(*parts, strict=True):
            assert rollout["rollout_id"] == reward["rollout_id"] == advantage["rollout_id"]
            prompt = by_id[rollout["prompt_id"]]
            rows.append({**prompt, **rollout, **advantage, **reward, "components": dict(reward["components"])})
    return rows


def moved(root: Path, model: Path) -> float:
    checkpoint = [entry for entry in Ledger(root / "runs/x").entries() if entry.stage == "checkpoint"][-1]
    before = load_file(model / "model.safetensors")
    after = load_file(root / "checkpoints" / checkpoint.policy.policy_id / "model.safetensors")
    norm = torch.linalg.norm
    return max(float(norm(after[name] - before[name]) / norm(before[name])) for name in before)


def test_code(run):
    """Three completions a task: right for some, always 0, and no program. `multiply` has one test of three with 0."""
    right = {
        "add": "def add(a, b):\n    return a + b",
        "multiply": "```python\ndef multiply(a, b):\n    return a * b\n```\nThat is it.",
        "reverse": "def reverse(text):\n    return text[::-1]",
    }
    script = {
        f"`{name}\\(": [program, f"def {name}(*all):\n    return 0", "I cannot"] for name, program in right.items()
    }
    sizes = ["rollout.prompts_per_step=12", "rollout.group_size=3", "data.heldout_fraction=0"]
    rows = run("code", {**script, "default": ["x = 1"]}, *sizes, "rollout.prompts_per_step=16")
    found = {name: [row["reward"] for row in rows if f"`{name}(" in row["prompt_text"]] for name in right}
    assert len(rows) == 32 * 3
    assert found == {"add": [1.0, 1 / 3, 0.0], "multiply": [1.0, 1 / 3, 0.0], "reverse": [1.0, 0.0, 0.0]}
    assert all(row["status"] == "scored" for row in rows)
    first = next(row for row in rows if "`multiply(" in row["prompt_text"])
    assert first["components"] == {"code": 1.0, "code/has_program": 1.0, "code/passed": 3.0, "code/tests": 3.0}


def test_hybrid(run):
    """0.2 for the form, 1 for the number behind the gate, 0.5 for letters spelled exactly, less for over 64 tokens."""
    texts = ["<think>a</think><answer>3</answer>", "3", "<think>a</think><answer>3.0</answer>", "long " * 16]
    sizes = ["data.mixture.0.size=60", "data.mixture.1.size=60", "rollout.group_size=4"]
    rows = run("hybrid", {"default": texts}, *sizes)
    assert {row["dataset"] for row in rows} == {"sums", "letters"}
    for row in rows:
        text, is_three = row["completion_text"], row["answer"] == "3"
        has_form = text.startswith("<think>")
        expected = 0.2 * has_form + 1.0 * (has_form and is_three)
        expected += 0.5 * (has_form and is_three and row["dataset"] == "letters" and ">3<" in text)
        length = len(text.encode()) + 1  # a token a byte, and the stop token
        expected += max(-0.3, -0.5 * min(max(length - 64, 0), 32) / 32)
        assert row["reward"] == pytest.approx(expected)
        assert row["components"]["accuracy"] == (float(is_three) if has_form else None)
    assert any(row["reward"] == pytest.approx(1.7) for row in rows)


def test_a_condition_on_a_field_that_no_prompt_has_ends_the_run_before_it_generates(run, tmp_path):
    with pytest.raises(SettingsError, match="when of exact names the field datset"):
        run("hybrid", {"default": ["1"]}, "reward.functions.2.when=datset = 'letters'")
    assert not (tmp_path / "store/rollouts").exists()


def test_json_answers(run):
    texts = ['{"answer": 7}', "7", '{"answer": "7"}', '{"answer": 7, "sure": true}', '{"answer": 8}']
    rows = run("json_answers", {"default": texts}, "rollout.group_size=5", "rollout.max_completion_tokens=40")
    for row in rows:
        text = row["completion_text"]
        number = "8" if "8" in text else "7"
        expected = 0.5 * (row["answer"] == number)
        if text in ('{"answer": 7}', '{"answer": 8}'):
            expected += 0.2 + (row["answer"] == number)
        assert row["reward"] == pytest.approx(expected)
    assert any(row["reward"] == pytest.approx(1.7) for row in rows)


def test_maths(run):
    texts = [r"so \boxed{\frac{6}{2}}", r"x = \boxed{3", "The answer is 3.0.", r"\boxed{4} or \boxed{2+2}"]
    rows = run("maths", {"default": texts}, "rollout.group_size=4")
    for row in rows:
        text = row["completion_text"]
        right = {texts[0]: "3", texts[2]: "3", texts[3]: "4"}.get(text)  # an open box is no answer
        has_box = text in (texts[0], texts[3])
        assert row["reward"] == pytest.approx((row["answer"] == right) + 0.1 * has_box)
    assert any(row["reward"] == pytest.approx(1.1) for row in rows)
