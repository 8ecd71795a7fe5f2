"""Smaller options: the adaptive entropy bonus, weights of pairs by likelihood, KL-Cov, the average of weights."""

from __future__ import annotations

import math

import pytest
import torch

from data_contracts.refs import PolicyRef
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.checkpoint import export_model, load_checkpoint, save_checkpoint
from rft_core.entropy_options import adapted_entropy_coefficient
from rft_core.errors import ContractError, SettingsError
from rft_core.gates import REGULARIZER_GATES, StepTokens
from rft_core.likelihood_weights import log_collision
from rft_core.resolve import resolve_algorithm
from rft_core.terms import AdaptiveEntropy, Term
from tests.oracle.step_gates import REGULARIZER_GATES as ORACLE_GATES
from tests.rft_core.given_tables import pairs, tables_of
from tests.rft_core.preference_rows import example_pairs
from tests.rft_core.test_preference_step import of, solve
from tests.rft_core.trainer import Trainer
from tests.rft_core.update_tables import tables
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


# The adaptive entropy bonus


def three_updates(trainer):
    """The single row of each update; every update is of the policy before it."""
    names = [PolicyRef("root", 0), PolicyRef("next", 1), PolicyRef("last", 2)]
    return [trainer.update(*tables(policy_id=name.policy_id), before=name)[0] for name in names]


@pytest.mark.parametrize(("target", "wanted"), [(50.0, [0.1, 0.3, 0.35]), (1e-3, [0.1, 0.0, 0.0])])
def test_the_entropy_coefficient_takes_steps_towards_its_target(folder, target, wanted):
    adaptive = {"entropy_coefficient": 0.1, "entropy_target": target, "entropy_delta": 0.2}
    found = three_updates(Trainer(folder, adaptive | {"entropy_coefficient_max": 0.35}))
    assert [row["entropy_coefficient"] for row in found] == pytest.approx(wanted)
    first = found[0]
    assert first["loss"] == pytest.approx(first["policy_loss"] - 0.1 * first["entropy"], rel=1e-5)
    (fixed,) = Trainer(folder, {"entropy_coefficient": 0.1}).update(*tables())
    assert (fixed["loss"], fixed["entropy_coefficient"]) == (first["loss"], None)


def test_an_entropy_coefficient_may_start_at_0_and_is_in_the_checkpoint(folder, tmp_path):
    adaptive = {"entropy_target": 50.0}
    trainer, resumed = Trainer(folder, adaptive), Trainer(folder, adaptive)
    (first,) = trainer.update(*tables())
    assert first["entropy_coefficient"] == 0.0 and trainer.state.entropy_coefficient == 0.005
    save_checkpoint(trainer.state, tmp_path / "saved")
    load_checkpoint(resumed.state, tmp_path / "saved")
    again = [one.update(*tables(policy_id="next"), before=PolicyRef("next", 1)) for one in (trainer, resumed)]
    assert again[0] == again[1] and again[0][0]["entropy_coefficient"] == 0.005


def test_what_cannot_be_measured_leaves_the_entropy_coefficient():
    for entropy in (None, math.nan, math.inf, 0.2):
        assert adapted_entropy_coefficient(0.1, entropy, AdaptiveEntropy(target=0.2)) == 0.1


# KL-Cov


def test_the_tokens_of_highest_covariance_are_held_to_the_anchor():
    # mean A 0, mean lp -2, the last is masked; .4 of five is two: the third and fourth.
    tokens = StepTokens(
        log_ratio_T=torch.zeros(6),
        logprobs_T=torch.tensor([-1.0, -2.0, -1.0, -4.0, -2.0, 9.0]),
        advantages_T=torch.tensor([-1.0, 3.0, 1.0, -2.0, -1.0, 9.0]),
        entropy_T=torch.zeros(6),
        mask_T=torch.tensor([True] * 5 + [False]),
        draw_T=torch.zeros(6, dtype=torch.float64),
    )
    assert set(REGULARIZER_GATES) == set(ORACLE_GATES)
    # (A - 0)(lp + 2): -1, 0, 1, 4, 0
    chosen_T = REGULARIZER_GATES["covariance_top"](tokens, Term(covariance_top_share=0.4))
    assert chosen_T.tolist() == [False, False, True, True, False, False]
    fewest_T = REGULARIZER_GATES["covariance_top"](tokens, Term(covariance_top_share=1e-4))
    assert fewest_T.tolist() == [False, False, False, True, False, False]


def test_kl_cov_trains_with_its_penalty(folder):
    algorithm = {"name": "kl_cov", "covariance_top_share": 0.5}
    made = Trainer(folder, algorithm, mini_batches=2, epochs=2).update(*tables())
    for setting in ("covariance_top_share", "regularizer_gate", "regularizer_coefficient"):
        with pytest.raises(SettingsError, match="has no effect with regularizer"):
            resolve_algorithm(AlgorithmSettings(name="kl_cov", regularizer="none", **{setting: VALUES[setting]}))
    assert [row["skipped"] for row in made] == [None] * 4 and made[-1]["gate_kept"] is None


VALUES = {"covariance_top_share": 0.1, "regularizer_gate": "covariance_top", "regularizer_coefficient": 0.1}


# Weights of pairs by likelihood


