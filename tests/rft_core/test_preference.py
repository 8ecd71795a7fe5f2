"""Every entry of PREFERENCE_LOSSES: value and gradient against the oracle of 30 digits, and one number by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rft_core.preference import LABEL_LOSSES, PAIR_LOSSES, PREFERENCE_LOSSES, Side, StepStatistics
from rft_core.preference_options import REFERENCE_FREE_LOSSES, SORTED_LOSSES, USED_BY, Preference
from tests.oracle import preference as oracle
from tests.rft_core.preference_sides import SITUATIONS, oracle_of, sides_of

# A value of each setting that a loss may read, other than its default. Those of the step are tested with it.
CHANGES = {
    "beta": [0.03, 2.5],
    "label_smoothing": [0.2],
    "length_normalised": [False],
    "divergence": ["forward_kl", "js", "alpha"],
    "divergence_alpha": [1.3],
    "gamma": [1.375],
    "alpha": [0.25],
    "alpha_reward": [0.25, 1.0],
    "desirable_weight": [1.7],
    "undesirable_weight": [0.0, 0.4],
    "centring": [0.01],
}
OF_THE_STEP = {"tail_weight", "running_shift", "likelihood_weights"}
STEP = {"kl": 0.7, "shift": -0.3}
NEEDED = {"exo": {"label_smoothing": 1e-3}}


def settings_of(name: str) -> list[dict]:
    """The loss's defaults, and each setting that it reads changed by itself."""
    made = [{}]
    for setting, values in CHANGES.items():
        if name in USED_BY[setting]:
            made += [{setting: value} for value in values]
    return [
        NEEDED.get(name, {}) | ({"divergence": "alpha"} if "divergence_alpha" in each else {}) | each for each in made
    ]


CASES = [(name, settings) for name in PREFERENCE_LOSSES for settings in settings_of(name)]


def preference(name: str, settings: dict) -> Preference:
    unit = "pairs" if name in PAIR_LOSSES else "labels"
    return replace(Preference(((name, 1.0),), unit), **settings)


def ours(name, settings, sides: tuple[Side, Side]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    values = PREFERENCE_LOSSES[name](*sides, preference(name, settings), StepStatistics(**STEP))
    gradients = torch.autograd.grad(values.sum(), [side.policy for side in sides], materialize_grads=True)
    return values.detach(), list(gradients)


def test_table_oracle_and_numbers_by_hand_name_the_same_losses():
    assert set(PREFERENCE_LOSSES) == set(oracle.LOSSES) == set(BY_HAND)
    assert set(CHANGES) | OF_THE_STEP == set(USED_BY)
    assert not set(PAIR_LOSSES) & set(LABEL_LOSSES)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_value_and_gradient_equal_the_oracle(name, settings):
    for pairs in SITUATIONS.values():
        check_against_the_oracle(name, settings, pairs)


def check_against_the_oracle(name, settings, pairs):
    values, gradients = ours(name, settings, sides_of(pairs))
    completions = oracle_of(pairs)
    wanted = torch.tensor(oracle.values(name, *completions, settings, STEP), dtype=torch.float64)
    assert values.dtype == torch.float64 and values.shape == wanted.shape
    assert torch.isfinite(values).all()
    torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-8)
    by_chosen, by_rejected = oracle.gradients(name, *completions, settings, STEP)
    found, expected = torch.cat(gradients), torch.tensor([*by_chosen, *by_rejected], dtype=torch.float64)
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max() + 1e-12


