"""Runs with a teacher: what is scored and kept, the first loss by the models themselves, resume and reruns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.inspect.run import open_run
from flows.rerun import rerun
from flows.train import train
from rft_core.errors import ContentChanged, SettingsError
from rft_core.recipes import load_recipe
from tests.flows.small_runs import SAMPLED, Row, weights_digest
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [*SAMPLED, "steps=2", "rollout.group_size=2", "rollout.max_completion_tokens=6"]
NO_REWARD = "reward.functions=[]"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "policy"), make_tiny_model(folder / "teacher", seed=5)


def run(root: Path, models: tuple[Path, Path], *overrides: str, name: str = "x", recipe: str = "distillation") -> None:
    paths = [f"model.path={models[0]}", f"teacher.path={models[1]}"]
    train(recipe=load_recipe(recipe, [*SMALL, *paths, *overrides]), run=name, root=str(root))


def table(root: Path, step: int, stage: str, record: str | None = None, name: str = "x", number: int = 0) -> list[Row]:
    entry = Ledger(root / "runs" / name).get("main", step, stage, number)
    return Store(str(root)).read(entry.refs[record or stage]).to_pylist()


def log_probabilities(folder: Path, row: Row) -> torch.Tensor:
    """float64[C, V] by the model itself, at each completion token."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*row["prompt_token_ids"], *row["completion_token_ids"]]])
    with torch.no_grad():
        return module(ids).logits[0, len(row["prompt_token_ids"]) - 1 : -1].double().log_softmax(-1)


def test_on_policy_distillation_without_any_reward(tmp_path, models):
    run(tmp_path, models, NO_REWARD)
    rollouts = table(tmp_path, 1, "rollouts")
    assert {row["status"] for row in table(tmp_path, 1, "rewards")} == {"unscored"}
    credit = {row["rollout_id"]: row for row in table(tmp_path, 1, "advantages")}
    assert all(row["is_trained"] and row["drop_reason"] == "none" for row in credit.values())
    gaps = []
    for row in rollouts:
        chosen = torch.tensor(row["completion_token_ids"])[:, None]
        policy, teacher = (log_probabilities(folder, row).gather(1, chosen)[:, 0] for folder in models)
        assert credit[row["rollout_id"]]["token_advantages"] == pytest.approx((teacher - policy).tolist(), abs=1e-4)
        gaps += (teacher - policy).tolist()
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-4)  # the ratio is 1
    assert update["trained_rows"] == 8 and update["skipped"] is None
    changing, fixed = (table(tmp_path, 2, "token-scores", "token_scores", number=number) for number in (0, 1))
    assert {row["scorer"] for row in changing} == {"old"} and {row["scorer"] for row in fixed} == {"teacher"}
    after = table(tmp_path, 2, "update", "updates")[0]
    assert after["grad_norm"] > 0 and after["loss"] != update["loss"]
    counts = open_run(str(tmp_path), "x")  # reads without complaint
    assert counts.name == "x"


def test_a_teacher_that_is_the_policy_teaches_nothing(tmp_path, models):
    run(tmp_path, (models[0], models[0]), "steps=1")
    assert {tuple(row["token_advantages"]) for row in table(tmp_path, 1, "advantages")} <= {
        (0.0,) * n for n in range(7)
    }
    (update,) = table(tmp_path, 1, "update", "updates")
    assert (update["loss"], update["skipped"]) == (0.0, "no_signal")
    run(tmp_path, (models[0], models[0]), "steps=1", "algorithm.name=gkd", name="y")
    (update,) = table(tmp_path, 1, "update", "updates", "y")
    assert (update["loss"], update["grad_norm"], update["skipped"]) == (0.0, 0.0, None)


@pytest.mark.parametrize("name", ["on_policy_distillation", "gkd"])
def test_a_run_that_goes_on_gives_the_weights_of_one_that_never_stopped(tmp_path, models, name):
    algorithm = f"algorithm.name={name}"
    run(tmp_path, models, algorithm, "steps=3")
    run(tmp_path, models, algorithm, "steps=5")
    run(tmp_path / "straight", models, algorithm, "steps=5")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "straight")


