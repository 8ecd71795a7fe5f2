"""Settings of the algorithm: a row of ALGORITHMS by name, and what a recipe changes in it. Importable without torch.

A setting that is null takes the row's value. One that nothing would read is refused, with the reason, by `resolve`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rft_core.algorithm_names import AdvantageName, AlgorithmName
from rft_core.distillation_settings import DistillationSettings
from rft_core.preference_settings import PreferenceSettings
from rft_core.settings import NOT_BLANK, Settings

CUSTOM = {"path": "name", "advantage_path": "advantage", "surrogate_path": "surrogate"}  # path -> what it belongs to


class AlgorithmSettings(Settings):
    name: AlgorithmName = Field(
        "grpo", description="A row of ALGORITHMS; its defaults fill what is null here. custom takes `path`."
    )
    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="name custom: module.function or FILE.py:function that gives an Algorithm.",
        json_schema_extra={"execution": True},
    )

    # Advantages
    advantage: AdvantageName | None = Field(
        None, description="Overrides the row's advantage. custom takes `advantage_path`."
    )
    advantage_path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="advantage custom: module.function or FILE.py:function of (credits, settings).",
        json_schema_extra={"execution": True},
    )
    std_scope: Literal["group", "batch"] | None = Field(
        None, description="group_zscore: whose standard deviation divides; null takes the row's, group with most."
    )
    std_ddof: int = Field(1, ge=0, le=1, description="Degrees of freedom taken from the standard deviation.")
    std_epsilon: float = Field(1e-6, ge=0, description="Added to the standard deviation.")
    spread_floor: float = Field(
        1e-6, ge=0, description="A group whose rewards spread by at most this x max |R| carries no signal."
    )
    whiten_ddof: int = Field(
        1,
        ge=0,
        le=1,
        description="per_component, group_mean_batch_whiten, batch_whiten, gae: degrees of freedom taken from the "
        "variance over the step.",
    )
    pass_at_k_over_std: bool = Field(False, description="pass_at_k: divides by the group's standard deviation.")
    baseline: Literal["mean", "log_mean_exp"] = Field(
        "mean", description="log_mean_exp: the group's mean, or tau ln mean exp(R / tau)."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="batch_whiten, gae: discount of later tokens' rewards.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="gae: 1 trusts returns alone (less bias), 0 the next value alone (less variance)."
    )
    bootstrap_truncated: bool = Field(
        False,
        description="gae: a completion that was cut at max_completion_tokens goes on with the critic's value behind "
        "its last token; off, nothing follows it.",
    )
    tau: float = Field(1.0, gt=0, description="opmd: temperature of the baseline log_mean_exp, and of the loss.")
    baseline_shift: float = Field(
        -0.1, description="shifted_mean: added to the group's mean; below 0 it leans on successes."
    )
    drop: Literal["none", "balance"] = Field(
        "none",
        description="group_mean, group_zscore, leave_one_out: balance leaves out, by lot, as many rows below the "
        "group's mean as outnumber the others.",
    )

    select: Literal["best", "passing"] = Field(
        "best",
        description="raft: the best completion of each group (of equal ones the first) if it passes, or all that do.",
    )
    pass_threshold: float = Field(
        1.0,
        description="raft: a completion passes with a reward of at least this, after clip and shaping; a very low one "
        "lets the best of every group pass.",
    )

    # Mixtures
    expert_coefficient: float | None = Field(
        None,
        ge=0,
        le=1,
        description="mix, chord: mu, the weight of the loss over expert rows; that over own rows has 1 - mu. With a "
        "schedule the value that it ends at. null takes the row's, 0.1.",
    )
    expert_peak: float | None = Field(
        None, ge=0, le=1, description="mix, chord: the value of mu after the warm-up; null is expert_coefficient."
    )
    expert_warmup_steps: int | None = Field(
        None, ge=0, description="mix, chord: steps in which mu rises from 0 to expert_peak; null is none."
    )
    expert_decay_steps: int | None = Field(
        None,
        ge=0,
        description="mix, chord: steps, after those, in which mu goes from expert_peak to expert_coefficient by half a "
        "cosine; null is none.",
    )

    # The policy loss
    level: Literal["token", "sequence_geometric", "sequence_product", "sequence_geometric_clipped"] | None = Field(
        None, description="Overrides the level of the ratio."
    )
    log_ratio_bound: float | None = Field(
        None, gt=0, description="level sequence_geometric_clipped: log ratios of tokens are cut here, by the sign of A."
    )
    gate: (
        Literal[
            "none",
            "one_side",
            "two_side",
            "ring",
            "off_policy_sequence",
            "binary_tv",
            "binary_kl",
            "second_moment",
            "entropy_quantile",
            "covariance_band",
        ]
        | None
    ) = Field(None, description="Overrides the token gate.")
    gate_low: float | None = Field(None, ge=0, description="Gates of the ratio: lower half-width around 1.")
    gate_high: float | None = Field(None, ge=0, description="Gates of the ratio: upper half-width around 1.")
    gate_low_outer: float | None = Field(None, ge=0, description="Gate ring: outer lower half-width.")
    gate_high_outer: float | None = Field(None, ge=0, description="Gate ring: outer upper half-width.")
    off_policy_limit: float | None = Field(
        None, description="Gate off_policy_sequence: largest mean of behaviour - current, in nats, where A < 0."
    )
    divergence_limit: float | None = Field(
        None, ge=0, description="Gates binary_tv and binary_kl: largest divergence of a token's probability."
    )
    second_moment_limit: float | None = Field(
        None, ge=0, description="Gate second_moment: largest mean of squared log ratios of the tokens kept."
    )
    entropy_quantile: float | None = Field(
        None, ge=0, le=1, description="Gate entropy_quantile: tokens below this quantile of entropy are left out."
    )
    covariance_low: float | None = Field(None, description="Gate covariance_band: lower end of the band.")
    covariance_high: float | None = Field(None, description="Gate covariance_band: upper end of the band.")
    covariance_share: float | None = Field(
        None, gt=0, lt=1, description="Gate covariance_band: share of the trained tokens that is left out."
    )
    surrogate: (
        Literal[
            "clipped",
            "unclipped",
            "soft_gate",
            "logprob",
            "log_ratio",
            "ratio_logprob",
            "capped",
            "tapered",
            "exp_advantage",
            "gamma",
            "custom",
        ]
        | None
    ) = Field(None, description="Overrides the surrogate. custom takes `surrogate_path`.")
    surrogate_path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="surrogate custom: module.function or FILE.py:function of (tokens, term).",
        json_schema_extra={"execution": True},
    )
    clip_low: float | None = Field(None, ge=0, lt=1, description="Ratios below 1 - clip_low are clipped where A < 0.")
    clip_high: float | None = Field(None, ge=0, description="Ratios above 1 + clip_high are clipped where A > 0.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bounds the loss of tokens with A < 0 at -A x this; null is off."
    )
    soft_gate_positive: float | None = Field(None, gt=0, description="Surrogate soft_gate: steepness where A > 0.")
    soft_gate_negative: float | None = Field(None, gt=0, description="Surrogate soft_gate: steepness where A < 0.")
    weight_floor: float | None = Field(
        None, ge=0, description="Surrogate capped: smallest weight, an absolute bound of the ratio."
    )
    weight_cap: float | None = Field(
        None, gt=0, description="Surrogate capped: largest weight, an absolute bound (verl's epsilon is this - 1)."
    )
    taper_threshold: float | None = Field(
        None, description="Surrogate tapered: rows of a greater advantage keep weight 1."
    )
    advantage_temperature: float | None = Field(
        None, gt=0, description="Surrogate exp_advantage: the weight is exp(A / this)."
    )
    gamma_shape_positive: float | None = Field(None, ge=0, description="Surrogate gamma: k where A >= 0.")
    gamma_rate_positive: float | None = Field(None, ge=0, description="Surrogate gamma: lambda where A >= 0.")
    gamma_shape_negative: float | None = Field(None, ge=0, description="Surrogate gamma: k where A < 0.")
    gamma_rate_negative: float | None = Field(None, ge=0, description="Surrogate gamma: lambda where A < 0.")
    regularizer: Literal["none", "log_likelihood", "squared_log_ratio", "absolute_log_ratio"] | None = Field(
        None, description="Added to the loss of every token, gated ones too."
    )
    regularizer_gate: Literal["none", "covariance_top"] | None = Field(
        None,
        description="Which tokens the regularizer is added to: none takes all, covariance_top those whose logprob and "
        "credit go together most.",
    )
    covariance_top_share: float | None = Field(
        None, gt=0, lt=1, description="regularizer_gate covariance_top: share of the trained tokens, at least one."
    )
    regularizer_coefficient: float | None = Field(None, gt=0, description="Weight of the regularizer.")
    aggregation: (
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length", "prompt_mean", "token_sum"] | None
    ) = Field(None, description="Overrides the denominators.")

    # Other terms
    kl_coefficient: float | None = Field(
        None, ge=0, description="Weight of the KL term; 0 loads no reference model. null takes the row's, 0 with most."
    )
    kl_estimator: Literal["k2", "k3", "abs", "k2_gradient"] | None = Field(
        None,
        description="Estimator in the loss; null takes the row's, k3 with most. k1 is refused: its expected gradient "
        "is zero on-policy.",
    )
    kl_value_clamp: float | None = Field(
        None, gt=0, description="Bounds the KL estimate of a token on both sides (10 is verl's); null does not."
    )
    kl_importance: bool = Field(False, description="Multiplies the KL estimate by the ratio, for off-policy rows.")
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adapts kl_coefficient after each update so that the mean KL per token comes near this (0.1 is "
        "usual); null keeps it fixed.",
    )
    kl_horizon: int = Field(
        10000, ge=1, description="kl_target: rollouts over which the coefficient adapts; more is slower."
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="Adapts entropy_coefficient after each update by a step towards this mean entropy of a token, in "
        "nats; null keeps it fixed.",
    )
    entropy_delta: float = Field(0.005, gt=0, description="entropy_target: size of a step of the coefficient.")
    entropy_coefficient_max: float = Field(1.0, gt=0, description="entropy_target: the largest coefficient.")

    # Which rows
    truncated: Literal["train", "mask", "drop"] = Field(
        "train",
        description="Truncated completions: train on them, mask (kept in group statistics), or drop (not kept).",
    )
    min_group_size: int = Field(
        2,
        ge=1,
        description="Groups with fewer scored members are not trained. Without effect where the advantage compares no "
        "members (none).",
    )
    reward_clip_low: float | None = Field(None, description="Rewards are clipped from below before the baseline.")
    reward_clip_high: float | None = Field(None, description="Rewards are clipped from above before the baseline.")
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="Soft overlong penalty over the last tokens before max_completion_tokens; 0 is off."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Rows older than this many policy versions are not trained."
    )

    # Off-policy rows
    old_source: Literal["policy", "behaviour"] = Field(
        "policy",
        description="What the ratio is to: the trainer's logprobs from before the update, or those that the engine "
        "reported, which needs no extra pass and no correction.",
    )
    correction: Literal["none", "truncate", "mask", "reject", "veto"] | None = Field(
        None,
        description="Importance weight old / behaviour of off-policy rows: none, truncated, masked, kept or rejected "
        "unweighted (reject), or whole rows left out for one token (veto). null takes the row's, truncate with most.",
    )
    correct_engine: bool = Field(
        True,
        description="Correct rows of the very policy that is updated too, where an engine with code of its own (vllm) "
        "sampled them: its logprobs differ from the trainer's.",
    )
    correction_cap: float | None = Field(None, gt=0, description="truncate: largest weight; null is 2.")
    correction_low: float | None = Field(
        None, ge=0, description="mask, reject, veto: smallest ratio kept; null is 0.5, and 1e-4 for veto."
    )
    correction_high: float | None = Field(
        None, gt=0, description="mask, reject, veto: largest ratio kept; null is 5, and 100 for veto."
    )
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="sequence gives all tokens of a row one weight, from the log ratios of its trained tokens."
    )
    correction_reduction: Literal["mean", "sum"] = Field(
        "mean", description="correction_level sequence: mean or sum of the log ratios; a sum explodes with length."
    )
    reward_kl_coefficient: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL (k1) taken from the reward; null takes the row's.",
    )
    dynamic_sampling: bool | None = Field(
        None, description="Groups without signal are replaced by those of fresh prompts; null takes the row's."
    )
    filter_on: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="dynamic_sampling: the reward component whose spread is signal; null takes the reward itself.",
    )
    max_resample_rounds: int = Field(
        4,
        ge=0,
        le=99,
        description="dynamic_sampling: rounds of prompts_per_step fresh prompts at most.",
    )
    duplicate_to_fill: bool = Field(
        False,
        description="dynamic_sampling: where fewer than prompts_per_step groups carry signal, those that do count as "
        "if they had been duplicated, whole and as evenly as can be, until the step is full.",
    )
    preference: PreferenceSettings = Field(
        default_factory=PreferenceSettings, description="Of preference objectives; null takes the row's."
    )
    distillation: DistillationSettings = Field(
        default_factory=DistillationSettings, description="What is learnt from a teacher; null takes the row's."
    )

    @model_validator(mode="after")
    def _paths_fit(self) -> Self:
        for path, slot in CUSTOM.items():
            if (getattr(self, slot) == "custom") != (getattr(self, path) is not None):
                raise ValueError(
                    f"{path} (module.function or FILE.py:function) goes with {slot}: custom, got {slot}: "
                    f"{getattr(self, slot)} and {path}: {getattr(self, path)}"
                )
        return self

    def paths(self) -> dict[str, str]:
        """Where the user's own code is, by setting; empty without any."""
        return {path: getattr(self, path) for path in CUSTOM if getattr(self, path) is not None}
