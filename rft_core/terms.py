"""What an algorithm is made of: terms, KL, correction, and the row that joins them. Imports no torch.

Names in a row are keys of the tables in `losses`, `surrogates`, `gates` and `advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft_core.mixtures import ExpertShare
from rft_core.preference_options import Preference

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.losses import Denominators, LossBatch, LossParts

# They compare members of a group: a group of one, or of equal rewards, has no signal and gets exactly 0.
GROUP_ESTIMATORS = frozenset(
    {
        "group_zscore",
        "group_mean",
        "leave_one_out",
        "length_weighted_mean",
        "reward_over_mean",
        "pass_at_k",
        "per_component",
        "log_mean_exp",
        "group_mean_batch_whiten",
        "group_mean_rescaled",
    }
)

# They read a critic's value of each token.
VALUE_ADVANTAGES = frozenset({"gae"})

# They read something else than the rollout's reward; what shapes the reward has no effect on them.
REWARD_PARTS_READ = {"per_component": "components", "per_step_group_zscore": "step rewards"}

TEACHER_GAP = "teacher_gap"  # the advantage that is nothing but what a teacher says of each token

# A gate that looks at all rows of the optimizer step, and whether it reads rows of advantage 0 too.
STEP_GATES_READ_ALL = {"second_moment": False, "entropy_quantile": True, "covariance_band": True}


@dataclass(frozen=True)
class Term:
    """One policy loss: which rows, the ratio to what, and how token losses become a number.

    A gate drops a token's loss and leaves it in the denominators. What a part does not read has no effect.
    """

    rows: str = "own"  # own | expert | selected
    anchor: str = "old"  # old | behaviour
    level: str = "token"
    gate: str = "none"
    surrogate: str | Callable[..., Any] = "clipped"  # a function is a user's own
    aggregation: str = "token_mean"
    coefficient: float | Callable[[int], float] = 1.0  # a function takes the training step, from 1
    tau: float | None = None  # temperature of OPMD, which divides the term by 1 + tau
    regularizer: str = "none"  # added to every token's loss, gated ones too, and never corrected
    regularizer_coefficient: float = 0.0
    regularizer_gate: str = "none"  # none | a key of REGULARIZER_GATES: the tokens that the regularizer is added to
    covariance_top_share: float = 2e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    log_ratio_bound: float = 0.4  # level sequence_geometric_clipped
    weight_floor: float = 0.0  # surrogate capped: absolute bounds of the ratio
    weight_cap: float = 5.0
    soft_gate_positive: float = 1.0  # surrogate soft_gate: its steepness where A > 0
    soft_gate_negative: float = 1.05
    taper_threshold: float = 0.0
    advantage_temperature: float = 1.0  # surrogate exp_advantage
    gamma_shape_positive: float = 2.0  # surrogate gamma: k and lambda where A >= 0, and where A < 0
    gamma_rate_positive: float = 3.0
    gamma_shape_negative: float = 3.0
    gamma_rate_negative: float = 2.0
    gate_low: float = 0.2
    gate_high: float = 0.2
    gate_low_outer: float = 0.6
    gate_high_outer: float = 2.0
    second_moment_limit: float = 0.04
    entropy_quantile: float = 0.8
    off_policy_limit: float = 1.0  # gate off_policy_sequence: largest mean of behaviour - current, in nats
    divergence_limit: float = 0.2  # gates binary_tv and binary_kl
    covariance_low: float = 1.0  # gate covariance_band
    covariance_high: float = 5.0
    covariance_share: float = 2e-4

    def coefficient_at(self, step: int) -> float:
        coefficient = self.coefficient(step) if callable(self.coefficient) else self.coefficient
        return coefficient if self.tau is None else coefficient / (1 + self.tau)

    @property
    def step_gate(self) -> str | None:
        """What looks at all tokens of the optimizer step, to gate the loss or the regularizer: one at most."""
        if self.gate in STEP_GATES_READ_ALL:
            return self.gate
        return None if self.regularizer_gate == "none" else self.regularizer_gate


@dataclass(frozen=True)
class Kl:
    """KL to the reference policy in the loss. It takes rows and aggregation of the first term, ungated, uncorrected."""

    coefficient: float = 0.0
    estimator: str = "k3"
    importance: bool = False
    value_clamp: float | None = None  # largest |estimate| of a token
    target: float | None = None  # nats a token; given, the coefficient adapts after each update
    horizon: int = 10000  # rollouts over which it does


@dataclass(frozen=True)
class AdaptiveEntropy:
    """The entropy bonus's coefficient takes a step of `delta` towards `target` nats a token after each update."""

    target: float
    delta: float = 0.005
    largest: float = 1.0


