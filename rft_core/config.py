"""Every setting of a recipe. Importable without torch.

One model is the recipe's schema, the flow's parameter, the command line's `--set` and the form in the UI. The settings
of data are in data/settings.py, those of rewards in rewards/settings.py.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rft_core.data.settings import DataSettings
from rft_core.rewards.settings import RewardSettings
from rft_core.settings import NOT_BLANK, Settings, execution

MIN_TEMPERATURE = 1e-3  # below, logits / temperature leave float32; 0 itself means greedy


class ModelSettings(Settings):
    path: str = Field(
        pattern=NOT_BLANK,
        description="A model folder, a name fetched with `rft fetch-model`, or a hub id. Its content enters the keys.",
        json_schema_extra={"execution": True},
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute; auto takes CUDA if present.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Compute type; master weights and optimizer state are float32 always. auto: bfloat16 where the "
        "hardware multiplies it natively, else float32. Resolved once, at the start of a run.",
    )
    chat_template: str | None = Field(
        None, pattern=NOT_BLANK, description="A Jinja chat template that replaces the tokenizer's own."
    )
    lora_rank: int = Field(0, ge=0, description="Rank of LoRA adapters; 0 trains all weights.")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA scale is alpha / rank.")
    lora_targets: list[Annotated[str, Field(pattern=NOT_BLANK)]] = Field(
        default_factory=lambda: ["all-linear"], min_length=1, description="Module names to adapt, or all-linear."
    )
    shared_prefix: bool = Field(
        True, description="Run a prompt once for all completions of its group, where the model allows it."
    )


class RolloutSettings(Settings):
    engine: Literal["transformers", "scripted", "none"] = Field(
        "transformers", description="Who generates. none: an offline run; asking it to generate is an error."
    )
    prompts_per_step: int = Field(8, ge=1, description="Prompt groups a step.")
    group_size: int = Field(8, ge=1, description="Completions per prompt.")
    max_completion_tokens: int = Field(256, ge=1, description="Completions are cut here (finish_reason length).")
    temperature: float = Field(
        1.0, ge=MIN_TEMPERATURE, description="Divides the logits before sampling and in every loss."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus sampling; below 1 the sampled distribution is truncated."
    )
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    block_groups: int = Field(
        4, ge=1, description="Groups per block: the unit of generation, commit and loss by crash."
    )
    batch_rows: int = Field(64, ge=1, description="Rows decoded at once inside a block.")
    ahead: int = Field(
        0, ge=0, le=8, description="Rollouts of step s come from policy version s - 1 - ahead; 0 is on-policy."
    )
    script: str | None = Field(
        None, pattern=NOT_BLANK, description="Completions for the scripted engine: a JSON file. For tests."
    )


class AlgorithmSettings(Settings):
    name: Literal["grpo", "dr_grpo"] = Field(
        "grpo", description="A row of ALGORITHMS; its defaults fill what is null here."
    )
    advantage: Literal["group_zscore", "group_mean", "leave_one_out", "none"] | None = Field(
        None, description="Overrides the row's advantage."
    )
    level: Literal["token", "sequence_geometric", "sequence_product"] | None = Field(
        None, description="Overrides the level of the ratio."
    )
    gate: Literal["none", "one_side", "two_side", "ring"] | None = Field(None, description="Overrides the token gate.")
    surrogate: Literal["clipped", "unclipped", "logprob", "log_ratio"] | None = Field(
        None, description="Overrides the surrogate."
    )
    aggregation: (
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length", "prompt_mean", "token_sum"] | None
    ) = Field(None, description="Overrides the denominators.")
    clip_low: float | None = Field(None, ge=0, lt=1, description="Ratios below 1 - clip_low are clipped where A < 0.")
    clip_high: float | None = Field(None, ge=0, description="Ratios above 1 + clip_high are clipped where A > 0.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bounds the loss of tokens with A < 0 at -A x this; null is off."
    )
    gate_low: float = Field(0.2, ge=0, description="Gates: lower half-width around ratio 1.")
    gate_high: float = Field(0.2, ge=0, description="Gates: upper half-width around ratio 1.")
    gate_low_outer: float = Field(0.6, ge=0, description="Gate ring: outer lower half-width.")
    gate_high_outer: float = Field(2.0, ge=0, description="Gate ring: outer upper half-width.")
    std_scope: Literal["group", "batch"] = Field("group", description="group_zscore: whose standard deviation divides.")
    std_ddof: int = Field(1, ge=0, le=1, description="Degrees of freedom taken from the standard deviation.")
    std_epsilon: float = Field(1e-6, ge=0, description="Added to the standard deviation.")
    spread_floor: float = Field(
        1e-6, ge=0, description="A group whose rewards spread by at most this x max |R| carries no signal."
    )
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL term; 0 loads no reference model.")
    kl_estimator: Literal["k2", "k3", "abs", "k2_gradient"] = Field(
        "k3", description="Estimator in the loss. k1 is refused: its expected gradient is zero on-policy."
    )
    kl_importance: bool = Field(False, description="Multiplies the KL estimate by the ratio, for off-policy rows.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    truncated: Literal["train", "mask", "drop"] = Field(
        "train",
        description="Truncated completions: train on them, mask (kept in group statistics), or drop (not kept).",
    )
    min_group_size: int = Field(2, ge=1, description="Groups with fewer scored members are not trained.")
    reward_clip_low: float | None = Field(None, description="Rewards are clipped from below before the baseline.")
    reward_clip_high: float | None = Field(None, description="Rewards are clipped from above before the baseline.")
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="Soft overlong penalty over the last tokens before max_completion_tokens; 0 is off."
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "truncate", description="Importance weight old / behaviour of off-policy rows: none, truncated, or masked."
    )
    correction_cap: float = Field(2.0, gt=0, description="truncate: largest weight.")
    correction_low: float = Field(0.5, ge=0, description="mask: smallest weight kept.")
    correction_high: float = Field(5.0, gt=0, description="mask: largest weight kept.")
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="sequence gives all tokens of a row one weight, from the log ratios of its trained tokens."
    )
    correction_reduction: Literal["mean", "sum"] = Field(
        "mean", description="correction_level sequence: mean or sum of the log ratios; a sum explodes with length."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Rows older than this many policy versions are not trained."
    )


class TrainingSettings(Settings):
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, x the peak.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second-moment decay.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per pass over a step's rows; groups stay whole.")
    epochs: int = Field(1, ge=1, description="Passes over a step's rows.")
    micro_batch_tokens: int = Field(
        1024,
        ge=1,
        description="Token budget of one forward and backward: higher is faster on a GPU and takes more "
        "memory; results change by rounding only.",
    )
    checkpoint_every: int | None = execution(
        None,
        ge=1,
        description="Full state every k steps; policies between are replayed. null: 10 for all weights on CPU, else 1.",
    )
    max_skipped_updates: int = execution(3, ge=1, description="So many non-finite updates in a row fail the run.")


class EvaluationSettings(Settings):
    every: int = Field(10, ge=0, description="Evaluate after every k steps, and at the start and end; 0 is never.")
    prompts: int | None = Field(None, ge=1, description="Held-out prompts to use; null takes all.")
    samples: int = Field(4, ge=0, description="Sampled completions per prompt; 0 leaves out the sampled metrics.")
    greedy: bool = Field(True, description="Also one greedy completion per prompt.")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="Of the sampled completions.")
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [4], description="Values of k for pass@k; at most `samples`."
    )
    correct_component: str | None = Field(
        None, description="Reward component that says correct (at least 1); null takes the first function."
    )

    @model_validator(mode="after")
    def _k_fits(self) -> Self:
        too_large = [k for k in self.pass_at if k > self.samples]
        if self.samples and too_large:
            raise ValueError(f"pass_at must be at most samples ({self.samples}), got {too_large[0]}")
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"values of pass_at must differ, got {self.pass_at}")
        if self.every and not self.samples and not self.greedy:
            raise ValueError("an evaluation needs samples above 0 or greedy: true; set every to 0 for none")
        return self


class RetentionSettings(Settings):
    """Checkpoints go by these rules during the run, tables only when `rft prune` names the run."""

    keep_last: int = execution(
        2, ge=1, description="Newest checkpoints that keep their data; `rft prune` keeps the tables of their steps too."
    )
    keep_every: int | None = execution(
        None, ge=1, description="Checkpoints of steps that this divides keep theirs too; null adds none."
    )


class ExecutionSettings(Settings):
    threads: int | None = execution(
        None, ge=1, description="CPU threads of torch; null takes torch's own choice, all cores. Part of the bits."
    )
    retries: int = execution(3, ge=0, description="Retries of a stage after a transient error.")
    retry_delay_seconds: float = execution(2.0, ge=0, description="First delay; doubles each time, with jitter.")
    score_beside_generation: bool = execution(
        True,
        description="Score committed blocks while the next are generated, where rewards work in other processes "
        "or over the network.",
    )


class Recipe(Settings):
    """A whole run. `rft config show` prints it with all defaults."""

    seed: int = Field(0, ge=0, description="Seed of everything random in the run.", json_schema_extra={"position": 0})
    steps: int = Field(ge=0, description="Passes rollouts -> update.", json_schema_extra={"position": 1})
    model: ModelSettings = Field(description="The model to train.", json_schema_extra={"position": 2})
    data: DataSettings = Field(description="Where prompts come from.", json_schema_extra={"position": 3})
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, json_schema_extra={"position": 4})
    reward: RewardSettings = Field(description="What is rewarded.", json_schema_extra={"position": 5})
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings, json_schema_extra={"position": 6})
    training: TrainingSettings = Field(default_factory=TrainingSettings, json_schema_extra={"position": 7})
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, json_schema_extra={"position": 8})
    retention: RetentionSettings = Field(
        default_factory=RetentionSettings, json_schema_extra={"position": 9, "execution": True}
    )
    execution: ExecutionSettings = Field(
        default_factory=ExecutionSettings, json_schema_extra={"position": 10, "execution": True}
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        components = [function.component for function in self.reward.functions]
        wanted = self.evaluation.correct_component
        if wanted is not None and wanted not in components:
            raise ValueError(f"evaluation.correct_component must be one of {components}, got {wanted!r}")
        if self.data.record != "prompts":
            raise ValueError(
                f"data.record must be prompts for algorithm {self.algorithm.name}, which samples its own completions, "
                f"got {self.data.record}; `rft validate --record {self.data.record}` checks such data"
            )
        if self.evaluation.every and not self.data.heldout_fraction and self.data.heldout_source is None:
            raise ValueError(
                "evaluation.every needs held-out prompts: set data.heldout_fraction above 0 or data.heldout_source, "
                "or every to 0"
            )
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_completion_tokens:
            raise ValueError("algorithm.overlong_buffer_tokens must be at most rollout.max_completion_tokens")
        if self.algorithm.min_group_size > self.rollout.group_size:
            raise ValueError(
                f"algorithm.min_group_size ({self.algorithm.min_group_size}) must be at most "
                f"rollout.group_size ({self.rollout.group_size}): no group could train"
            )
        from rft_core.algorithms import check, resolve_algorithm  # it reads these settings

        check(resolve_algorithm(self.algorithm), self.training)
        return self

    @property
    def correct_component(self) -> str:
        """The reward component that says correct (at least 1)."""
        return self.evaluation.correct_component or self.reward.functions[0].component
