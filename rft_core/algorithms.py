"""ALGORITHMS: one row per algorithm, composed of parts named in `advantages` and `losses`. Imports no torch.

The update calls `Algorithm.loss` and knows no names. A new algorithm is a row here; a new part is a function and its
name in one of the tables of `losses` or `advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rft_core.errors import SettingsError
from rft_core.preference_options import Preference, resolve_preference

if TYPE_CHECKING:
    from rft_core.config import AlgorithmSettings, TrainingSettings
    from rft_core.losses import Denominators, LossBatch, LossParts


@dataclass(frozen=True)
class Term:
    """One policy loss: which rows, the ratio to what, and how token losses become a number.

    A gate drops a token's loss and leaves it in the denominators. Names are keys of the tables in `losses`.
    """

    rows: str = "own"  # own | expert | selected
    anchor: str = "old"  # old | behaviour
    level: str = "token"
    gate: str = "none"
    surrogate: str = "clipped"
    aggregation: str = "token_mean"
    coefficient: float | Callable[[int], float] = 1.0  # a function takes the training step, from 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    gate_low: float = 0.2
    gate_high: float = 0.2
    gate_low_outer: float = 0.6
    gate_high_outer: float = 2.0

    def coefficient_at(self, step: int) -> float:
        return self.coefficient(step) if callable(self.coefficient) else self.coefficient


@dataclass(frozen=True)
class Kl:
    """KL to the reference policy in the loss. It takes rows and aggregation of the first term, ungated, uncorrected."""

    coefficient: float = 0.0
    estimator: str = "k3"
    importance: bool = False


@dataclass(frozen=True)
class Correction:
    """Importance weight of off-policy rows. It multiplies the policy loss only and carries no gradient."""

    kind: str = "truncate"
    level: str = "token"  # token, or a level of the whole row
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0


@dataclass(frozen=True)
class Algorithm:
    """A row of ALGORITHMS, with a recipe's overrides once it is resolved.

    `records` are those of its data: prompts, whose completions the policy samples, or completions that are given.
    """

    name: str
    source: str
    advantage: str
    terms: tuple[Term, ...]
    kl: Kl = field(default_factory=Kl)
    entropy_coefficient: float = 0.0
    correction: Correction = field(default_factory=Correction)
    records: tuple[str, ...] = ("prompts",)
    preference: Preference | None = None
    head: str = "causal"  # of the model that is trained: a key of score_policy.POLICIES
    positions: str = "tokens"  # which tokens of a completion are trained: a key of train_rows.POSITIONS

    @property
    def samples(self) -> bool:
        """Whether the policy writes the completions that it is trained on."""
        return "prompts" in self.records

    @property
    def takes_given(self) -> bool:
        """Whether completions that the data set gives are trained on."""
        return not self.samples or any(term.rows == "expert" for term in self.terms)

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0 or (self.preference is not None and self.preference.needs_reference)

    @property
    def has_ratio(self) -> bool:
        """Whether a loss term reads the ratio to the policy before the update; given rows were sampled by none."""
        return any(term.rows != "expert" for term in self.terms)

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient > 0

    def needs_all_rows(self) -> bool:
        """Whether rows with advantage 0 need a forward pass: something else than the policy loss reads them."""
        return self.needs_reference or self.needs_entropy_gradient

    def loss(self, batch: LossBatch, denominators: Denominators, step: int) -> LossParts:
        """Loss of one micro-batch, divided by the denominators of the optimizer step. `step` counts from 1."""
        from rft_core.objective import loss_parts  # torch is loaded here, not when settings are checked

        return loss_parts(self, batch, denominators, step)


# Surrogates without any pull back to the anchor: after the first optimizer step their gradient is plainly wrong.
SINGLE_STEP_SURROGATES = frozenset({"logprob", "probability_weighted", "logistic", "log_ratio"})

# A ratio that is one number per row must be averaged per row, else long rows weigh more than the ratio says.
SEQUENCE_AGGREGATIONS = frozenset({"sequence_mean", "sequence_sum"})

REFUSED_KL_ESTIMATORS = frozenset({"k1"})


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The row of ALGORITHMS with the settings' overrides; SettingsError, with the reason, for what makes no sense."""
    if settings.name not in ALGORITHMS:
        raise SettingsError(f"algorithm.name must be one of {sorted(ALGORITHMS)}, got {settings.name!r}")
    row = ALGORITHMS[settings.name]
    overrides = {name: getattr(settings, name) for name in _ROW_OVERRIDES}
    changes = {name: value for name, value in overrides.items() if value is not None}
    changes |= {name: getattr(settings, name) for name in _GATE_BOUNDS}
    level = settings.correction_level
    algorithm = replace(
        row,
        advantage=settings.advantage or row.advantage,
        terms=tuple(
            replace(term, **changes) if term.rows == "own" else _given_term(term, settings) for term in row.terms
        ),
        kl=Kl(settings.kl_coefficient, settings.kl_estimator, settings.kl_importance),
        entropy_coefficient=settings.entropy_coefficient,
        correction=Correction(
            kind=settings.correction,
            level="token" if level == "token" else _CORRECTION_LEVELS[settings.correction_reduction],
            cap=settings.correction_cap,
            low=settings.correction_low,
            high=settings.correction_high,
        ),
        preference=resolve_preference(row.preference, row.name, settings.preference),
    )
    for term in algorithm.terms:
        _refuse_term(term, settings)
    if not algorithm.has_ratio:
        _refuse_term_overrides(algorithm, overrides)
    _refuse_unread(algorithm, settings)
    _refuse_rest(algorithm, settings)
    return algorithm