@dataclass(frozen=True)
class Correction:
    """Importance weight of off-policy rows. It multiplies the policy loss only and carries no gradient."""

    kind: str = "truncate"
    level: str = "token"  # token, or a level of the whole row
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0


NO_CORRECTION = Correction(kind="none")


@dataclass(frozen=True)
class ValueTerm:
    """Loss of a critic: token mean of half a squared error to the returns, over the rows of every policy term."""

    clip: float | None = 0.2  # the value moves so far from that before the update; null lets it go
    coefficient: float = 1.0  # beside the policy loss, where both are one loss


@dataclass(frozen=True)
class Distillation:
    """What is learnt from a teacher: by credit for each token, or by the distance of whole distributions.

    `teacher_gap` x (log p of the teacher - old) is added to the advantage of own tokens. `coefficient` x divergence is
    added to the loss of all trained tokens, own and given alike, as their mean.
    """

    teacher_gap: float = 0.0
    coefficient: float = 0.0
    beta: float = 0.5  # 0: KL(teacher | policy), 1: KL(policy | teacher), between: of both to their mixture
    top_k: int | None = None  # of the teacher; the rest is one class

    @property
    def needs_teacher(self) -> bool:
        return self.teacher_gap > 0 or self.coefficient > 0


@dataclass(frozen=True)
class Algorithm:
    """A row of ALGORITHMS, with a recipe's overrides once it is resolved.

    `records` are those of its data: prompts, whose completions the policy samples, or completions that are given.
    """

    name: str
    source: str
    advantage: str | Callable[..., Any]  # a function is a user's own
    terms: tuple[Term, ...]
    kl: Kl = field(default_factory=Kl)
    entropy_coefficient: float = 0.0
    adaptive_entropy: AdaptiveEntropy | None = None
    correction: Correction = field(default_factory=Correction)
    records: tuple[str, ...] = ("prompts",)
    preference: Preference | None = None
    distillation: Distillation = field(default_factory=Distillation)
    reward_kl: float = 0.0  # times old - reference, per token, is taken from the reward
    dynamic_sampling: bool = False  # groups without signal are replaced by those of fresh prompts
    value: ValueTerm | None = None  # what trains a critic; given by the recipe's section `critic`
    bootstraps: bool = False  # the value behind a truncated completion stands for the rewards that were cut off
    head: str = "causal"  # of the model that is trained: a key of score_policy.POLICIES
    positions: str = "tokens"  # which tokens of a completion are trained: a key of train_rows.POSITIONS
    expert_share: ExpertShare | None = None  # of a mixture: weighs the terms over expert rows against the others
    # Settings of the advantage that the row sets where the recipe leaves them null.
    advantage_settings: tuple[tuple[str, Any], ...] = ()

    @property
    def compares_groups(self) -> bool:
        if callable(self.advantage):
            return bool(getattr(self.advantage, "compares_groups", False))
        return self.advantage in GROUP_ESTIMATORS

    @property
    def has_baselines(self) -> bool:
        """Whether each prompt needs a greedy completion beside the sampled ones."""
        return self.advantage == "greedy_baseline"

    @property
    def credit_scorers(self) -> tuple[str, ...]:
        """Whose values of each token credit needs before it is assigned: scorers of record token_scores."""
        others = ("reference",) * bool(self.reward_kl) + ("teacher",) * bool(self.distillation.teacher_gap)
        of_critic = ("critic", *(("critic_after",) if self.bootstraps else ())) if self.needs_critic else ()
        return (("old", *others) if others else ()) + of_critic

    @property
    def needs_critic(self) -> bool:
        """Whether credit reads values of states, by a critic that is trained beside the policy."""
        return self.advantage in VALUE_ADVANTAGES

    @property
    def reads_rewards(self) -> bool:
        """Whether a reward decides anything: else a rollout without one is as good as any."""
        return self.advantage != TEACHER_GAP and (bool(self.terms) or self.preference is not None)

    @property
    def samples(self) -> bool:
        """Whether the policy writes the completions that it is trained on."""
        return "prompts" in self.records

    @property
    def takes_given(self) -> bool:
        """Whether completions that the data set gives are trained on."""
        return not self.samples or any(term.rows == "expert" for term in self.terms)

    @property
    def takes_experts(self) -> bool:
        """Whether completions that a second data set gives are trained on beside sampled ones."""
        return self.samples and any(term.rows == "expert" for term in self.terms)

    @property
    def selects(self) -> bool:
        """Whether of the sampled completions only those of credit above 0 are trained on."""
        return any(term.rows == "selected" for term in self.terms)

    def coefficient_of(self, term: Term, step: int) -> float:
        """The weight of a term's loss in a training step, from 1; in a mixture also by whose rows it takes."""
        coefficient = term.coefficient_at(step)
        if self.expert_share is None:
            return coefficient
        share = self.expert_share.at(step)
        return coefficient * (share if term.rows == "expert" else 1.0 - share)

    @property
    def is_measured_by_margin(self) -> bool:
        """Whether held-out completions are judged by their likelihood against that of a reference model, also where
        the loss takes none."""
        return self.preference is not None and self.head == "causal" and not self.samples

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0 or (self.preference is not None and self.preference.needs_reference)

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient > 0 or self.adaptive_entropy is not None

    @property
    def needs_old(self) -> bool:
        """Whether old logprobs are read: a term anchored at the behaviour policy alone does without, and given rows
        were sampled by no policy before the update."""
        return self.kl.importance or any(term.anchor == "old" and term.rows != "expert" for term in self.terms)

    @property
    def step_gate(self) -> Term | None:
        """The term whose gate looks at the whole optimizer step, if there is one."""
        return next((term for term in self.terms if term.step_gate is not None), None)

    def needs_all_rows(self) -> bool:
        """Whether rows with advantage 0 need a forward pass: something else than the policy loss reads them."""
        is_read = any(
            term.regularizer != "none" or STEP_GATES_READ_ALL.get(term.gate, False) or callable(term.surrogate)
            for term in self.terms
        )
        has_other_loss = self.needs_critic or self.distillation.coefficient > 0
        return is_read or self.needs_reference or self.needs_entropy_gradient or has_other_loss

    def filled(self, settings: AlgorithmSettings) -> AlgorithmSettings:
        """The settings that the row's advantage reads, with what the row says where the recipe says nothing."""
        null = {name: value for name, value in self.advantage_settings if getattr(settings, name) is None}
        return settings.model_copy(update=null)

    def loss(self, batch: LossBatch, denominators: Denominators, step: int) -> LossParts:
        """Loss of one micro-batch, divided by the denominators of the optimizer step. `step` counts from 1."""
        from rft_core.objective import loss_parts  # torch is loaded here, not when settings are checked

        return loss_parts(self, batch, denominators, step)


@dataclass(frozen=True)
class UserParts:
    """What a recipe's paths name; None where it names nothing."""

    row: Algorithm | None = None
    advantage: Callable[..., Any] | None = None
    surrogate: Callable[..., Any] | None = None
    identity: dict[str, Any] = field(default_factory=dict)  # of the code, by setting
