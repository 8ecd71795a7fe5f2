"""The rows of ALGORITHMS, a recipe's overrides, and what is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from rft_core.advantages import ADVANTAGES
from rft_core.algorithms import ALGORITHMS, Kl, check, resolve_algorithm
from rft_core.config import AlgorithmSettings, Recipe, TrainingSettings
from rft_core.errors import SettingsError
from rft_core.losses import AGGREGATIONS, GATES, LEVELS, ROW_KINDS, SURROGATES
from tests.oracle import losses as oracle


def resolve(**settings):
    return resolve_algorithm(AlgorithmSettings(**settings))


def test_settings_table_and_oracle_name_the_same_algorithms():
    literals = set(get_args(AlgorithmSettings.model_fields["name"].annotation))
    assert literals == set(ALGORITHMS) == set(oracle.ALGORITHMS)
    assert all(row.name == name for name, row in ALGORITHMS.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_use_known_parts_and_resolve_to_themselves(name):
    row = ALGORITHMS[name]
    assert resolve(name=name) == row
    assert "arXiv" in row.source
    assert row.advantage in ADVANTAGES
    for term in row.terms:
        assert term.level in LEVELS and term.gate in GATES and term.surrogate in SURROGATES
        assert term.aggregation in AGGREGATIONS and term.rows in ROW_KINDS


def test_grpo_and_dr_grpo_are_the_rows_of_the_spec():
    grpo, dr_grpo = ALGORITHMS["grpo"], ALGORITHMS["dr_grpo"]
    assert (grpo.advantage, grpo.terms[0].aggregation) == ("group_zscore", "sequence_mean")
    assert (dr_grpo.advantage, dr_grpo.terms[0].aggregation) == ("group_mean", "constant_length")
    for term in (grpo.terms[0], dr_grpo.terms[0]):
        assert (term.level, term.surrogate, term.clip_low, term.clip_high) == ("token", "clipped", 0.2, 0.2)
    assert not grpo.needs_reference and not grpo.needs_all_rows()


def test_overrides_fill_their_slot_only():
    changed = resolve(
        name="grpo", aggregation="token_mean", clip_high=0.28, kl_coefficient=0.04, advantage="leave_one_out"
    )
    term = changed.terms[0]
    assert (term.aggregation, term.clip_low, term.clip_high, term.surrogate) == ("token_mean", 0.2, 0.28, "clipped")
    assert changed.advantage == "leave_one_out"
    assert changed.kl == Kl(0.04, "k3", False)
    assert changed.needs_reference and changed.needs_all_rows()
    assert resolve(entropy_coefficient=0.01).needs_all_rows()
    sequence = resolve(correction_level="sequence").correction
    assert sequence.level == "sequence_geometric"
    assert resolve(correction_level="sequence", correction_reduction="sum").correction.level == "sequence_product"


# settings -> part of the reason
NONSENSE = [
    ({"level": "sequence_geometric", "aggregation": "token_mean"}, "sequence_mean or sequence_sum when level"),
    ({"name": "dr_grpo", "level": "sequence_product"}, "one number per row"),
    ({"level": "sequence_geometric", "surrogate": "logprob"}, "uses no ratio"),
    ({"surrogate": "unclipped", "clip_high": 0.3}, "clip_high has no effect"),
    ({"surrogate": "unclipped", "dual_clip": 3.0}, "dual_clip has no effect"),
    ({"dual_clip": 1.1}, "must be above 1 \\+ clip_high = 1.2"),
    ({"gate_low": 0.1}, "gate_low has no effect with gate none"),
    ({"gate": "two_side", "gate_high_outer": 3.0}, "gate_high_outer has no effect with gate two_side"),
    ({"gate": "ring", "gate_low": 0.7}, "gate_low_outer >= gate_low"),
    ({"name": "dr_grpo", "std_scope": "batch"}, "divides by no standard deviation"),
    ({"kl_importance": True}, "kl_coefficient is 0"),
    ({"kl_importance": True, "kl_coefficient": 0.1, "kl_estimator": "k2"}, "weighs k3"),
    ({"correction": "mask", "correction_low": 6.0}, "correction_low must be below"),
    ({"reward_clip_low": 1.0, "reward_clip_high": 1.0}, "reward_clip_low must be below"),
]


@pytest.mark.parametrize(("settings", "reason"), NONSENSE)
def test_nonsense_is_refused_with_its_reason(settings, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve(**settings)


def test_k1_is_refused_in_the_loss():
    settings = AlgorithmSettings(kl_coefficient=0.1).model_copy(update={"kl_estimator": "k1"})
    with pytest.raises(SettingsError, match="expected gradient on-policy is zero"):
        resolve_algorithm(settings)


def test_unknown_name_is_refused():
    with pytest.raises(SettingsError, match="dr_grpo"):
        resolve_algorithm(AlgorithmSettings().model_copy(update={"name": "gropo"}))


@pytest.mark.parametrize("surrogate", ["logprob", "log_ratio"])
def test_surrogates_without_trust_region_take_one_optimizer_step(surrogate):
    algorithm = resolve(surrogate=surrogate)
    check(algorithm, TrainingSettings())
    for training in (TrainingSettings(epochs=2), TrainingSettings(mini_batches=2)):
        with pytest.raises(SettingsError, match="no trust region"):
            check(algorithm, training)
        check(resolve(surrogate=surrogate, gate="two_side"), training)
        check(resolve(), training)


def test_a_recipe_is_refused_before_anything_is_loaded():
    parts = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": [{"name": "exact_match"}]}}
    with pytest.raises(SettingsError, match="no trust region"):
        Recipe(steps=1, **parts, algorithm={"surrogate": "logprob"}, training={"epochs": 2})
    with pytest.raises(SettingsError, match="one number per row"):
        Recipe(steps=1, **parts, algorithm={"level": "sequence_geometric", "aggregation": "token_mean"})


def test_settings_are_resolved_without_torch():
    script = (
        "import sys; from rft_core.config import AlgorithmSettings, TrainingSettings; "
        "from rft_core.algorithms import check, resolve_algorithm; "
        "check(resolve_algorithm(AlgorithmSettings()), TrainingSettings()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
