"""The rows of ALGORITHMS, a recipe's overrides, and what is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from rft_core.advantages import ADVANTAGES
from rft_core.algorithms import ALGORITHMS, POLICY_GRADIENT_ALGORITHMS
from rft_core.config import AlgorithmSettings, Recipe, TrainingSettings
from rft_core.errors import SettingsError
from rft_core.gates import GATES, STEP_GATES
from rft_core.losses import AGGREGATIONS, LEVELS, ROW_KINDS
from rft_core.resolve import check, resolve_algorithm
from rft_core.surrogates import SURROGATES
from rft_core.terms import Kl
from rft_core.token_credit import TOKEN_ADVANTAGES
from tests.oracle import losses as oracle


def resolve(**settings):
    return resolve_algorithm(AlgorithmSettings(**settings))


def test_settings_table_and_oracle_name_the_same_algorithms():
    literals = set(get_args(AlgorithmSettings.model_fields["name"].annotation)) - {"custom"}
    assert literals == set(ALGORITHMS)
    assert set(POLICY_GRADIENT_ALGORITHMS) == set(oracle.ALGORITHMS)
    assert all(row.name == name for name, row in ALGORITHMS.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_use_known_parts_and_resolve_to_themselves(name):
    row = ALGORITHMS[name]
    assert resolve(name=name) == row
    assert "arXiv" in row.source
    assert row.advantage in ADVANTAGES | TOKEN_ADVANTAGES
    for term in row.terms:
        assert term.level in LEVELS and term.gate in GATES | STEP_GATES and term.surrogate in SURROGATES
        assert term.aggregation in AGGREGATIONS and term.rows in ROW_KINDS


# advantage, level, gate, surrogate, aggregation, anchor, and the row's own numbers
ROWS_OF_THE_SPEC = {
    "grpo": ("group_zscore", "token", "none", "clipped", "sequence_mean", "old", {"clip_low": 0.2, "clip_high": 0.2}),
    "dapo": ("group_zscore", "token", "none", "clipped", "token_mean", "old", {"clip_low": 0.2, "clip_high": 0.28}),
    "dr_grpo": ("group_mean", "token", "none", "clipped", "constant_length", "old", {"clip_low": 0.2}),
    "gspo": (
        "group_zscore",
        "sequence_geometric",
        "none",
        "clipped",
        "sequence_mean",
        "old",
        {"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "luspo": (
        "group_zscore",
        "sequence_geometric",
        "none",
        "clipped",
        "sequence_sum",
        "old",
        {"clip_low": 2e-3, "clip_high": 2.5e-3},
    ),
    "gmpo": (
        "group_zscore",
        "sequence_geometric_clipped",
        "none",
        "unclipped",
        "sequence_mean",
        "old",
        {"log_ratio_bound": 0.4},
    ),
    "cispo": (
        "group_zscore",
        "token",
        "none",
        "capped",
        "token_mean",
        "old",
        {"weight_floor": 0.0, "weight_cap": 5.0},
    ),
    "scale_rl": ("group_zscore", "token", "none", "capped", "token_mean", "old", {"weight_cap": 5.0}),
    "sapo": (
        "group_zscore",
        "token",
        "none",
        "soft_gate",
        "sequence_mean",
        "old",
        {"soft_gate_positive": 1.0, "soft_gate_negative": 1.05},
    ),
    "reinforce": ("none", "token", "none", "logprob", "sequence_sum", "old", {}),
    "rloo": ("leave_one_out", "token", "none", "logprob", "sequence_sum", "old", {}),
    "reinforce_plus_plus": ("batch_whiten", "token", "none", "clipped", "token_mean", "old", {"clip_high": 0.2}),
    "ppo": ("gae", "token", "none", "clipped", "token_mean", "old", {"clip_low": 0.2, "clip_high": 0.2}),
    "remax": ("greedy_baseline", "token", "none", "logprob", "sequence_sum", "old", {}),
    "maxrl": ("reward_over_mean", "token", "none", "logprob", "sequence_sum", "old", {}),
    "opo": ("length_weighted_mean", "token", "none", "logprob", "sequence_sum", "old", {}),
    "gpg": ("group_mean_rescaled", "token", "none", "logprob", "token_mean", "old", {}),
    "reinforce_plus_plus_baseline": (
        "group_mean_batch_whiten",
        "token",
        "none",
        "clipped",
        "token_mean",
        "old",
        {"clip_low": 0.2, "clip_high": 0.2},
    ),
    "pass_at_k": ("pass_at_k", "token", "none", "clipped", "token_mean", "old", {"clip_low": 0.2}),
    "gdpo": ("per_component", "token", "none", "clipped", "sequence_mean", "old", {"clip_low": 0.2}),
    "opmd": ("log_mean_exp", "token", "none", "logprob", "token_mean", "old", {"tau": 1.0}),
    "asymre": ("shifted_mean", "token", "none", "logprob", "token_mean", "old", {}),
    "topr": (
        "none",
        "sequence_product",
        "none",
        "tapered",
        "sequence_sum",
        "behaviour",
        {"taper_threshold": 0.0},
    ),
    "rec": ("group_mean", "token", "one_side", "logprob", "token_mean", "old", {"gate_low": 0.2, "gate_high": 0.2}),
    "m2po": (
        "group_zscore",
        "token",
        "second_moment",
        "unclipped",
        "token_mean",
        "behaviour",
        {"second_moment_limit": 0.04},
    ),
    "vespo": (
        "group_zscore",
        "sequence_product",
        "none",
        "gamma",
        "sequence_sum",
        "behaviour",
        {
            "gamma_shape_positive": 2.0,
            "gamma_rate_positive": 3.0,
            "gamma_shape_negative": 3.0,
            "gamma_rate_negative": 2.0,
        },
    ),
    "dppo_tv": (
        "group_zscore",
        "token",
        "binary_tv",
        "unclipped",
        "token_mean",
        "behaviour",
        {"divergence_limit": 0.2},
    ),
    "dppo_kl": (
        "group_zscore",
        "token",
        "binary_kl",
        "unclipped",
        "token_mean",
        "behaviour",
        {"divergence_limit": 0.05},
    ),
    "s_ppo": (
        "group_mean",
        "token",
        "two_side",
        "log_ratio",
        "token_mean",
        "old",
        {"gate_low": 1 - 1 / 1.3, "gate_high": 0.3},
    ),
    "clip_cov": (
        "group_zscore",
        "token",
        "covariance_band",
        "clipped",
        "token_mean",
        "old",
        {"covariance_low": 1.0, "covariance_high": 5.0, "covariance_share": 2e-4},
    ),
    "kl_cov": (
        "group_zscore",
        "token",
        "none",
        "unclipped",
        "token_mean",
        "old",
        {
            "regularizer": "absolute_log_ratio",
            "regularizer_coefficient": 1.0,
            "regularizer_gate": "covariance_top",
            "covariance_top_share": 2e-4,
        },
    ),
    "on_policy_distillation": ("teacher_gap", "token", "none", "clipped", "token_mean", "old", {"clip_high": 0.2}),
}
# Off-policy by their own formula, so nothing corrects them unless the recipe says so.
UNCORRECTED = {"opmd", "asymre", "topr", "rec", "m2po", "vespo", "dppo_tv", "dppo_kl"}


@pytest.mark.parametrize("name", POLICY_GRADIENT_ALGORITHMS)
def test_rows_are_those_of_the_spec(name):
    *parts, numbers = ROWS_OF_THE_SPEC[name]
    row = ALGORITHMS[name]
    (term,) = row.terms
    found = [row.advantage, term.level, term.gate, term.surrogate, term.aggregation, term.anchor]
    assert found == parts
    assert {field: getattr(term, field) for field in numbers} == numbers
    assert row.kl == (Kl(1e-5, "k2") if name == "reinforce_plus_plus_baseline" else Kl())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_objectives_that_are_off_policy_themselves_get_no_correction(name):
    row = ALGORITHMS[name]
    assert (row.correction.kind == "none") == (name in UNCORRECTED)
    if name in UNCORRECTED:
        assert "correct" in row.source or row.terms[0].anchor == "behaviour"
    if name in ("opmd", "asymre", "rec"):
        assert resolve(name=name, correction="truncate").correction.kind == "truncate"


def test_tau_is_one_setting_for_baseline_and_loss():
    opmd = resolve(name="opmd", tau=3.0)
    assert opmd.terms[0].coefficient_at(1) == 0.25
    assert ALGORITHMS["opmd"].terms[0].coefficient_at(1) == 0.5


def test_options_of_rec():
    options = {"surrogate": "ratio_logprob", "gate": "ring", "regularizer": "log_likelihood", "drop": "balance"}
    rec = resolve(name="rec", **options, regularizer_coefficient=0.1)
    term = rec.terms[0]
    assert (term.surrogate, term.gate, term.regularizer_coefficient) == ("ratio_logprob", "ring", 0.1)
    assert rec.needs_all_rows() and not ALGORITHMS["rec"].needs_all_rows()


def test_credit_says_whose_values_it_reads():
    assert resolve(name="ppo").credit_scorers == ("critic",)
    assert resolve(name="ppo", reward_kl_coefficient=0.1).credit_scorers == ("old", "reference", "critic")
    assert resolve(advantage="gae", bootstrap_truncated=True).credit_scorers == ("critic", "critic_after")
    assert resolve(name="ppo", advantage="group_mean").credit_scorers == ()
    assert resolve(name="ppo").needs_all_rows() and not resolve(name="ppo", advantage="group_mean").needs_critic


def test_scale_rl_divides_by_the_batch():
    settings = AlgorithmSettings(name="scale_rl")
    assert ALGORITHMS["scale_rl"].filled(settings).std_scope == "batch"
    assert ALGORITHMS["scale_rl"].filled(AlgorithmSettings(std_scope="group")).std_scope == "group"
    assert ALGORITHMS["cispo"].filled(settings).std_scope is None


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
    ({"weight_cap": 3.0}, "weight_cap has no effect with surrogate clipped; it is read by surrogate capped"),
    ({"name": "cispo", "weight_floor": 5.0}, "weight_floor must be below weight_cap, got 5 and 5"),
    ({"name": "cispo", "clip_high": 0.3}, "clip_high has no effect with surrogate capped"),
    ({"name": "gspo", "log_ratio_bound": 0.1}, "log_ratio_bound has no effect with level sequence_geometric"),
    ({"name": "gspo", "aggregation": "token_mean"}, "one number per row"),
    ({"name": "sapo", "taper_threshold": 0.5}, "taper_threshold has no effect"),
    ({"entropy_quantile": 0.5}, "entropy_quantile has no effect with gate none"),
    ({"gate": "entropy_quantile", "gate_high": 0.5}, "gate_high has no effect with gate entropy_quantile"),
    ({"gate": "covariance_band", "covariance_low": 9.0}, "covariance_low must be below covariance_high"),
    ({"regularizer": "log_likelihood"}, "regularizer_coefficient above 0"),
    ({"regularizer_coefficient": 0.1}, "regularizer_coefficient has no effect with regularizer none"),
    ({"level": "sequence_geometric", "aggregation": "sequence_sum", "surrogate": "exp_advantage"}, "uses no ratio"),
    ({"correction": "none", "correction_cap": 3.0}, "correction_cap has no effect with correction none"),
    ({"correction": "reject", "correction_cap": 3.0}, "correction_cap has no effect with correction reject"),
    ({"correction_low": 0.1}, "correction_low has no effect with correction truncate"),
    ({"correction": "veto", "correction_level": "sequence"}, "correction_level has no effect with correction veto"),
    ({"correction_reduction": "sum"}, "correction_reduction has no effect with correction_level token"),
    ({"correction": "veto", "correction_low": 200.0}, "correction_low must be below correction_high"),
    ({"old_source": "behaviour", "correction": "mask"}, "the ratio is to the behaviour policy itself"),
    ({"gate": "two_side", "gate_high_outer": 3.0}, "gate_high_outer has no effect with gate two_side"),
    ({"gate": "ring", "gate_low": 0.7}, "gate_low_outer >= gate_low"),
    ({"name": "dr_grpo", "std_scope": "batch"}, "divides by no standard deviation"),
    ({"baseline_shift": 0.1}, "baseline_shift has no effect with advantage group_zscore; it is read by shifted_mean"),
    ({"whiten_ddof": 0}, "whiten_ddof has no effect"),
    ({"gae_lambda": 0.9}, "gae_lambda has no effect with advantage group_zscore; it is read by gae"),
    ({"name": "reinforce_plus_plus", "bootstrap_truncated": True}, "bootstrap_truncated has no effect"),
    ({"name": "ppo", "advantage": "group_mean", "gamma": 0.9}, "it is read by batch_whiten or gae"),
    ({"advantage": "per_step_group_zscore", "reward_clip_high": 1.0}, "reads step rewards, not their sum"),
    ({"advantage": "per_step_group_zscore", "reward_kl_coefficient": 0.1}, "reads step rewards"),
    ({"advantage": "none", "drop": "balance"}, "drop has no effect with advantage none"),
    ({"name": "gdpo", "pass_at_k_over_std": True}, "pass_at_k_over_std has no effect"),
    ({"tau": 2.0}, "neither baseline log_mean_exp nor a term reads it"),
    ({"name": "gdpo", "reward_clip_high": 1.0}, "reads components, not their sum"),
    ({"name": "gdpo", "overlong_buffer_tokens": 10}, "reads components, not their sum"),
    ({"name": "topr", "old_source": "behaviour"}, "is to the behaviour policy anyway"),
    ({"name": "opo", "old_source": "behaviour"}, "surrogate logprob uses no ratio; use correction none"),
    ({"kl_estimator": "k2"}, "kl_estimator has no effect"),
    ({"kl_target": 0.1}, "kl_target needs kl_coefficient above 0"),
    ({"kl_coefficient": 0.1, "kl_horizon": 5}, "kl_horizon has no effect"),
    ({"kl_importance": True}, "kl_coefficient is 0"),
    ({"kl_importance": True, "kl_coefficient": 0.1, "kl_estimator": "k2"}, "weighs k3"),
    ({"correction": "mask", "correction_low": 6.0}, "correction_low must be below"),
    ({"reward_clip_low": 1.0, "reward_clip_high": 1.0}, "reward_clip_low must be below"),
]


def test_correction_bounds_are_those_of_its_kind():
    veto, mask = resolve(correction="veto").correction, resolve(correction="mask", correction_high=3.0).correction
    assert (veto.low, veto.high, mask.low, mask.high) == (1e-4, 100.0, 0.5, 3.0)


def test_the_ratio_may_be_to_the_behaviour_policy():
    bypass = resolve(name="cispo", old_source="behaviour")
    assert [term.anchor for term in bypass.terms] == ["behaviour"]
    assert resolve(name="cispo").needs_old and not bypass.needs_old
    assert resolve(old_source="behaviour", kl_importance=True, kl_coefficient=0.1).needs_old


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


@pytest.mark.parametrize("surrogate", ["logprob", "log_ratio", "exp_advantage"])
def test_surrogates_without_trust_region_take_one_optimizer_step(surrogate):
    algorithm = resolve(surrogate=surrogate)
    check(algorithm, TrainingSettings())
    for training in (TrainingSettings(epochs=2), TrainingSettings(mini_batches=2)):
        with pytest.raises(SettingsError, match="no trust region"):
            check(algorithm, training)
        with pytest.raises(SettingsError, match="no trust region"):  # it bounds no ratio
            check(resolve(surrogate=surrogate, gate="entropy_quantile"), training)
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
        "from rft_core.resolve import check, resolve_algorithm; "
        "check(resolve_algorithm(AlgorithmSettings()), TrainingSettings()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
