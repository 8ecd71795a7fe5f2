"""From a recipe's settings to the row of ALGORITHMS that an update runs; what makes no sense is refused. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rft_core.algorithms import ALGORITHMS
from rft_core.distillation_options import refuse_distillation, resolve_distillation
from rft_core.entropy_options import resolve_adaptive_entropy
from rft_core.errors import SettingsError
from rft_core.mixtures import resolved_share
from rft_core.preference_options import resolve_preference
from rft_core.terms import REWARD_PARTS_READ, STEP_GATES_READ_ALL, Algorithm, Correction, Kl, Term, UserParts

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.config import TrainingSettings

# Surrogates without any pull back to the anchor: after the first optimizer step their gradient is plainly wrong.
SINGLE_STEP_SURROGATES = frozenset(
    {"logprob", "probability_weighted", "uncertainty_weighted", "logistic", "log_ratio", "exp_advantage"}
)

# A ratio that is one number per row must be averaged per row, else long rows weigh more than the ratio says.
SEQUENCE_AGGREGATIONS = frozenset({"sequence_mean", "sequence_sum"})

REFUSED_KL_ESTIMATORS = frozenset({"k1"})

RATIO_GATES = frozenset({"one_side", "two_side", "ring"})

ANCHOR_GATES = RATIO_GATES | {"binary_tv", "binary_kl", "second_moment", "covariance_band"}

# Setting -> (slot of the term, what must stand there to read it). Fields of Term have the same names.
READ_BY: dict[str, tuple[str, frozenset[str]]] = {
    setting: (slot, frozenset(parts))
    for slot, parts, settings in (
        ("surrogate", ("clipped",), ("clip_low", "clip_high", "dual_clip")),
        ("surrogate", ("soft_gate",), ("soft_gate_positive", "soft_gate_negative")),
        ("surrogate", ("capped",), ("weight_floor", "weight_cap")),
        ("surrogate", ("tapered",), ("taper_threshold",)),
        ("surrogate", ("exp_advantage",), ("advantage_temperature",)),
        (
            "surrogate",
            ("gamma",),
            ("gamma_shape_positive", "gamma_rate_positive", "gamma_shape_negative", "gamma_rate_negative"),
        ),
        ("level", ("sequence_geometric_clipped",), ("log_ratio_bound",)),
        ("gate", ("one_side", "two_side", "ring"), ("gate_low", "gate_high")),
        ("gate", ("ring",), ("gate_low_outer", "gate_high_outer")),
        ("gate", ("off_policy_sequence",), ("off_policy_limit",)),
        ("gate", ("binary_tv", "binary_kl"), ("divergence_limit",)),
        ("gate", ("second_moment",), ("second_moment_limit",)),
        ("gate", ("entropy_quantile",), ("entropy_quantile",)),
        ("gate", ("covariance_band",), ("covariance_low", "covariance_high", "covariance_share")),
        (
            "regularizer",
            ("log_likelihood", "squared_log_ratio", "absolute_log_ratio"),
            ("regularizer_coefficient", "regularizer_gate"),
        ),
        ("regularizer_gate", ("covariance_top",), ("covariance_top_share",)),
    )
    for setting in settings
}

# Setting -> advantages that read it.
ADVANTAGE_READ_BY = {
    "whiten_ddof": ("per_component", "group_mean_batch_whiten", "batch_whiten", "gae"),
    "gamma": ("batch_whiten", "gae"),
    "gae_lambda": ("gae",),
    "bootstrap_truncated": ("gae",),
    "pass_at_k_over_std": ("pass_at_k",),
    "baseline": ("log_mean_exp",),
    "baseline_shift": ("shifted_mean",),
    "drop": ("group_mean", "group_zscore", "leave_one_out"),
    "select": ("selected",),
    "pass_threshold": ("selected",),
}

_SLOTS = ("level", "gate", "surrogate", "regularizer", "aggregation")

# Kind -> its bounds where the recipe gives none.
_CORRECTION_BOUNDS = {"veto": (1e-4, 100.0)}
_CORRECTION_READERS = {
    "correct_engine": ("truncate", "mask", "reject", "veto"),
    "correction_cap": ("truncate",),
    "correction_low": ("mask", "reject", "veto"),
    "correction_high": ("mask", "reject", "veto"),
    "correction_level": ("truncate", "mask", "reject"),
    "correction_reduction": ("truncate", "mask", "reject"),
}
# Read only where completions have a ratio to an older policy; where credit compares rewards; where a policy samples.
_RATIO_SETTINGS = ("old_source", *_CORRECTION_READERS, "correction", "kl_importance")
_CREDIT_SETTINGS = ("advantage", "std_scope", "std_ddof", "std_epsilon", "spread_floor", "min_group_size")
_SAMPLE_SETTINGS = ("truncated", "overlong_buffer_tokens", "max_staleness")

_CORRECTION_LEVELS = {"mean": "sequence_geometric", "sum": "sequence_product"}


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The row of ALGORITHMS with the settings' overrides; SettingsError, with the reason, for what makes no sense.

    A user's own parts are loaded, which runs their code.
    """
    own = _user_parts(settings)
    row = own.row or ALGORITHMS.get(settings.name)
    if row is None:
        raise SettingsError(f"algorithm.name must be one of {sorted(ALGORITHMS)}, got {settings.name!r}")
    algorithm = replace(
        row,
        advantage=own.advantage or settings.advantage or row.advantage,
        terms=tuple(
            _given_term(row, term, settings) if term.rows == "expert" else _overridden(term, settings, own)
            for term in row.terms
        ),
        kl=Kl(
            row.kl.coefficient if settings.kl_coefficient is None else settings.kl_coefficient,
            settings.kl_estimator or row.kl.estimator,
            settings.kl_importance or row.kl.importance,
            row.kl.value_clamp if settings.kl_value_clamp is None else settings.kl_value_clamp,
            row.kl.target if settings.kl_target is None else settings.kl_target,
            settings.kl_horizon if _is_set(settings, "kl_horizon") else row.kl.horizon,
        ),
        entropy_coefficient=settings.entropy_coefficient or row.entropy_coefficient,
        adaptive_entropy=resolve_adaptive_entropy(row, settings),
        correction=_correction(row, settings),
        reward_kl=row.reward_kl if settings.reward_kl_coefficient is None else settings.reward_kl_coefficient,
        dynamic_sampling=row.dynamic_sampling if settings.dynamic_sampling is None else settings.dynamic_sampling,
        bootstraps=settings.bootstrap_truncated or row.bootstraps,
        preference=resolve_preference(row.preference, row.name, settings.preference),
        expert_share=resolved_share(row.expert_share, settings),
        distillation=resolve_distillation(row.distillation, settings.distillation),
    )
    if all(term.rows == "expert" for term in algorithm.terms):
        _refuse_overrides(algorithm, settings)
    _refuse_unread(algorithm, settings)
    for before, term in zip(row.terms, algorithm.terms, strict=True):
        _refuse_term(term, settings)
        _refuse_old_source(before, term, settings)
    _refuse_advantage(algorithm, settings)
    _refuse_rewards(settings)
    _refuse_resampling(algorithm, settings)
    _refuse_kl(algorithm, settings)
    _refuse_correction(algorithm, settings)
    refuse_distillation(algorithm, settings)
    return algorithm