@pytest.mark.parametrize("counts", [(7, 3), (5, 0), (0, 4)])
@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_labelled_sides_may_differ_in_number_and_one_may_be_empty(name, counts):
    chosen, rejected = (SITUATIONS["ordinary"][:count] for count in counts)
    sides = sides_of(chosen, 0)[0], sides_of(rejected)[1]
    values, gradients = ours(name, {}, sides)
    completions = oracle_of(chosen, 0)[0], oracle_of(rejected)[1]
    assert values.tolist() == pytest.approx(oracle.values(name, *completions, {}, STEP), rel=1e-12)
    for found, wanted in zip(gradients, oracle.gradients(name, *completions, {}, STEP), strict=True):
        assert found.tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("setting", CHANGES)
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_setting_changes_the_losses_that_are_said_to_read_it_and_no_other(name, setting):
    pairs = SITUATIONS["ordinary"]
    base = NEEDED.get(name, {}) | ({"divergence": "alpha"} if setting == "divergence_alpha" else {})
    changed = base | {setting: CHANGES[setting][0]}
    before, after = (ours(name, settings, sides_of(pairs))[0] for settings in (base, changed))
    assert torch.equal(before, after) == (name not in USED_BY[setting])


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_reads_the_reference_and_the_step_where_it_is_said_to(name):
    chosen, rejected = sides_of(SITUATIONS["ordinary"])
    others = [replace(side, reference=side.reference + shift) for side, shift in ((chosen, 1.5), (rejected, -0.5))]
    settings = preference(name, NEEDED.get(name, {}))
    value = PREFERENCE_LOSSES[name](chosen, rejected, settings, StepStatistics())
    moved = PREFERENCE_LOSSES[name](*others, settings, StepStatistics())
    assert torch.equal(value, moved) == (name in REFERENCE_FREE_LOSSES)
    later = {statistic: PREFERENCE_LOSSES[name](chosen, rejected, settings, StepStatistics(**{statistic: 0.4}))
             for statistic in ("kl", "shift")}  # fmt: skip
    assert torch.equal(value, later["kl"]) == (name != "kto")
    assert torch.equal(value, later["shift"]) == (name not in USED_BY["running_shift"])


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - set(SORTED_LOSSES)))
def test_a_pair_does_not_see_the_others(name):
    pairs = SITUATIONS["ordinary"]
    settings = NEEDED.get(name, {})
    together, _ = ours(name, settings, sides_of(pairs))
    alone = [float(ours(name, settings, sides_of([pair]))[0]) for pair in pairs]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("name", SORTED_LOSSES)
def test_sorted_losses_do_not_see_the_order_of_pairs(name):
    pairs = SITUATIONS["ordinary"]
    values, (of_chosen, of_rejected) = ours(name, {}, sides_of(pairs))
    order = [3, 1, 6, 0, 5, 2, 4]
    other, (by_chosen, by_rejected) = ours(name, {}, sides_of([pairs[place] for place in order]))
    assert torch.equal(values, other)
    assert torch.equal(of_chosen[order], by_chosen) and torch.equal(of_rejected[order], by_rejected)


# One number by hand: a pair with c = 1 over 5 tokens (policy -10) and j = -1 over 8 tokens (policy -16), beta 1, margin
# 0.5, kl = shift = 0. sig(1) = .731059, sig(2) = .880797, -logsig(1) = .313262, -logsig(-1) = 1.313262,
# -logsig(2) = .126928, -logsig(-2) = 2.126928; averages -2 and -2. Of two values a pair's are given as their sum.
BY_HAND = {
    "dpo": 0.126928,  # x = 2
    "dpo_norm": math.log(1 + math.exp(-(0.2 + 0.125))),
    "ipo": (0.2 + 0.125 - 0.5) ** 2,
    "hinge": 0.0,  # 1 - 2 < 0
    "robust": (0.9 * 0.126928 - 0.1 * 2.126928) / 0.8,  # eps .1
    "exo": 0.880797 * (-0.126928 - math.log(0.9)) + 0.119203 * (-2.126928 - math.log(0.1)),
    "nca": 0.313262 + 1.313262 / 2 + 0.313262 / 2,
    "bco_pair": 2 * 0.313262,
    "sppo": 0.5**2 + 0.5**2,
    "apo_zero": 1 - 0.731059 + 0.268941,
    "apo_down": 0.731059 + 1 - 0.880797,
    "aot": 0.126928,
    "aot_unpaired": 0.126928,
    "discopop": math.exp(-2),  # blend sig(40) is 1 to all digits shown
    "orpo": 2.0 + math.log(2),  # equal averages: log odds 0
    "cpo": math.log(1 + math.exp(-6)) + 10.0,
    "simpo": math.log(2),  # equal averages
    "nll": 2.0,
    "bradley_terry": math.log(1 + math.exp(-(6 - 0.5))),
    "kto": 0.268941 + 0.268941,
    "apo_zero_unpaired": 0.268941 + 0.268941,
    "bco": 2 * 0.313262,
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_numbers_by_hand(name):
    settings = {"beta": 1.0} | ({"label_smoothing": 0.1} if name in ("robust", "exo") else {})
    sides = sides_of([(-10.0, -11.0, 5, -16.0, -15.0, 8, 0.5)])
    values = PREFERENCE_LOSSES[name](*sides, preference(name, settings), StepStatistics())
    assert values.sum().item() == pytest.approx(BY_HAND[name], abs=2e-6)