def test_a_pair_counts_by_how_likely_the_policy_writes_it():
    step = example_pairs()
    # log sum p^2 = -1 everywhere: the weight is exp(mean(lp + 1) of chosen + that of rejected), at most 1.
    collisions = {key: torch.full_like(values, -1.0) for key, values in step.current.items()}
    plain, weighted = of("dpo"), of("dpo", likelihood_weights=True)
    total, by_pair = 0.0, {}
    for row in step.rows:
        mean = float(step.current[row.key][torch.from_numpy(row.trained_mask)].mean())
        by_pair.setdefault(row.pair_id, []).append((row, mean + 1.0))
    for members in by_pair.values():
        alone = solve(plain, type(step)([row for row, _ in members], step.current, step.reference)).loss
        total += min(1.0, math.exp(sum(mean for _, mean in members))) * alone
    found = solve_weighted(weighted, step, collisions)
    assert found.loss == pytest.approx(total / len(by_pair), rel=1e-9)
    assert found.loss < solve(plain, step).loss
    ones = {key: values.clone() for key, values in step.current.items()}  # lp = log sum p^2: weight exactly 1
    assert solve_weighted(weighted, step, ones).loss == solve(plain, step).loss
    with pytest.raises(ContractError, match="likelihood_weights need log sum p"):
        solve(weighted, step)


def solve_weighted(preference, step, collisions):
    from rft_core.preference_step import RunningShift, preference_gradient

    return preference_gradient(preference, step.rows, step.current, step.reference, RunningShift(), 0.0, collisions)


def test_log_collisions_by_hand():
    # p = 1/4 3/4: sum p^2 = 10/16; at temperature 1/2: 1/10 9/10: 82/100
    logits = torch.tensor([[0.0, math.log(3)]])
    assert log_collision(logits, 1.0).item() == pytest.approx(math.log(10 / 16))
    assert log_collision(logits, 0.5).item() == pytest.approx(math.log(82 / 100))


def test_likelihood_weights_in_a_whole_update(folder):
    rollouts, advantages = tables_of(pairs())
    found = {}
    for weights in (False, True):
        algorithm = {"name": "dpo", "preference": {"likelihood_weights": weights}}
        trainer = Trainer(folder, algorithm, micro_batch_tokens=60)
        (found[weights],) = trainer.update(rollouts, advantages)
        assert trainer.seen[-1][0] == trainer.seen[-1][1]
    assert found[False]["loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert 0 < found[True]["loss"] < found[False]["loss"] and found[True]["grad_norm"] > 0


# The average of the weights


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "lora_rank": 4}])
def test_the_average_follows_each_optimizer_step(folder, model, tmp_path):
    trainer = Trainer(folder, model=model, ema_decay=0.9, mini_batches=2)
    plain = Trainer(folder, model=model, mini_batches=2)
    wanted = [weight.double() for weight in trainer.weights]
    kept = trainer.state.optimizer.adamw.step

    def step():
        kept()
        for place, weight in enumerate(trainer.state.policy.master):
            wanted[place] = 0.9 * wanted[place] + 0.1 * weight.detach().double()

    trainer.state.optimizer.adamw.step = step
    assert trainer.update(*tables()) == plain.update(*tables())  # training does not look at it
    for average, value in zip(trainer.state.ema, wanted, strict=True):
        torch.testing.assert_close(average.double(), value, rtol=1e-6, atol=1e-7)
    save_checkpoint(trainer.state, tmp_path / "saved")
    resumed = Trainer(folder, model=model, ema_decay=0.9, mini_batches=2)
    load_checkpoint(resumed.state, tmp_path / "saved")
    trainer.state.optimizer.adamw.step = kept
    for one in (trainer, resumed):
        one.update(*tables(policy_id="next"), before=PolicyRef("next", 1))
    assert all(torch.equal(a, b) for a, b in zip(trainer.state.ema, resumed.state.ema, strict=True))
    resumed.state.take_ema()
    assert all(torch.equal(a, b) for a, b in zip(resumed.state.policy.master, trainer.state.ema, strict=True))
    export_model(resumed.state, tmp_path / "exported", merged=True)
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_without_a_decay_no_average_is_kept(folder, tmp_path):
    trainer = Trainer(folder)
    trainer.update(*tables())
    assert trainer.state.ema is None
    save_checkpoint(trainer.state, tmp_path)
    assert not (tmp_path / "ema.safetensors").exists()
    with pytest.raises(ValueError, match="must hold a moving average"):
        trainer.state.take_ema()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy_delta": 0.1}, "entropy_delta has no effect: entropy_target is null"),
        ({"entropy_coefficient_max": 0.1}, "entropy_coefficient_max has no effect"),
        ({"entropy_target": 1.0, "entropy_coefficient": 2.0}, "where it starts, must be at most .* got 2 and 1"),
        ({"name": "reward_model", "entropy_target": 1.0}, "scores have no entropy"),
        ({"kl_value_clamp": 10.0}, "kl_value_clamp has no effect: kl_coefficient is 0"),
        ({"regularizer_gate": "covariance_top"}, "regularizer_gate has no effect with regularizer none"),
        ({"name": "kl_cov", "gate": "entropy_quantile"}, "regularizer_gate must be none with gate entropy_quantile"),
        ({"name": "ipo", "preference": {"likelihood_weights": True}}, "likelihood_weights has no effect on ipo"),
    ],
)
def test_options_that_nothing_would_read_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        resolve_algorithm(AlgorithmSettings(**settings))
