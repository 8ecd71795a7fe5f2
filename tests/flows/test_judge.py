"""The recipe `judge`, two steps of it, on a tiny model and against a scripted endpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.rerun import rerun
from flows.train import train
from rft_core.errors import GraderUnavailable, SettingsError
from rft_core.recipes import load_recipe
from tests.rft_core.rewards.judge.endpoint import Act, Request, ScriptedEndpoint, refusal, said
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [
    "steps=2",
    "data.size=60",
    "model.dtype=float32",
    "model.device=cpu",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.block_groups=2",
    "rollout.max_completion_tokens=6",
    "training.learning_rate=0.003",
    "evaluation.every=0",
    "execution.threads=1",
    "execution.retries=0",
    "reward.max_unscored_fraction=0.9",
    "reward.missing=unscored",
    "reward.functions.0.judge.retries=0",
    "reward.functions.0.judge.prices=[1.0, 2.0]",
]


def is_unclear(text: str) -> bool:
    """One completion in four gets no verdict that could be read."""
    return hashlib.sha256(text.encode()).digest()[0] % 4 == 0


def clear(text: str) -> float:
    """What the scripted judge says of the criterion `clear`; of `correct` it says 0.25 always."""
    return round(sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1), 3)


def script(request: Request) -> Act:
    (text,) = request.candidates
    if is_unclear(text) and not request.is_example:
        return said("I am not sure.")
    return said(json.dumps({"reason": "so", "scores": {"correct": 0.25, "clear": clear(text)}}))


def overrides(endpoint: ScriptedEndpoint, model: Path) -> list[str]:
    return [*SMALL, f"model.path={model}", f"reward.functions.0.judge.url={endpoint.url}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(on_server, model, tmp_path_factory):
    """A root with the run `judged`, and what its endpoint was asked."""
    root = tmp_path_factory.mktemp("root")
    with ScriptedEndpoint(script) as endpoint:
        train(recipe=load_recipe("judge", overrides(endpoint, model)), run="judged", root=str(root))
    return root, endpoint


def tables(root: Path, run: str, step: int) -> tuple[list[dict], list[dict], list[dict]]:
    """Rollouts, rewards and advantages of a step."""
    ledger, store = Ledger(root / "runs" / run), Store(str(root))
    return tuple(
        store.read(ledger.get("main", step, record).refs[record]).to_pylist()
        for record in ("rollouts", "rewards", "advantages")
    )


def test_rows_are_scored_and_trained_as_the_judge_said(finished):
    root, endpoint = finished
    for step in (1, 2):
        rollouts, rewards, advantages = tables(root, "judged", step)
        assert len(rollouts) == len(rewards) == len(advantages) == 16
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            assert rollout["rollout_id"] == reward["rollout_id"] == advantage["rollout_id"]
            text = rollout["completion_text"]
            if is_unclear(text):
                assert (reward["status"], reward["reward"]) == ("unscored", None)
                assert "it holds none: 'I am not sure.'" in reward["reason"]
                assert (advantage["is_trained"], advantage["drop_reason"]) == (False, "unscored")
            else:
                # Weights 3 and 1 over `correct` 0.25 and `clear`; numeric_answer has weight 0.
                assert reward["reward"] == pytest.approx((3 * 0.25 + clear(text)) / 4)
                assert advantage["drop_reason"] != "unscored"
        assert any(reward["status"] == "unscored" for reward in rewards)
        assert any(advantage["is_trained"] and advantage["advantage"] for advantage in advantages)
    asked = [request for request in endpoint.requests if not request.is_repair]
    repairs = len(endpoint.requests) - len(asked)
    assert repairs == sum(is_unclear(request.candidates[0]) and not request.is_example for request in asked)


def test_what_it_cost_is_in_the_table(finished):
    root, endpoint = finished
    rows = [dict(row["components"]) for step in (1, 2) for row in tables(root, "judged", step)[1]]
    # Before the first step the endpoint was asked the example and two rows.
    probed = [request.candidates[0] for request in endpoint.requests if not request.is_repair][:3]
    num_probed = 3 + sum(map(is_unclear, probed[1:]))
    assert sum(row["judge/prompt_tokens"] for row in rows) == 100 * (len(endpoint.requests) - num_probed)
    for row in rows:
        cost = (row["judge/prompt_tokens"] * 1.0 + row["judge/completion_tokens"] * 2.0) / 1e6
        assert row["judge/cost"] == pytest.approx(cost)


def test_weights_moved(finished, model):
    root, _ = finished
    checkpoint = [entry for entry in Ledger(root / "runs/judged").entries() if entry.stage == "checkpoint"][-1]
    assert checkpoint.policy.version == 2
    before = load_file(model / "model.safetensors")
    after = load_file(root / "checkpoints" / checkpoint.policy.policy_id / "model.safetensors")
    moved = [torch.linalg.norm(after[name] - before[name]) / torch.linalg.norm(before[name]) for name in before]
    assert max(moved) > 1e-3


def test_scoring_again_asks_only_what_was_never_answered(finished):
    root, _ = finished
    with ScriptedEndpoint(script) as endpoint:
        changes = ["reward.functions.1.weight=1.0", f"reward.functions.0.judge.url={endpoint.url}"]
        rerun("judged", "rewards", "again", changes, root=str(root))
    assert all(is_unclear(request.candidates[0]) for request in endpoint.requests)
    for step in (1, 2):
        old, new = tables(root, "judged", step)[1], tables(root, "again", step)[1]
        for before, after in zip(old, new, strict=True):
            assert dict(before["components"])["judge"] == dict(after["components"])["judge"]


def test_a_wrong_key_fails_before_anything_is_generated(model, tmp_path):
    with ScriptedEndpoint(lambda request: refusal(401, "who are you?")) as endpoint:
        recipe = load_recipe("judge", overrides(endpoint, model))
        with pytest.raises(SettingsError, match=r"judge.api_key_env must name a variable with a key"):
            train(recipe=recipe, run="x", root=str(tmp_path))
        assert len(endpoint.requests) == 1
    with pytest.raises(GraderUnavailable, match=r"judge.url must name a running endpoint"):
        train(recipe=recipe, run="x", root=str(tmp_path))
    assert not (tmp_path / "runs/x/generated.jsonl").exists()


def test_a_judge_that_dies_fails_the_stage_as_transient(model, tmp_path):
    def dying(request: Request) -> Act:
        return refusal(503, "gone") if len(endpoint.requests) > 6 else script(request)

    with ScriptedEndpoint(dying) as endpoint:
        recipe = load_recipe("judge", [*overrides(endpoint, model), "reward.max_unscored_fraction=0.5"])
        with pytest.raises(GraderUnavailable, match=r"at most 50% of rollouts may be unscored.*status 503, gone"):
            train(recipe=recipe, run="x", root=str(tmp_path))