def _user_parts(settings: AlgorithmSettings) -> UserParts:
    if not settings.paths():
        return UserParts()
    from rft_core.user_algorithm import user_parts  # only now what loading code takes

    return user_parts(settings)


def _overridden(term: Term, settings: AlgorithmSettings, own: UserParts) -> Term:
    values = {name: getattr(settings, name) for name in (*_SLOTS, *READ_BY)}
    values["surrogate"] = own.surrogate or settings.surrogate
    changes = {name: value for name, value in values.items() if value is not None}
    if settings.old_source == "behaviour":
        changes["anchor"] = "behaviour"
    if settings.regularizer == "none":  # then there is nothing to gate either
        changes.setdefault("regularizer_gate", "none")
    if term.tau is not None:
        changes["tau"] = settings.tau
    return replace(term, **changes)


def _given_term(row: Algorithm, term: Term, settings: AlgorithmSettings) -> Term:
    """A term over given rows takes the recipe's aggregation where no term over own rows does."""
    is_alone = all(other.rows == "expert" for other in row.terms)
    return replace(term, aggregation=settings.aggregation) if is_alone and settings.aggregation else term


def _refuse_overrides(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    """What tells how own completions are weighed has no effect where none are."""
    for name in (*_SLOTS, *READ_BY):
        if getattr(settings, name) is not None and (name != "aggregation" or not algorithm.terms):
            raise SettingsError(
                f"algorithm.{name} has no effect: {algorithm.name} takes no ratio of its completions to an older policy"
            )


def _refuse_unread(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    """Settings of ratios, of credit and of sampling where there is none."""
    has_ratio = any(term.rows != "expert" for term in algorithm.terms)
    reasons = {
        "takes no ratio of its completions to an older policy": () if has_ratio else _RATIO_SETTINGS,
        "makes pairs of rewards": () if algorithm.preference is None else _CREDIT_SETTINGS,
        "trains on completions that the data gives": () if algorithm.samples else _CREDIT_SETTINGS + _SAMPLE_SETTINGS,
    }
    for reason, names in reasons.items():
        for name in names:
            if _is_set(settings, name):
                raise SettingsError(f"algorithm.{name} has no effect: {algorithm.name} {reason}")
    if algorithm.preference is not None and algorithm.kl.coefficient > 0:
        raise SettingsError(
            f"algorithm.kl_coefficient must be 0 for {algorithm.name}, got {algorithm.kl.coefficient:g}: what holds it "
            "to the reference is part of its losses"
        )


def _correction(row: Algorithm, settings: AlgorithmSettings) -> Correction:
    kind = settings.correction or row.correction.kind
    low, high = _CORRECTION_BOUNDS.get(kind, (row.correction.low, row.correction.high))
    return Correction(
        kind=kind,
        level="token" if settings.correction_level == "token" else _CORRECTION_LEVELS[settings.correction_reduction],
        cap=row.correction.cap if settings.correction_cap is None else settings.correction_cap,
        low=low if settings.correction_low is None else settings.correction_low,
        high=high if settings.correction_high is None else settings.correction_high,
    )


def _refuse_term(term: Term, settings: AlgorithmSettings) -> None:
    if term.level != "token" and term.aggregation not in SEQUENCE_AGGREGATIONS:
        raise SettingsError(
            f"algorithm.aggregation must be sequence_mean or sequence_sum when level is {term.level} (the ratio is one "
            f"number per row), got {term.aggregation}; use level token for {term.aggregation}"
        )
    if term.level != "token" and term.surrogate in SINGLE_STEP_SURROGATES and term.gate not in RATIO_GATES:
        raise SettingsError(f"algorithm.level {term.level} has no effect: surrogate {term.surrogate} uses no ratio")
    for name, (slot, parts) in READ_BY.items():
        if term.rows == "expert":
            break  # a recipe changes the terms over own rows
        part = getattr(term, slot)
        if getattr(settings, name) is not None and part not in parts and not callable(part):
            raise SettingsError(
                f"algorithm.{name} has no effect with {slot} {part}; it is read by {slot} " + " or ".join(sorted(parts))
            )
    _refuse_bounds(term)


def _refuse_old_source(before: Term, term: Term, settings: AlgorithmSettings) -> None:
    if settings.old_source != "behaviour" or term.rows == "expert":
        return
    if before.anchor == "behaviour":
        raise SettingsError(
            "algorithm.old_source has no effect: this algorithm's ratio is to the behaviour policy anyway"
        )
    is_read = term.gate in ANCHOR_GATES or term.regularizer in ("squared_log_ratio", "absolute_log_ratio")
    if term.surrogate in ("logprob", "exp_advantage") and not is_read:
        raise SettingsError(
            f"algorithm.old_source has no effect: surrogate {term.surrogate} uses no ratio; use correction none to "
            "leave off-policy rows uncorrected"
        )


def _refuse_bounds(term: Term) -> None:
    if term.surrogate == "clipped" and term.dual_clip is not None and term.dual_clip <= 1 + term.clip_high:
        raise SettingsError(
            f"algorithm.dual_clip must be above 1 + clip_high = {1 + term.clip_high:g}, got {term.dual_clip:g}: it "
            "would bound tokens that the clip leaves alone"
        )
    if term.gate == "ring" and (term.gate_low_outer < term.gate_low or term.gate_high_outer < term.gate_high):
        raise SettingsError("algorithm.gate ring needs gate_low_outer >= gate_low and gate_high_outer >= gate_high")
    if term.surrogate == "capped" and term.weight_floor >= term.weight_cap:
        raise SettingsError(
            f"algorithm.weight_floor must be below weight_cap, got {term.weight_floor:g} and {term.weight_cap:g}"
        )
    if term.gate == "covariance_band" and term.covariance_low >= term.covariance_high:
        raise SettingsError(
            "algorithm.covariance_low must be below covariance_high, got "
            f"{term.covariance_low:g} and {term.covariance_high:g}"
        )
    if term.gate in STEP_GATES_READ_ALL and term.regularizer_gate != "none":
        raise SettingsError(
            f"algorithm.regularizer_gate must be none with gate {term.gate}, got {term.regularizer_gate}: one of them "
            "may look at all tokens of the optimizer step"
        )
    if term.regularizer != "none" and term.regularizer_coefficient == 0:
        raise SettingsError(
            f"algorithm.regularizer {term.regularizer} has no effect: set regularizer_coefficient above 0"
        )


def _refuse_advantage(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    if callable(algorithm.advantage):
        return  # it may read any setting
    if algorithm.filled(settings).std_scope == "batch" and algorithm.advantage != "group_zscore":
        raise SettingsError(
            f"algorithm.std_scope batch has no effect: advantage {algorithm.advantage} divides by no standard deviation"
        )
    if algorithm.advantage == "selected" and not algorithm.selects:
        raise SettingsError(
            f"algorithm.advantage selected needs a loss over selected rows, {algorithm.name} has none: use name raft"
        )
    for name, readers in ADVANTAGE_READ_BY.items():
        if _is_set(settings, name) and algorithm.advantage not in readers:
            raise SettingsError(
                f"algorithm.{name} has no effect with advantage {algorithm.advantage}; it is read by "
                + " or ".join(readers)
            )
    is_tau_read = settings.baseline == "log_mean_exp" or any(term.tau is not None for term in algorithm.terms)
    if _is_set(settings, "tau") and not is_tau_read:
        raise SettingsError("algorithm.tau has no effect: neither baseline log_mean_exp nor a term reads it")
    for name in ("reward_clip_low", "reward_clip_high", "overlong_buffer_tokens"):
        if algorithm.advantage in REWARD_PARTS_READ and _is_set(settings, name):
            raise SettingsError(
                f"algorithm.{name} has no effect: advantage {algorithm.advantage} reads "
                f"{REWARD_PARTS_READ[algorithm.advantage]}, not their sum"
            )


def _refuse_rewards(settings: AlgorithmSettings) -> None:
    low, high = settings.reward_clip_low, settings.reward_clip_high
    if low is not None and high is not None and low >= high:
        raise SettingsError(f"algorithm.reward_clip_low must be below reward_clip_high, got {low:g} and {high:g}")


def _refuse_resampling(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    if algorithm.reward_kl and (not algorithm.samples or algorithm.preference is not None):
        raise SettingsError(f"algorithm.reward_kl_coefficient has no effect: {algorithm.name} compares or imitates")
    if algorithm.reward_kl and algorithm.advantage in REWARD_PARTS_READ:
        raise SettingsError(
            f"algorithm.reward_kl_coefficient has no effect: advantage {algorithm.advantage} reads "
            f"{REWARD_PARTS_READ[algorithm.advantage]}"
        )
    if algorithm.dynamic_sampling and not algorithm.samples:
        raise SettingsError(f"algorithm.dynamic_sampling has no effect: {algorithm.name} takes what the data gives")
    if algorithm.dynamic_sampling and algorithm.has_baselines:
        raise SettingsError(
            "algorithm.dynamic_sampling must be false with advantage greedy_baseline: only the prompts that a step "
            "begins with have a greedy completion, fresh ones would have none"
        )
    for name in ("filter_on", "max_resample_rounds", "duplicate_to_fill"):
        if _is_set(settings, name) and not algorithm.dynamic_sampling:
            raise SettingsError(f"algorithm.{name} has no effect without dynamic_sampling")


def _refuse_kl(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    kl = algorithm.kl
    if kl.coefficient > 0 and kl.estimator in REFUSED_KL_ESTIMATORS:
        raise SettingsError(
            f"algorithm.kl_estimator {kl.estimator} is refused in the loss: its expected gradient on-policy is zero; "
            "use k2 (KL of the policy to the reference) or k3"
        )
    if settings.kl_estimator is not None and kl.coefficient == 0:
        raise SettingsError("algorithm.kl_estimator has no effect: kl_coefficient is 0")
    if kl.target is not None and kl.coefficient == 0:
        raise SettingsError("algorithm.kl_target needs kl_coefficient above 0, from which it adapts")
    if kl.target is None and _is_set(settings, "kl_horizon"):
        raise SettingsError("algorithm.kl_horizon has no effect: kl_target is null")
    if kl.value_clamp is not None and kl.coefficient == 0:
        raise SettingsError("algorithm.kl_value_clamp has no effect: kl_coefficient is 0")
    if kl.importance and kl.coefficient == 0:
        raise SettingsError("algorithm.kl_importance has no effect: kl_coefficient is 0")
    if kl.importance and kl.estimator != "k3":
        raise SettingsError(
            f"algorithm.kl_importance weighs k3, got kl_estimator {kl.estimator}: the weighted gradient of the others "
            "is of no divergence"
        )


def _refuse_correction(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    correction = algorithm.correction
    ratios = [term for term in algorithm.terms if term.rows != "expert"]
    is_anchored = bool(ratios) and all(term.anchor == "behaviour" for term in ratios)
    if is_anchored and settings.correction not in (None, "none"):
        raise SettingsError(
            f"algorithm.correction {settings.correction} has no effect: the ratio is to the behaviour policy itself"
        )
    for name, kinds in _CORRECTION_READERS.items():
        if _is_set(settings, name) and correction.kind not in kinds:
            raise SettingsError(f"algorithm.{name} has no effect with correction {correction.kind}")
    if settings.correction_reduction == "sum" and settings.correction_level == "token":
        raise SettingsError("algorithm.correction_reduction has no effect with correction_level token")
    if correction.kind in ("mask", "reject", "veto") and correction.low >= correction.high:
        raise SettingsError(
            f"algorithm.correction_low must be below correction_high, got {correction.low:g} and {correction.high:g}"
        )


def _is_set(settings: AlgorithmSettings, name: str) -> bool:
    return bool(getattr(settings, name) != type(settings).model_fields[name].default)


def check(algorithm: Algorithm, training: TrainingSettings) -> None:
    """SettingsError when `training` asks for what the algorithm cannot do."""
    if training.mini_batches * training.epochs == 1:
        return
    for term in algorithm.terms:
        has_pull = term.surrogate not in SINGLE_STEP_SURROGATES or term.gate in RATIO_GATES
        if term.rows != "expert" and not has_pull:
            raise SettingsError(
                f"surrogate {term.surrogate} without a gate has no trust region, so training.mini_batches x "
                f"training.epochs must be 1, got {training.mini_batches} x {training.epochs}; use surrogate clipped"
            )
