"""Updates under every row of ALGORITHMS that samples: the split changes nothing, and gates see the whole step.

Splits are compared in float64, where nothing but the split differs. In float32 the forward pass alone differs by up to
1e-6 of the largest gradient, more where a gate leaves few tokens; tests of `update` hold grpo and dr_grpo to that.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data_contracts.refs import PolicyRef
from rft_core.algorithms import POLICY_GRADIENT_ALGORITHMS as ALGORITHMS
from rft_core.checkpoint import load_checkpoint, save_checkpoint
from rft_core.kl_controller import adapted_coefficient
from rft_core.train_rows import train_rows
from tests.rft_core.trainer import SPLITS, Trainer, gradient, in_float64
from tests.rft_core.update_tables import ROOT, tables
from tests.tiny import make_tiny_model

# Slots that look at more than one token: each must see whole rows, or the whole step.
SLOTS = {
    "entropy_quantile": {"gate": "entropy_quantile", "entropy_quantile": 0.5},
    "second_moment": {"gate": "second_moment", "second_moment_limit": 0.5, "old_source": "behaviour"},
    "covariance_band": {"gate": "covariance_band", "covariance_low": 0.01, "covariance_share": 0.2},
    "off_policy_sequence": {"gate": "off_policy_sequence", "off_policy_limit": 0.4},
    "veto": {"correction": "veto", "correction_low": 0.3, "correction_high": 3.0},
    "kl_and_entropy": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "dr_grpo_kl": {"name": "dr_grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("name", [*ALGORITHMS, *SLOTS])
def test_gradient_does_not_depend_on_the_split(folder, name, is_off_policy):
    algorithm = SLOTS.get(name) or {"name": name}
    given = tables(policy_id="other" if is_off_policy else "root", behaviour=-5.0)
    whole, (row,) = gradient(in_float64(Trainer(folder, algorithm, micro_batch_tokens=10_000)), *given)
    assert row["off_policy_rows"] == (11 if is_off_policy else 0)
    assert whole.abs().max() > 0
    for budget, shared in SPLITS:
        model = {"shared_prefix": shared}
        trainer = in_float64(Trainer(folder, algorithm, model, micro_batch_tokens=budget))
        part, (other,) = gradient(trainer, *given)
        assert (whole - part).abs().max() <= 1e-6 * whole.abs().max()
        for column, value in row.items():
            assert other[column] == (pytest.approx(value, rel=1e-6, abs=1e-7) if isinstance(value, float) else value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rewarded_completions_become_likelier(folder, name):
    """Five updates on fixed rollouts: the mean logprob of rows of A > 0 rises against that of rows of A < 0."""
    rollouts, advantages = tables(behaviour=-5.0)
    trainer = Trainer(folder, {"name": name}, learning_rate=5e-3)
    rows = [row for row in train_rows(rollouts, advantages, ROOT) if row.num_trained_tokens and row.has_signal]

    def gap() -> float:
        means = {1.0: [], -1.0: []}
        with torch.no_grad():
            for batch in trainer.state.policy.micro_batches(rows, 1000):
                parts = trainer.state.policy.token_logprobs(batch, 1.0)[0].split(batch.lengths)
                for index, part in zip(batch.row_indices, parts, strict=True):
                    means[float(np.sign(rows[index].advantages[0]))].append(float(part.mean()))
        return float(np.mean(means[1.0]) - np.mean(means[-1.0]))

    before = gap()
    for _ in range(5):
        trainer.update(rollouts, advantages)
    assert gap() - before > 0.5


def test_a_gate_over_the_whole_step_is_decided_anew_before_each_optimizer_step(folder):
    algorithm = {"gate": "entropy_quantile", "entropy_quantile": 0.5}
    trainer = Trainer(folder, algorithm, mini_batches=2, micro_batch_tokens=40)
    rows = trainer.update(*tables())
    for row in rows:  # of each mini-batch's tokens, half and the one in the middle
        assert 0.5 <= row["gate_kept"] <= 0.5 + 1 / row["trained_tokens"]
    totals = {total for _, total, _ in trainer.seen}
    assert [done for done, _, _ in trainer.seen] == list(range(1, totals.pop() + 1)) and not totals
    assert {note for _, _, note in trainer.seen} == {"old logprobs", "gate over the whole step", "forward and backward"}


def test_the_behaviour_policy_as_old_needs_no_pass_of_its_own(folder):
    trainer = Trainer(folder, {"old_source": "behaviour"}, micro_batch_tokens=40)
    (row,) = trainer.update(*tables(policy_id="other", behaviour=-5.0))
    assert {note for _, _, note in trainer.seen} == {"forward and backward"}
    assert row["effective_sample_size"] is None and row["ratio_max"] != 1.0


def test_the_kl_coefficient_adapts_after_each_update(folder):
    # 11 rollouts are trained, horizon 100. The first update's KL is 0 before its step: error -.2, so x (1 - .022).
    adaptive = {"kl_coefficient": 0.1, "kl_target": 1e-6, "kl_horizon": 100}
    trainer = Trainer(folder, adaptive)
    (first,) = trainer.update(*tables())
    (second,) = trainer.update(*tables(policy_id="next"), before=PolicyRef("next", 1))
    (third,) = trainer.update(*tables(policy_id="last"), before=PolicyRef("last", 2))
    found = [row["kl_coefficient"] for row in (first, second, third)]
    # Then it is far above the target: error +.2.
    assert found == pytest.approx([0.1, 0.1 * 0.978, 0.1 * 0.978 * 1.022])
    assert second["kl"] > 1e-5
    assert second["loss"] > second["policy_loss"]
    (fixed,) = Trainer(folder, {"kl_coefficient": 0.1}).update(*tables())
    assert (fixed["kl_coefficient"], fixed["loss"]) == (0.1, first["loss"])
    assert Trainer(folder).update(*tables())[0]["kl_coefficient"] is None


def test_an_adapted_kl_coefficient_is_in_the_checkpoint(folder, tmp_path):
    adaptive = {"kl_coefficient": 0.1, "kl_target": 1e-6, "kl_horizon": 100}
    trainer, resumed = Trainer(folder, adaptive), Trainer(folder, adaptive)
    trainer.update(*tables())
    save_checkpoint(trainer.state, tmp_path / "saved")
    load_checkpoint(resumed.state, tmp_path / "saved")
    again = [one.update(*tables(policy_id="next"), before=PolicyRef("next", 1)) for one in (trainer, resumed)]
    assert again[0] == again[1]
    assert resumed.state.kl_coefficient == trainer.state.kl_coefficient != 0.1


def test_what_cannot_be_measured_leaves_the_coefficient():
    for kl in (None, math.nan, math.inf):
        assert adapted_coefficient(0.1, kl, 8, 0.1, 100) == 0.1
