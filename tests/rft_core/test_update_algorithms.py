"""Updates under every row of ALGORITHMS that samples: the split changes nothing, and gates see the whole step.

Splits are compared in float64, where nothing but the split differs. In float32 the forward pass alone differs by up to
1e-6 of the largest gradient, more where a gate leaves few tokens; tests of `update` hold grpo and dr_grpo to that.
"""

from __future__ import annotations

import pytest

from rft_core.algorithms import POLICY_GRADIENT_ALGORITHMS as ALGORITHMS
from tests.rft_core.trainer import SPLITS, Trainer, gradient, in_float64
from tests.rft_core.update_tables import tables
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
