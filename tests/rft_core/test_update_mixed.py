"""Updates on own and expert rows together: the split, the passes that are made, mini-batches, and what is recorded."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_contracts.refs import PolicyRef
from rft_core.config import RolloutSettings, TrainingSettings
from rft_core.mini_batches import plan_mini_batches
from rft_core.mixed_algorithms import MIXED_ALGORITHMS
from rft_core.train_rows import train_rows
from tests.rft_core.given_tables import tables_of, trajectories
from tests.rft_core.trainer import SPLITS, Trainer, gradient, in_float64
from tests.rft_core.update_tables import ROOT, replaced, tables
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def mixed(name: str, **own) -> tuple[pa.Table, pa.Table]:
    """(rollouts, advantages): three groups of own rollouts and five of an expert; for raft selected ones."""
    rollouts, advantages = tables(**own)
    if not MIXED_ALGORITHMS[name].takes_experts:
        return rollouts, replaced(advantages, "term", ["selected"] * advantages.num_rows)
    given = tables_of(trajectories(), {"t1": 2.0})
    return pa.concat_tables([rollouts, given[0]]), pa.concat_tables([advantages, given[1]])


def trainer_of(folder, name: str, model=None, **training) -> Trainer:
    trainer = Trainer(folder, {"name": name}, model, **training)
    trainer.rollout = RolloutSettings(max_completion_tokens=12)
    return trainer


@pytest.mark.parametrize("name", MIXED_ALGORITHMS)
def test_gradient_does_not_depend_on_the_split(folder, name):
    given = mixed(name)
    whole, (row,) = gradient(in_float64(trainer_of(folder, name, micro_batch_tokens=10_000)), *given)
    assert whole.abs().max() > 0
    for budget, shared in SPLITS:
        trainer = in_float64(trainer_of(folder, name, {"shared_prefix": shared}, micro_batch_tokens=budget))
        part, (other,) = gradient(trainer, *given)
        assert (whole - part).abs().max() <= 1e-6 * whole.abs().max()
        for column, value in row.items():
            assert other[column] == (pytest.approx(value, rel=1e-6, abs=1e-7) if isinstance(value, float) else value)


def test_the_record_tells_kinds_of_rows_apart(folder):
    (row,) = trainer_of(folder, "mix").update(*mixed("mix"))
    assert row["loss"] == pytest.approx(0.9 * row["own_loss"] + 0.1 * row["expert_loss"], rel=1e-6)
    assert (row["expert_coefficient"], row["expert_rows"], row["trained_rows"]) == (0.1, 5, 16)
    (own,) = trainer_of(folder, "grpo").update(*tables())
    assert row["own_loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert own["expert_rows"] is own["expert_coefficient"] is own["own_loss"] is own["expert_loss"] is None
    (given,) = trainer_of(folder, "sft").update(*tables_of(trajectories(), {"t1": 2.0}))
    assert row["expert_loss"] == pytest.approx(given["loss"], rel=1e-5)


def test_experts_alone_ask_for_no_pass_before_the_update(folder):
    on_policy, off_policy, several = (trainer_of(folder, "mix", **more) for more in ({}, {}, {"epochs": 2}))
    (first,) = on_policy.update(*mixed("mix"))
    assert {note for *_, note in on_policy.seen} == {"forward and backward"}
    assert first["off_policy_rows"] == 5 and first["sampling_ratio_mean"] is None
    off_policy.update(*mixed("mix", policy_id="other", behaviour=-5.0))
    assert "old logprobs" in {note for *_, note in off_policy.seen}
    rows = several.update(*mixed("mix"))
    assert "old logprobs" in {note for *_, note in several.seen}
    assert rows[0]["ratio_max"] == 1.0 and rows[1]["ratio_max"] > 1.0
    assert rows[1]["expert_loss"] < rows[0]["expert_loss"]


def test_each_mini_batch_has_its_share_of_experts(folder):
    rows = train_rows(*mixed("mix"), ROOT)
    training = TrainingSettings(mini_batches=2, epochs=3)
    policy = trainer_of(folder, "mix").state.policy
    plan = plan_mini_batches(policy, rows, MIXED_ALGORITHMS["mix"], training, 12, seed=1)
    assert len(plan) == 6
    memberships = set()
    for epoch in range(3):
        pair = plan[2 * epoch : 2 * epoch + 2]
        groups = [{row.group_id for row in mini_batch.rows} for mini_batch in pair]
        assert groups[0] & groups[1] == set() and len(groups[0] | groups[1]) == 8
        experts = [sum(group.startswith("t") for group in part) for part in groups]
        assert experts == [3, 2] and [len(part) - count for part, count in zip(groups, experts, strict=True)] == [2, 1]
        memberships.add(frozenset(groups[0]))
    assert len(memberships) > 1  # drawn anew each epoch
    assert plan[0].denominators.counts.keys() == {"own", "expert"}


def test_the_share_follows_the_training_step(folder):
    trainer = trainer_of(folder, "chord")
    settings = {"expert_peak": 0.8, "expert_warmup_steps": 4, "expert_coefficient": 0.2}
    trainer.algorithm = trainer.algorithm.model_copy(update=settings)
    for version, share in ((0, 0.2), (1, 0.4), (2, 0.6), (3, 0.2)):  # .8 s / 4 before step 4
        (row,) = trainer.update(*mixed("chord"), before=PolicyRef("root", version))
        assert row["expert_coefficient"] == pytest.approx(share)
        assert row["policy_version"] == version + 1


def test_a_step_without_a_selected_row_is_skipped(folder):
    rollouts, advantages = mixed("raft")
    untrained = replaced(advantages, "is_trained", [False] * advantages.num_rows)
    (row,) = trainer_of(folder, "raft").update(rollouts, untrained)
    assert row["skipped"] == "no_trained_tokens"
