"""Rows of ALGORITHMS for given or compared completions, what a recipe may set, and what is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
from pydantic import ValidationError

from rft_core import preference, preference_options
from rft_core.algorithm_settings import AlgorithmSettings, PreferenceSettings
from rft_core.algorithms import ALGORITHMS, POLICY_GRADIENT_ALGORITHMS
from rft_core.config import Recipe, TrainingSettings
from rft_core.errors import SettingsError
from rft_core.mixed_algorithms import MIXED_ALGORITHMS
from rft_core.pairing import PAIRINGS
from rft_core.preference_options import Preference
from rft_core.resolve import check, resolve_algorithm
from rft_core.terms import Distillation

# losses, unit, and what differs from beta .1, no smoothing, and the rest off (spec, section 4)
PREFERENCES = {
    "dpo": ({"dpo": 1.0}, "pairs", {}),
    "dpo_norm": ({"dpo_norm": 1.0}, "pairs", {}),
    "rpo": ({"dpo": 1.0, "nll": 1.0}, "pairs", {}),
    "ipo": ({"ipo": 1.0}, "pairs", {}),
    "hinge": ({"hinge": 1.0}, "pairs", {}),
    "robust": ({"robust": 1.0}, "pairs", {"label_smoothing": 0.1}),
    "exo": ({"exo": 1.0}, "pairs", {"label_smoothing": 1e-3}),
    "nca": ({"nca": 1.0}, "pairs", {}),
    "sppo": ({"sppo": 1.0}, "pairs", {}),
    "apo_zero": ({"apo_zero": 1.0}, "pairs", {}),
    "apo_down": ({"apo_down": 1.0}, "pairs", {}),
    "aot": ({"aot": 1.0}, "pairs", {}),
    "aot_unpaired": ({"aot_unpaired": 1.0}, "pairs", {}),
    "discopop": ({"discopop": 1.0}, "pairs", {}),
    "orpo": ({"orpo": 1.0}, "pairs", {}),
    "cpo": ({"cpo": 1.0}, "pairs", {}),
    "simpo": ({"simpo": 1.0}, "pairs", {"beta": 2.5, "gamma": 1.375}),
    "mpo": ({"dpo": 0.8, "bco_pair": 0.2, "nll": 1.0}, "pairs", {"running_shift": False}),
    "kto": ({"kto": 1.0}, "labels", {}),
    "bco": ({"bco": 1.0}, "labels", {}),
    "apo_zero_unpaired": ({"apo_zero_unpaired": 1.0}, "labels", {}),
    "reward_model": ({"bradley_terry": 1.0}, "pairs", {"beta": 1.0}),
    "online_dpo": ({"dpo": 1.0}, "pairs", {}),
}
DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "length_normalised": True,
    "divergence": "reverse_kl",
    "divergence_alpha": 0.5,
    "tail_weight": 1.0,
    "gamma": 0.0,
    "alpha": 1.0,
    "alpha_reward": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "running_shift": True,
    "centring": 0.0,
    "likelihood_weights": False,
}
IMITATIONS = {
    "sft": ("logprob", ("demonstrations", "trajectories")),
    "dft": ("probability_weighted", ("demonstrations", "trajectories")),
    "process_reward_model": ("logistic", ("stepwise",)),
}
DISTILLATIONS = {"jsd": ("demonstrations", "trajectories"), "gkd": ("prompts",)}  # without any other term
RECORDS = {"pairs": ("preferences",), "labels": ("labelled",)}


def test_every_row_is_of_one_kind():
    kinds = (POLICY_GRADIENT_ALGORITHMS, MIXED_ALGORITHMS, PREFERENCES, IMITATIONS, DISTILLATIONS)
    assert set(ALGORITHMS) == set().union(*kinds) and len(ALGORITHMS) == sum(map(len, kinds))


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_the_spec(name):
    losses, unit, changes = PREFERENCES[name]
    row = ALGORITHMS[name]
    found = row.preference
    assert (dict(found.losses), found.unit, row.terms) == (losses, unit, ())
    assert {field: getattr(found, field) for field in DEFAULTS} == DEFAULTS | changes
    assert row.records == (("prompts",) if name == "online_dpo" else RECORDS[unit])
    free = name in ("orpo", "cpo", "simpo", "reward_model")
    assert row.needs_reference != free
    assert row.samples == (name == "online_dpo") and not row.needs_old


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_distillations_are_those_of_the_spec(name):
    row = ALGORITHMS[name]
    assert (row.records, row.terms, row.preference) == (DISTILLATIONS[name], (), None)
    assert row.distillation == Distillation(coefficient=1.0, beta=0.5)
    assert row.needs_all_rows() and not (row.needs_old or row.needs_reference or row.reads_rewards)


@pytest.mark.parametrize("name", IMITATIONS)
def test_imitations_are_those_of_the_spec(name):
    surrogate, records = IMITATIONS[name]
    row = ALGORITHMS[name]
    (term,) = row.terms
    assert (term.rows, term.surrogate, term.aggregation, row.records) == ("expert", surrogate, "token_mean", records)
    assert row.takes_given and not row.needs_reference and not row.needs_old and row.preference is None


def test_names_told_without_torch_are_those_of_the_tables():
    assert set(preference.PAIR_LOSSES) == preference_options.PAIR_LOSSES
    assert set(preference.LABEL_LOSSES) == preference_options.LABEL_LOSSES
    every = set(preference.PREFERENCE_LOSSES)
    for setting, losses in preference_options.USED_BY.items():
        assert losses and losses <= every, setting
    assert every >= preference_options.REFERENCE_FREE_LOSSES
    assert every >= set(preference_options.SORTED_LOSSES)
    assert {row.preference.unit for row in ALGORITHMS.values() if row.preference} == set(PAIRINGS)
    named = {loss for row in ALGORITHMS.values() if row.preference for loss, _ in row.preference.losses}
    assert named == every  # no loss that no row uses
    settings = set(PreferenceSettings.model_fields)
    assert settings == {field.name for field in fields(Preference)} - {"unit"}
    assert settings == set(preference_options.USED_BY) | {"losses"} and settings == set(DEFAULTS) | {"losses"}


def test_preferences_are_resolved_without_torch():
    script = (
        "import sys; from rft_core.config import AlgorithmSettings; from rft_core.resolve import resolve_algorithm; "
        "resolve_algorithm(AlgorithmSettings(name='kto')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def resolve(name: str, **preference_settings):
    return resolve_algorithm(AlgorithmSettings(name=name, preference=preference_settings)).preference


def test_a_recipe_changes_what_it_names_and_no_more():
    assert resolve("dpo") == ALGORITHMS["dpo"].preference
    found = resolve("dpo", beta=0.3, label_smoothing=0.2, divergence="alpha", divergence_alpha=0.7, tail_weight=0.5)
    assert (found.beta, found.label_smoothing, found.divergence, found.divergence_alpha) == (0.3, 0.2, "alpha", 0.7)
    assert (found.tail_weight, found.losses) == (0.5, (("dpo", 1.0),))
    mixed = resolve("dpo", losses={"ipo": 0.5, "nll": 0.1}, length_normalised=False)
    assert mixed.losses == (("ipo", 0.5), ("nll", 0.1)) and mixed.needs_reference
    assert not resolve("dpo", losses={"simpo": 1.0, "dpo": 0.0}).needs_reference
    settings = AlgorithmSettings(name="sft", aggregation="sequence_mean")
    assert resolve_algorithm(settings).terms[0].aggregation == "sequence_mean"


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("grpo", {"beta": 0.1}, "preference.beta has no effect: grpo compares nothing"),
        ("sft", {"beta": 0.1}, "preference.beta has no effect: sft compares nothing"),
        ("dpo", {"gamma": 0.5}, "gamma has no effect on dpo: it is read by simpo"),
        ("ipo", {"label_smoothing": 0.1}, "label_smoothing has no effect on ipo"),
        ("simpo", {"divergence": "js"}, "divergence has no effect on simpo: it is read by dpo"),
        ("dpo", {"divergence_alpha": 0.5}, "divergence_alpha has no effect: divergence is reverse_kl"),
        ("kto", {"tail_weight": 0.5}, "tail_weight has no effect on kto"),
        ("dpo", {"running_shift": False}, "running_shift has no effect on dpo: it is read by bco, bco_pair"),
        ("kto", {"running_shift": False}, "running_shift has no effect on kto"),
        ("dpo", {"desirable_weight": 2.0}, "read by apo_zero_unpaired, bco, kto"),
        ("dpo", {"centring": 0.1}, "centring has no effect on dpo"),
        ("reward_model", {"beta": 0.1}, "beta has no effect on bradley_terry"),
        ("rpo", {"losses": {"dpo": 0.0, "nll": 1.0}, "beta": 0.1}, "beta has no effect on nll"),
        ("dpo", {"losses": {"kto": 1.0}}, r"losses of dpo must be among .*\(it trains on pairs\), got 'kto'"),
        ("kto", {"losses": {"dpo": 1.0}}, r"losses of kto must be among .*\(it trains on labels\), got 'dpo'"),
        ("dpo", {"losses": {"dop": 1.0}}, "got 'dop'"),
        ("dpo", {"losses": {"dpo": 0.0}}, "must give some loss a weight above 0"),
        ("exo", {"label_smoothing": 0.0}, "above 0 and below 0.5 for exo, got 0"),
        ("exo", {"label_smoothing": 0.5}, "above 0 and below 0.5 for exo, got 0.5"),
        ("dpo", {"losses": {"exo": 1.0}}, "above 0 and below 0.5 for exo, got 0"),
        ("robust", {"label_smoothing": 0.5}, "below 0.5 for robust, got 0.5"),
    ],
)
def test_preferences_that_make_no_sense_are_refused(name, settings, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve(name, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "greater than 0"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"tail_weight": 1.5}, "less than or equal to 1"),
        ({"losses": {}}, "at least 1 item"),
        ({"losses": {"dpo": -1.0}}, "greater than or equal to 0"),
        ({"divergence": "kl"}, "reverse_kl"),
        ({"betta": 1.0}, "Extra inputs"),
    ],
)
def test_values_out_of_bounds_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PreferenceSettings(**settings)


RATIO = "takes no ratio of its completions to an older policy"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "dpo", "level": "sequence_geometric"}, f"algorithm.level has no effect: dpo {RATIO}"),
        ({"name": "dpo", "aggregation": "token_mean"}, f"algorithm.aggregation has no effect: dpo {RATIO}"),
        ({"name": "sft", "surrogate": "clipped"}, f"algorithm.surrogate has no effect: sft {RATIO}"),
        ({"name": "sft", "clip_high": 0.3}, f"algorithm.clip_high has no effect: sft {RATIO}"),
        ({"name": "sft", "correction": "mask"}, f"algorithm.correction has no effect: sft {RATIO}"),
        ({"name": "online_dpo", "correction_cap": 3.0}, f"algorithm.correction_cap has no effect: online_dpo {RATIO}"),
        ({"name": "kto", "old_source": "behaviour"}, f"algorithm.old_source has no effect: kto {RATIO}"),
        ({"name": "sft", "kl_importance": True}, f"algorithm.kl_importance has no effect: sft {RATIO}"),
        ({"name": "online_dpo", "advantage": "group_mean"}, "advantage has no effect: online_dpo makes pairs"),
        ({"name": "online_dpo", "min_group_size": 3}, "min_group_size has no effect: online_dpo makes pairs"),
        ({"name": "dpo", "std_epsilon": 0.1}, "std_epsilon has no effect: dpo makes pairs of rewards"),
        ({"name": "sft", "advantage": "group_mean"}, "advantage has no effect: sft trains on completions that the"),
        ({"name": "sft", "truncated": "drop"}, "truncated has no effect: sft trains on completions that the data"),
        ({"name": "dpo", "max_staleness": 2}, "max_staleness has no effect: dpo trains on completions that the data"),
        ({"name": "kto", "overlong_buffer_tokens": 5}, "overlong_buffer_tokens has no effect: kto trains on"),
        ({"name": "dpo", "kl_coefficient": 0.1}, "kl_coefficient must be 0 for dpo, got 0.1: what holds it to"),
        ({"name": "online_dpo", "kl_coefficient": 0.1}, "kl_coefficient must be 0 for online_dpo"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(settings, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve_algorithm(AlgorithmSettings(**settings))


def test_settings_that_are_read_are_not_refused():
    for settings in (
        {"name": "sft", "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "reward_clip_high": 1.0},
        {"name": "dpo", "entropy_coefficient": 0.01},
        {"name": "online_dpo", "truncated": "drop", "max_staleness": 2, "overlong_buffer_tokens": 4},
    ):
        resolve_algorithm(AlgorithmSettings(**settings))


@pytest.mark.parametrize("name", [*PREFERENCES, *IMITATIONS])
def test_given_rows_may_be_passed_over_more_than_once(name):
    check(ALGORITHMS[name], TrainingSettings(epochs=3, mini_batches=2))


# Whole recipes.


def recipe(name: str, record: str | None = None, **sections):
    parts = {"steps": 1, "model": {"path": "m"}, "algorithm": {"name": name}}
    data = {"source": "a.jsonl"} | ({"record": record} if record else {}) | sections.pop("data", {})
    return Recipe.model_validate(parts | {"data": data} | sections)


@pytest.mark.parametrize(
    ("name", "record"),
    [(name, record) for name, row in ALGORITHMS.items() if not row.samples for record in row.records],
)
def test_a_recipe_of_given_data_needs_no_reward(name, record):
    teacher = {"path": "t"} if ALGORITHMS[name].distillation.needs_teacher else {}
    assert recipe(name, record, teacher=teacher).reward.functions == []


REWARD = {"functions": [{"name": "exact_match"}]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"name": "dpo"},
            "data.record must be preferences for algorithm dpo, got prompts, which .*grpo.* train on",
        ),
        ({"name": "dpo", "record": "labelled"}, "got labelled, which apo_zero_unpaired, bco, kto train on"),
        ({"name": "kto", "record": "preferences"}, "must be labelled for algorithm kto, got preferences, which aot,"),
        ({"name": "sft", "record": "stepwise"}, "must be demonstrations or trajectories for algorithm sft"),
        ({"name": "grpo", "record": "demonstrations", "reward": REWARD}, "must be prompts for algorithm grpo"),
        ({"name": "online_dpo", "record": "preferences", "reward": REWARD}, "must be prompts for algorithm online_dpo"),
        (
            {"name": "online_dpo", "reward": REWARD, "rollout": {"group_size": 1}},
            "rollout.group_size must be at least 2 for algorithm online_dpo",
        ),
        ({"name": "grpo"}, "reward.functions must name what is rewarded: grpo trains on completions that the policy"),
        ({"name": "online_dpo"}, "reward.functions must name what is rewarded: online_dpo"),
        (
            {"name": "dpo", "record": "preferences", "reward": REWARD},
            "reward.functions must be empty for algorithm dpo: the data says .* got exact_match",
        ),
        (
            {"name": "sft", "record": "demonstrations", "data": {"order": "easy_to_hard"}},
            "data.order must be shuffled, sequential or difficulty for algorithm sft: .* got easy_to_hard",
        ),
        (
            {"name": "kto", "record": "labelled", "data": {"order": "targeted"}},
            "no pass rate is measured, got targeted",
        ),
        (
            {"name": "dpo", "record": "preferences", "rollout": {"temperature": 0.7}},
            "rollout.temperature must be 1 for algorithm dpo: .* got 0.7",
        ),
        (
            {"name": "dpo", "record": "preferences", "evaluation": {"correct_component": "exact_match"}},
            r"evaluation.correct_component must be one of \[\]",
        ),
        (
            {"name": "dapo", "reward": REWARD, "algorithm": {"name": "dapo", "filter_on": "exact"}},
            r"algorithm.filter_on must be one of \['exact_match'\], got 'exact'",
        ),
        *(
            (
                {"name": "sft", "record": "demonstrations", section: {name: value}},
                f"{section}.{name} has no effect for .* sft",
            )
            for section, name, value in (
                ("rollout", "group_size", 4),
                ("rollout", "top_p", 0.9),
                ("rollout", "top_k", 5),
                ("rollout", "ahead", 1),
                ("evaluation", "samples", 2),
                ("evaluation", "greedy", False),
                ("evaluation", "temperature", 0.5),
                ("evaluation", "pass_at", [1]),
            )
        ),
        (
            {"name": "sft", "record": "demonstrations", "data": {"heldout_fraction": 0}},
            "evaluation.every needs held-out prompts",
        ),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        recipe(**given)


def test_a_recipe_is_refused_for_its_preference_before_anything_is_loaded():
    parts = {"steps": 1, "model": {"path": "m"}, "data": {"source": "a.jsonl", "record": "preferences"}}
    with pytest.raises(SettingsError, match=r"above 0 and below 0.5 for exo"):
        Recipe(**parts, algorithm={"name": "exo", "preference": {"label_smoothing": 0.0}})
    with pytest.raises(SettingsError, match="gamma has no effect on dpo"):
        Recipe(**parts, algorithm={"name": "dpo", "preference": {"gamma": 1.0}})


@pytest.mark.parametrize("order", ["shuffled", "sequential", "difficulty"])
def test_orders_that_need_no_pass_rate_are_taken(order):
    data = {"order": order} | ({"difficulty_field": "level"} if order == "difficulty" else {})
    assert recipe("sft", "demonstrations", data=data).data.order == order