def _refuse_term_overrides(algorithm: Algorithm, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        if value is not None and (name != "aggregation" or not algorithm.terms):
            raise SettingsError(
                f"algorithm.{name} has no effect: {algorithm.name} takes no ratio of its completions to an older policy"
            )


def _refuse_unread(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    """Credit and corrections that only sampled completions have, changed where none are compared."""
    reasons = {
        "takes no ratio of its completions to an older policy": () if algorithm.has_ratio else _RATIO_SETTINGS,
        "makes pairs of rewards": _CREDIT_SETTINGS if algorithm.preference is not None else (),
        "trains on completions that the data gives": () if algorithm.samples else _CREDIT_SETTINGS + _SAMPLE_SETTINGS,
    }
    for reason, names in reasons.items():
        for name in names:
            if getattr(settings, name) != type(settings).model_fields[name].default:
                raise SettingsError(f"algorithm.{name} has no effect: {algorithm.name} {reason}")
    if algorithm.preference is not None and algorithm.kl.coefficient > 0:
        raise SettingsError(
            f"algorithm.kl_coefficient must be 0 for {algorithm.name}, got {algorithm.kl.coefficient:g}: what holds it "
            "to the reference is part of its losses"
        )


def _given_term(term: Term, settings: AlgorithmSettings) -> Term:
    """A term over given rows takes another aggregation where no term over own rows does."""
    is_alone = ALGORITHMS[settings.name].has_ratio is False
    return replace(term, aggregation=settings.aggregation) if is_alone and settings.aggregation else term


def _refuse_term(term: Term, settings: AlgorithmSettings) -> None:
    if term.level != "token" and term.aggregation not in SEQUENCE_AGGREGATIONS:
        raise SettingsError(
            f"algorithm.aggregation must be sequence_mean or sequence_sum when level is {term.level} (the ratio is one "
            f"number per row), got {term.aggregation}; use level token for {term.aggregation}"
        )
    if term.level != "token" and term.surrogate in SINGLE_STEP_SURROGATES and term.gate == "none":
        raise SettingsError(f"algorithm.level {term.level} has no effect: surrogate {term.surrogate} uses no ratio")
    if term.surrogate != "clipped" and term.rows == "own":
        for name in ("clip_low", "clip_high", "dual_clip"):
            if getattr(settings, name) is not None:
                raise SettingsError(f"algorithm.{name} has no effect: surrogate {term.surrogate} does not clip")
    elif term.dual_clip is not None and term.dual_clip <= 1 + term.clip_high:
        raise SettingsError(
            f"algorithm.dual_clip must be above 1 + clip_high = {1 + term.clip_high:g}, got {term.dual_clip:g}: it "
            "would bound tokens that the clip leaves alone"
        )
    if term.gate == "ring" and (term.gate_low_outer < term.gate_low or term.gate_high_outer < term.gate_high):
        raise SettingsError("algorithm.gate ring needs gate_low_outer >= gate_low and gate_high_outer >= gate_high")
    for name in _GATE_BOUNDS:
        is_used = term.gate != "none" and (term.gate == "ring" or not name.endswith("outer"))
        if not is_used and getattr(settings, name) != type(settings).model_fields[name].default:
            raise SettingsError(f"algorithm.{name} has no effect with gate {term.gate}")


def _refuse_rest(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    if settings.std_scope == "batch" and algorithm.advantage != "group_zscore":
        raise SettingsError(
            f"algorithm.std_scope batch has no effect: advantage {algorithm.advantage} divides by no standard deviation"
        )
    kl = algorithm.kl
    if kl.coefficient > 0 and kl.estimator in REFUSED_KL_ESTIMATORS:
        raise SettingsError(
            f"algorithm.kl_estimator {kl.estimator} is refused in the loss: its expected gradient on-policy is zero; "
            "use k2 (KL of the policy to the reference) or k3"
        )
    if kl.importance and kl.coefficient == 0:
        raise SettingsError("algorithm.kl_importance has no effect: kl_coefficient is 0")
    if kl.importance and kl.estimator != "k3":
        raise SettingsError(
            f"algorithm.kl_importance weighs k3, got kl_estimator {kl.estimator}: the weighted gradient of the others "
            "is of no divergence"
        )
    correction = algorithm.correction
    if correction.kind == "mask" and correction.low >= correction.high:
        raise SettingsError(
            f"algorithm.correction_low must be below correction_high, got {correction.low:g} and {correction.high:g}"
        )
    low, high = settings.reward_clip_low, settings.reward_clip_high
    if low is not None and high is not None and low >= high:
        raise SettingsError(f"algorithm.reward_clip_low must be below reward_clip_high, got {low:g} and {high:g}")


def check(algorithm: Algorithm, training: TrainingSettings) -> None:
    """SettingsError when `training` asks for what the algorithm cannot do."""
    optimizer_steps = training.mini_batches * training.epochs
    for term in algorithm.terms:
        if (
            optimizer_steps > 1
            and term.rows != "expert"
            and term.surrogate in SINGLE_STEP_SURROGATES
            and term.gate == "none"
        ):
            raise SettingsError(
                f"surrogate {term.surrogate} without a gate has no trust region, so training.mini_batches x "
                f"training.epochs must be 1, got {training.mini_batches} x {training.epochs}; use surrogate clipped"
            )


_ROW_OVERRIDES = ("level", "gate", "surrogate", "aggregation", "clip_low", "clip_high", "dual_clip")

_GATE_BOUNDS = ("gate_low", "gate_high", "gate_low_outer", "gate_high_outer")

# Which settings are read by what.
_RATIO_SETTINGS = (
    "correction",
    "correction_cap",
    "correction_low",
    "correction_high",
    "correction_level",
    "correction_reduction",
    "kl_importance",
)
_CREDIT_SETTINGS = ("advantage", "std_scope", "std_ddof", "std_epsilon", "spread_floor")
_SAMPLE_SETTINGS = ("truncated", "min_group_size", "overlong_buffer_tokens", "max_staleness")

_CORRECTION_LEVELS = {"mean": "sequence_geometric", "sum": "sequence_product"}


def _preference(
    name: str, source: str, losses: tuple[tuple[str, float], ...] = (), unit: str = "pairs", **settings: Any
) -> Algorithm:
    """A row for given pairs or labelled completions. Without `losses` it is the loss of that name alone."""
    preference = Preference(losses or ((name, 1.0),), unit, **settings)
    record = "preferences" if unit == "pairs" else "labelled"
    return Algorithm(name, source, "none", (), records=(record,), preference=preference)


ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="grpo",
            source="DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; the paper's KL coefficient is 0.04, ours 0",
            advantage="group_zscore",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean"),),
        ),
        Algorithm(
            name="dr_grpo",
            source="Dr. GRPO, arXiv 2503.20783, section 3.2: neither standard deviation nor row length divides",
            advantage="group_mean",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="constant_length"),),
        ),
        Algorithm(
            name="sft",
            source="maximum likelihood of given completions; a trajectory's reward weighs its tokens",
            advantage="none",
            terms=(Term(rows="expert", surrogate="logprob", aggregation="token_mean"),),
            records=("demonstrations", "trajectories"),
        ),
        Algorithm(
            name="dft",
            source="Dynamic fine-tuning, arXiv 2508.05629: each token's gradient times its probability",
            advantage="none",
            terms=(Term(rows="expert", surrogate="probability_weighted", aggregation="token_mean"),),
            records=("demonstrations", "trajectories"),
        ),
        _preference("dpo", "arXiv 2305.18290, eq. 7"),
        _preference("dpo_norm", "dpo on averages over tokens (Tulu 3, arXiv 2411.15124)"),
        _preference("rpo", "arXiv 2404.19733: dpo and the NLL of chosen", (("dpo", 1.0), ("nll", 1.0))),
        _preference("ipo", "arXiv 2310.12036, eq. 17, on averages over tokens"),
        _preference("hinge", "SLiC, arXiv 2305.10425, on log-ratios"),
        _preference("robust", "arXiv 2403.00409", label_smoothing=0.1),
        _preference("exo", "arXiv 2402.00856", label_smoothing=1e-3),
        _preference("nca", "arXiv 2402.05369"),
        _preference("sppo", "arXiv 2405.00675"),
        _preference("apo_zero", "arXiv 2408.06266"),
        _preference("apo_down", "arXiv 2408.06266"),
        _preference("aot", "arXiv 2406.05882"),
        _preference("aot_unpaired", "arXiv 2406.05882"),
        _preference("discopop", "arXiv 2406.08414"),
        _preference("orpo", "arXiv 2403.07691"),
        _preference("cpo", "arXiv 2401.08417"),
        _preference("simpo", "arXiv 2405.14734, eq. 6", beta=2.5, gamma=1.375),
        _preference(
            "mpo",
            "arXiv 2411.10442: dpo, bco without shift and the NLL of chosen",
            (("dpo", 0.8), ("bco_pair", 0.2), ("nll", 1.0)),
            running_shift=False,
        ),
        _preference("kto", "arXiv 2402.01306, eq. 8", unit="labels"),
        _preference("bco", "arXiv 2404.04656", unit="labels"),
        _preference("apo_zero_unpaired", "arXiv 2408.06266", unit="labels"),
        Algorithm(
            name="reward_model",
            source="Bradley-Terry, arXiv 2203.02155, eq. 1; margins arXiv 2307.09288; centring arXiv 2312.09244",
            advantage="none",
            terms=(),
            records=("preferences",),
            preference=Preference((("bradley_terry", 1.0),), beta=1.0),
            head="sequence_labels",
            positions="last",
        ),
        Algorithm(
            name="process_reward_model",
            source="cross-entropy of each step's label at the step's end (arXiv 2305.20050)",
            advantage="none",
            terms=(Term(rows="expert", surrogate="logistic", aggregation="token_mean"),),
            records=("stepwise",),
            head="token_labels",
            positions="steps",
        ),
        Algorithm(
            name="online_dpo",
            source="arXiv 2402.04792: the best of a scored group against its worst; ties make no pair",
            advantage="none",
            terms=(),
            preference=Preference((("dpo", 1.0),)),
        ),
    )
}