def test_a_rerun_finds_the_teachers_scores_and_recomputes_the_policys(tmp_path, models):
    run(tmp_path, models)
    rerun("x", "advantages", "y", ["algorithm.distillation.teacher_gap=0.5"], root=str(tmp_path))
    for step in (1, 2):
        old, new = (Ledger(tmp_path / "runs" / name).get("main", step, "token-scores", 1) for name in "xy")
        assert old.refs == new.refs and new.reused
        before, after = (table(tmp_path, step, "advantages", name=name) for name in "xy")
        if step == 1:
            for one, other in zip(before, after, strict=True):
                assert other["token_advantages"] == pytest.approx([value / 2 for value in one["token_advantages"]])
    assert weights_digest(tmp_path) != weights_digest(tmp_path, "y")
    rerun("x", "update", "z", [], root=str(tmp_path))
    assert Ledger(tmp_path / "runs/z").entries("token-scores") == []
    assert weights_digest(tmp_path) == weights_digest(tmp_path, "z")
    with pytest.raises(SettingsError, match="teacher_gap has no effect: the advantages are those of run 'x'"):
        rerun("x", "update", "w", ["algorithm.distillation.teacher_gap=0.5"], root=str(tmp_path))


def test_gkd_on_the_pupils_own_completions(tmp_path, models):
    run(tmp_path, models, "algorithm={name: gkd, distillation: {beta: 0.3}}", NO_REWARD)
    total, count = 0.0, 0
    for row in table(tmp_path, 1, "rollouts"):
        s, t = (log_probabilities(folder, row).exp() for folder in models)
        m = 0.3 * t + 0.7 * s
        total += float((0.3 * t * (t / m).log() + 0.7 * s * (s / m).log()).sum())
        count += len(s)
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == update["distillation_loss"] == pytest.approx(total / count, rel=1e-5)
    assert update["trained_rows"] == 8
    assert Ledger(tmp_path / "runs/x").entries("token-scores") == []
    assert table(tmp_path, 2, "update", "updates")[0]["loss"] != update["loss"]


def test_jsd_on_given_answers(tmp_path, models):
    algorithm = ["algorithm={name: jsd, distillation: {beta: 0, top_k: 3}}", "evaluation={every: 2}", "data.size=null"]
    run(tmp_path, models, *algorithm, "rollout={prompts_per_step: 6}", recipe="sft")
    rollouts = table(tmp_path, 1, "rollouts")
    assert {row["origin"] for row in rollouts} == {"dataset"} and len(rollouts) == 6
    found = []
    for row in rollouts:
        s, t = (log_probabilities(folder, row).exp() for folder in models)
        best = t.topk(3).indices
        s, t = (torch.cat([p.gather(1, best), 1 - p.gather(1, best).sum(1, keepdim=True)], 1) for p in (s, t))
        found += (t * (t / s).log()).sum(1)[torch.tensor(row["completion_mask"])].tolist()
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert not (tmp_path / "runs/x/generated.jsonl").exists()
    assert table(tmp_path, 2, "evaluation", "evaluations")


def test_another_teacher_is_other_content(tmp_path, models):
    copied = shutil.copytree(models[1], tmp_path / "copied")
    gkd = ["algorithm.name=gkd", "steps=1"]
    run(tmp_path, models, *gkd)
    run(tmp_path, (models[0], copied), "algorithm.name=gkd", "steps=2")  # another folder, the same content
    with pytest.raises(ContentChanged, match="content of the teacher"):
        run(tmp_path, (models[0], models[0]), *gkd)
    # A branch at step 2 under another teacher replays step 1 under the old one, which must be what it was.
    config = copied / "generation_config.json"
    config.write_text(config.read_text().replace("{", "{\n", 1))
    run(tmp_path, (models[0], copied), gkd[0], "steps=3", "training.checkpoint_every=5", name="altered")
    config.write_text(config.read_text().replace("{", "{\n", 1))
    changes = [f"teacher.path={models[0]}", "training.learning_rate=0.001"]
    with pytest.raises(SettingsError, match="it has changed since: put it back"):
        rerun("altered", "update", "late", changes, at=2, root=str(tmp_path))
    other = make_tiny_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    content["model"]["vocab"]["<|im_end|>"], content["model"]["vocab"]["a"] = 67, 2
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SettingsError, match="the teacher's vocabulary must be the policy's"):
        run(tmp_path, (models[0], other), *gkd, name="mixed")
