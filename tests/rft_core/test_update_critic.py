"""Updates of a policy and its critic: an independent formulation, the split, warm-up, skips, checkpoints, adapters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_contracts.refs import PolicyRef
from rft_core.checkpoint import export_model, load_checkpoint, save_checkpoint, weights_digest
from rft_core.config import ModelSettings
from rft_core.critic import BehindTokens, SharedTrunk, start_critic
from rft_core.critic_settings import CriticSettings
from rft_core.errors import ContractError, ModelUnreadable, SettingsError
from rft_core.policy import Policy
from rft_core.train_rows import train_rows
from tests.rft_core.trainer import SPLITS, Trainer, gradient, in_float64
from tests.rft_core.update_tables import ROOT, replaced, tables, with_returns
from tests.tiny import make_tiny_classifier, make_tiny_model

PPO = {"name": "ppo"}
KINDS = {"separate": {}, "shared": {"shared_trunk": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"), seed=3)


def gradients(trainer: Trainer, *given) -> tuple[list[torch.Tensor], list[dict]]:
    """Flat gradients that the two optimizers were given."""
    caught, undo = [], []
    for optimizer in (trainer.state.optimizer, trainer.state.critic.optimizer):
        undo.append((optimizer, optimizer.adamw.step))
        optimizer.adamw.step = lambda of=optimizer: caught.append(
            torch.cat([weight.grad.flatten() for weight in of.policy.master])
        )
    rows = trainer.update(*given)
    for optimizer, step in undo:
        optimizer.adamw.step = step
    return caught, rows


def all_weights(trainer: Trainer) -> list[list[torch.Tensor]]:
    """Of the policy, and of the critic."""
    parts = (trainer.state.policy.master, trainer.state.critic.model.master)
    return [[weight.detach().clone() for weight in part] for part in parts]


def is_equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def flat_returns(rollouts, advantages) -> np.ndarray:
    rows = [row for row in train_rows(rollouts, advantages, ROOT) if row.num_trained_tokens]
    return np.concatenate([row.returns[row.trained_mask] for row in rows]).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_half_the_mean_square_of_the_returns(folder, kind):
    rollouts, advantages = tables()
    advantages = with_returns(rollouts, advantages)
    trainer = Trainer(folder, PPO, critic=KINDS[kind], micro_batch_tokens=40)
    before = all_weights(trainer)
    (row,) = trainer.update(rollouts, advantages)
    wanted = float((flat_returns(rollouts, advantages) ** 2).mean() / 2)
    assert row["value_loss"] == pytest.approx(wanted, rel=1e-6)
    assert row["explained_variance"] == pytest.approx(0.0, abs=1e-9)  # all values are 0
    assert row["value_clip_ratio"] == 0.0
    coefficient = 0.5 if kind == "shared" else 1.0
    assert row["loss"] == pytest.approx(row["policy_loss"] + coefficient * wanted, rel=1e-6)
    assert row["forward_rows"] == 11  # the critic learns from the row with advantage 0 too
    policy, critic = (not is_equal(*pair) for pair in zip(before, all_weights(trainer), strict=True))
    assert policy and critic
    assert (row["learning_rate"], row["value_learning_rate"]) == (0.01, 0.01 if kind == "shared" else 1e-5)
    assert (row["value_grad_norm"] is None) == (kind == "shared")
    (plain,) = Trainer(folder, {"name": "ppo", "advantage": "group_mean"}).update(rollouts, advantages)
    assert plain["policy_loss"] == pytest.approx(row["policy_loss"], abs=1e-6)
    for column in ("value_loss", "value_clip_ratio", "explained_variance", "value_grad_norm", "value_learning_rate"):
        assert plain[column] is None


def test_gradients_equal_an_independent_formulation(folder, reward_model):
    """Row by row in float64 by the library's own classifier: V_t is its score of the tokens before t."""
    rollouts, advantages = tables()
    advantages = with_returns(rollouts, advantages)
    trainer = Trainer(folder, PPO, critic={"path": str(reward_model), "learning_rate": 1e-3}, max_grad_norm=1e9)
    model = trainer.state.critic.model
    reference = in_float64(Trainer(folder, PPO, critic={"path": str(reward_model)})).state.critic.model
    total, count = torch.zeros((), dtype=torch.float64), 0
    credit = {row["rollout_id"]: row for row in advantages.to_pylist()}
    for row in rollouts.to_pylist():
        given = credit[row["rollout_id"]]
        if not given["is_trained"]:
            continue
        ids = torch.tensor([row["prompt_token_ids"] + row["completion_token_ids"]])
        hidden = reference.module.base_model(ids).last_hidden_state[0]
        for place, is_written in enumerate(row["completion_mask"]):
            if is_written:
                value = hidden[len(row["prompt_token_ids"]) + place - 1] @ reference.module.score.weight[0]
                total, count = total + (value - given["returns"][place]) ** 2 / 2, count + 1
    (total / count).backward()
    named = dict(reference.module.named_parameters())
    wanted = torch.cat([named[name].grad.flatten() for name in model.names])
    (_, found), (row,) = gradients(trainer, rollouts, advantages)
    assert row["value_loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert row["value_grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_shared_trunk_takes_the_gradient_of_both(folder):
    """That of the policy's loss alone, and half of the value loss's through the hidden states of a plain forward."""
    rollouts, advantages = tables()
    advantages = with_returns(rollouts, advantages)
    shared = Trainer(folder, PPO, critic={"shared_trunk": True}, max_grad_norm=1e9)
    head = torch.linspace(-0.5, 0.5, 32)
    shared.state.critic.model.head.data.copy_(head)
    policy = in_float64(Trainer(folder, PPO, critic={"shared_trunk": True})).state.policy
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in [row for row in train_rows(rollouts, advantages, ROOT) if row.num_trained_tokens]:
        ids = torch.tensor([[*row.prompt_token_ids, *row.completion_token_ids]])
        hidden = policy.module.base_model(ids).last_hidden_state[0]
        values = hidden[len(row.prompt_token_ids) - 1 : -1] @ head.double()
        mask = torch.from_numpy(row.trained_mask)
        total = total + (values[mask] - torch.from_numpy(row.returns)[mask]).square().sum() / 2
        count += int(mask.sum())
    (0.5 * total / count).backward()
    named = dict(policy.module.named_parameters())
    of_values = torch.cat([named[name].grad.flatten() for name in policy.names])
    without = Trainer(folder, {"name": "ppo", "advantage": "group_mean"}, max_grad_norm=1e9)
    plain, (alone,) = gradient(without, rollouts, advantages)
    (found, of_head), (row,) = gradients(shared, rollouts, advantages)
    assert (found - plain - of_values).abs().max() <= 1e-5 * (plain + of_values).abs().max()
    assert of_values.abs().max() > 0.01 * plain.abs().max()
    assert row["grad_norm"] == pytest.approx(math.hypot(float(found.norm()), float(of_head.norm())), rel=1e-5)
    assert row["loss"] == pytest.approx(alone["loss"] + 0.5 * float(total.detach()) / count, rel=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_split(folder, kind, epochs):
    given = tables(behaviour=-5.0)
    critic = {**KINDS[kind], "value_clip": 0.01}  # far below the first step, so that the second epoch is clipped
    wanted, rows = None, None
    for budget, shared in ((10_000, True), *SPLITS):
        model = {"shared_prefix": shared}
        options = {"micro_batch_tokens": budget, "epochs": epochs, "learning_rate": 1e-2}
        trainer = in_float64(Trainer(folder, PPO, model, critic, **options))
        found, made = gradients(trainer, *given)
        if wanted is None:
            wanted, rows = found, made
            assert all(part.abs().max() > 0 for part in found)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()
        for row, other in zip(made, rows, strict=True):
            for column, value in row.items():
                near = pytest.approx(other[column], rel=1e-6, abs=1e-7) if isinstance(value, float) else other[column]
                assert value == near, column


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_held_near_those_of_before_the_update(folder, kind):
    """Four epochs at a rate that moves values by far more than .05: some are clipped, none was in the first."""
    critic = {**KINDS[kind], "value_clip": 0.05, **({} if kind == "shared" else {"learning_rate": 0.05})}
    trainer = Trainer(folder, PPO, critic=critic, epochs=4, learning_rate=0.05)
    rows = trainer.update(*tables())
    shares = [row["value_clip_ratio"] for row in rows]
    assert shares[0] == 0.0 and max(shares[1:]) > 0.1
    free = Trainer(folder, PPO, critic={**critic, "value_clip": None}, epochs=4, learning_rate=0.05)
    assert {row["value_clip_ratio"] for row in free.update(*tables())} == {0.0}
    assert {note for _, _, note in free.seen} - {note for _, _, note in trainer.seen} == set()
    assert {note for _, _, note in trainer.seen} - {note for _, _, note in free.seen} == {"values"}


@pytest.mark.parametrize("kind", KINDS)
def test_progress_counts_every_micro_batch_of_every_pass(folder, kind):
    for critic in (KINDS[kind], {**KINDS[kind], "warmup_steps": 1}):
        trainer = Trainer(folder, PPO, critic=critic, mini_batches=2, micro_batch_tokens=30)
        trainer.update(*tables())
        totals = {total for _, total, _ in trainer.seen}
        assert [done for done, _, _ in trainer.seen] == list(range(1, totals.pop() + 1)) and not totals


@pytest.mark.parametrize("kind", KINDS)
def test_warming_up_trains_the_critic_alone(folder, kind):
    trainer = Trainer(folder, PPO, critic={**KINDS[kind], "warmup_steps": 2}, weight_decay=0.1)
    before = all_weights(trainer)
    (first,) = trainer.update(*tables())
    (second,) = trainer.update(*tables(policy_id="a"), before=PolicyRef("a", 1))
    warmed = all_weights(trainer)
    assert is_equal(before[0], warmed[0]) and not is_equal(before[1], warmed[1])
    assert trainer.state.optimizer.moments() == {} and trainer.state.critic.optimizer.num_steps == 2
    assert (first["learning_rate"], first["policy_loss"], first["entropy"]) == (0.0, 0.0, None)
    assert first["value_learning_rate"] > 0 and first["skipped"] is None
    coefficient = 0.5 if kind == "shared" else 1.0
    assert first["loss"] == pytest.approx(coefficient * first["value_loss"])
    assert second["value_loss"] < first["value_loss"]
    assert {note for _, _, note in trainer.seen} == {"forward and backward of the critic"}
    (third,) = trainer.update(*tables(policy_id="b"), before=PolicyRef("b", 2))
    assert not is_equal(warmed[0], trainer.state.policy.master)
    assert third["learning_rate"] == 0.01 and third["policy_loss"] != 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_learns_fixed_returns(folder, kind):
    """Thirty updates: values explain most of what returns of fixed completions differ in."""
    rollouts, advantages = tables()
    own = {"learning_rate": 5e-3} if kind == "separate" else {}
    trainer = Trainer(folder, {**PPO, "correction": "none"}, critic={**KINDS[kind], **own}, learning_rate=5e-3)
    first = trainer.update(rollouts, advantages)[0]
    for _ in range(30):
        last = trainer.update(rollouts, advantages)[0]
    assert last["value_loss"] < 0.3 * first["value_loss"]
    assert last["explained_variance"] > 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_neither_steps_when_one_is_not_finite(folder, kind):
    trainer = Trainer(folder, PPO, critic=KINDS[kind])
    before = all_weights(trainer)
    rollouts, advantages = tables()
    spoilt = [None if row is None else [math.inf] * len(row) for row in with_returns(rollouts, advantages)["returns"]
              .to_pylist()]  # fmt: skip
    (row,) = trainer.update(rollouts, replaced(advantages, "returns", spoilt))
    assert row["skipped"] == "non_finite_loss" and math.isfinite(row["policy_loss"])
    assert all(is_equal(*pair) for pair in zip(before, all_weights(trainer), strict=True))
    assert trainer.state.skipped_in_a_row == 1
    handle = trainer.state.critic.model.compute[-1].register_hook(lambda gradient: gradient * math.nan)
    (row,) = trainer.update(rollouts, advantages)
    handle.remove()
    assert row["skipped"] == "non_finite_gradient" and math.isfinite(row["loss"])
    assert all(is_equal(*pair) for pair in zip(before, all_weights(trainer), strict=True))
    (row,) = trainer.update(rollouts, advantages)
    assert row["skipped"] is None and trainer.state.skipped_in_a_row == 0


def test_credit_without_returns_is_refused(folder):
    rollouts, advantages = tables()
    trainer = Trainer(folder, PPO)
    trainer.has_critic = False  # nothing made up
    with pytest.raises(ContractError, match=r"rollout step-00001/p0/00 has none: assign credit anew by advantage gae"):
        trainer.update(rollouts, advantages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_checkpoint_gives_the_same_bits(folder, tmp_path, kind, rank, dtype):
    model = {"dtype": dtype, "lora_rank": rank}
    options = {"critic": {**KINDS[kind], "warmup_steps": 1}, "epochs": 2, "weight_decay": 0.01}
    trainer, resumed = (Trainer(folder, PPO, model, **options) for _ in range(2))
    trainer.update(*tables())
    trainer.update(*tables(policy_id="a"), before=PolicyRef("a", 1))
    save_checkpoint(trainer.state, tmp_path / "saved")
    load_checkpoint(resumed.state, tmp_path / "saved")
    assert all(is_equal(*pair) for pair in zip(all_weights(trainer), all_weights(resumed), strict=True))
    again = [one.update(*tables(policy_id="b"), before=PolicyRef("b", 2)) for one in (trainer, resumed)]
    assert again[0] == again[1]
    assert all(is_equal(*pair) for pair in zip(all_weights(trainer), all_weights(resumed), strict=True))
    names = set(load_file(tmp_path / "saved" / "critic" / "weights.safetensors"))
    if kind == "shared":
        assert names == {"value_head.weight"}
    elif rank:
        assert "score.weight" in names and len([name for name in names if ".lora_" in name]) == len(names) - 1
    # The digest and an export are of the policy alone.
    digest = weights_digest(trainer.state)
    trainer.state.critic.model.master[-1].data += 1.0
    assert weights_digest(trainer.state) == digest
    export_model(trainer.state, tmp_path / "export", merged=True)
    assert not (tmp_path / "export" / "critic").exists()
    assert not [name for name in load_file(tmp_path / "export" / "model.safetensors") if "value" in name]


def test_a_checkpoint_from_before_there_was_a_critic_leaves_it_as_it_was_started(folder, tmp_path):
    plain = Trainer(folder)
    plain.update(*tables())
    save_checkpoint(plain.state, tmp_path / "plain")
    trainer = Trainer(folder, PPO)
    started = all_weights(trainer)[1]
    load_checkpoint(trainer.state, tmp_path / "plain")
    assert weights_digest(trainer.state) == weights_digest(plain.state)
    assert is_equal(started, trainer.state.critic.model.master)
    trainer.update(*tables())
    save_checkpoint(trainer.state, tmp_path / "ppo")
    load_checkpoint(plain.state, tmp_path / "ppo")  # who needs no critic takes the policy
    assert weights_digest(trainer.state) == weights_digest(plain.state)
    (tmp_path / "ppo" / "critic" / "weights.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match="must hold a checkpoint of this model"):
        load_checkpoint(trainer.state, tmp_path / "ppo")


def value_of(trainer: Trainer, model, row: dict) -> list[float]:
    (made,) = train_rows_of(row)
    (batch,) = model.micro_batches([made], 1000)
    with torch.no_grad():
        return model.token_logprobs(batch, 1.0)[0].tolist()


def train_rows_of(row: dict):
    rollouts, advantages = tables()
    return [made for made in train_rows(rollouts, advantages, ROOT) if made.rollout_id == row["rollout_id"]]


def test_a_reward_model_is_the_first_critic(folder, reward_model):
    """A value is the reward model's score of what stands before the token, and behind it of the token too."""
    trainer = Trainer(folder, PPO, critic={"path": str(reward_model)})
    model = trainer.state.critic.model
    (row,) = [row for row in tables()[0].to_pylist() if row["rollout_id"] == "step-00001/p1/02"]
    ids = torch.tensor([row["prompt_token_ids"] + row["completion_token_ids"]])
    with torch.no_grad():
        scores = model.module.score(model.module.base_model(ids).last_hidden_state)[0, :, 0].tolist()
    start = len(row["prompt_token_ids"])
    assert value_of(trainer, model, row) == pytest.approx(scores[start - 1 : -1], abs=1e-5)
    assert value_of(trainer, BehindTokens(model), row) == pytest.approx(scores[start:], abs=1e-5)
    assert max(map(abs, scores)) > 0.1
    shared = Trainer(folder, PPO, critic={"shared_trunk": True})
    assert isinstance(shared.state.critic.model, SharedTrunk)
    shared.state.critic.model.head.data += 0.1
    before = value_of(shared, shared.state.critic.model, row)
    behind = value_of(shared, BehindTokens(shared.state.critic.model), row)
    assert before[1:] == pytest.approx(behind[:-1], abs=1e-5) and before[0] != behind[0]


def test_a_critic_of_another_vocabulary_is_refused(folder, tmp_path):
    other = make_tiny_classifier(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text().replace('"a":', '"\\u0100x":', 1)
    (other / "tokenizer.json").write_text(tokenizer)
    settings = ModelSettings(path=str(folder), device="cpu", dtype="float32")
    policy = Policy.load(settings, folder, seed=0)
    with pytest.raises(SettingsError, match=r"critic\.path must be a model of the policy's vocabulary"):
        start_critic(CriticSettings(path=str(other)), settings, folder, policy, seed=0)


def test_an_update_of_a_critic_needs_one(folder):
    trainer = Trainer(folder, PPO)
    trainer.state.critic = None
    with pytest.raises(ValueError, match="needs a critic in the state"):
        trainer.update(*tables())
