"""Every setting of a recipe. Importable without torch.

One model is the recipe's schema, the flow's parameter, the command line's `--set` and the form in the UI. The settings
of data are in data/settings.py, those of rewards in rewards/settings.py, those of algorithms in algorithm_settings.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.critic_settings import CriticSettings, check_critic
from rft_core.data.settings import DataSettings, ExpertSettings
from rft_core.distillation_settings import TeacherSettings
from rft_core.errors import SettingsError
from rft_core.mixtures import refuse_experts
from rft_core.phases import PhaseSettings, check_phases, filled_from_phases, phase_recipes
from rft_core.rewards.settings import RewardSettings
from rft_core.rollout_settings import MIN_TEMPERATURE, RolloutSettings
from rft_core.settings import NOT_BLANK, Settings, execution

if TYPE_CHECKING:
    from rft_core.terms import Algorithm


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
        2048,
        ge=1,
        description="Token budget of one forward and backward: higher is faster on a GPU and takes more "
        "memory; results change by rounding only.",
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Keeps a moving average of the weights: each optimizer step moves it by 1 - this towards them "
        "(0.999 is usual). `rft export --ema` and `rft evaluate --ema` take it; training does not. null keeps none.",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="Compile the decoder layers of the update: faster, results change by rounding. auto: on a CPU "
        "with AMX, in runs of 50 steps or more, where a compiler is found: compiling takes half a minute the first "
        "time, seconds from its cache, and without AMX matrix products outweigh what it saves. Resolved once, at the "
        "start of a run.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Compute each decoder layer again in the backward pass instead of keeping what it made: a fraction "
        "of the memory for long sequences, a third more time.",
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
    reference: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="Given preferences: the model that held-out margins are against, as model.path; null takes "
        "the one that the run starts with. `rft evaluate RUN` takes the one that RUN started with.",
        json_schema_extra={"execution": True},
    )

    @model_validator(mode="after")
    def _k_fits(self) -> Self:
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
    steps: int = Field(
        ge=0,
        description="Passes rollouts -> update. With phases: left out, since it is their sum.",
        json_schema_extra={"position": 1},
    )
    model: ModelSettings = Field(description="The model to train.", json_schema_extra={"position": 2})
    data: DataSettings = Field(description="Where prompts come from.", json_schema_extra={"position": 3})
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, json_schema_extra={"position": 4})
    reward: RewardSettings = Field(
        default_factory=RewardSettings, description="What is rewarded.", json_schema_extra={"position": 5}
    )
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings, json_schema_extra={"position": 6})
    training: TrainingSettings = Field(default_factory=TrainingSettings, json_schema_extra={"position": 7})
    critic: CriticSettings = Field(
        default_factory=CriticSettings,
        description="The model of values, where the advantage (gae) reads them.",
        json_schema_extra={"position": 8},
    )
    teacher: TeacherSettings = Field(
        default_factory=TeacherSettings,
        description="The model that algorithms of distillation learn from.",
        json_schema_extra={"position": 9},
    )
    experts: ExpertSettings | None = Field(
        None,
        description="Demonstrations that mix and chord imitate beside their own completions.",
        json_schema_extra={"position": 10},
    )
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, json_schema_extra={"position": 11})
    retention: RetentionSettings = Field(
        default_factory=RetentionSettings, json_schema_extra={"position": 12, "execution": True}
    )
    execution: ExecutionSettings = Field(
        default_factory=ExecutionSettings, json_schema_extra={"position": 13, "execution": True}
    )
    phases: list[PhaseSettings] = Field(
        default_factory=list,
        description="One after the other, each with its own steps; the sections above are what they share.",
        json_schema_extra={"position": 14},
    )

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        return filled_from_phases(values)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.phases:  # what they share need not be a recipe
            check_phases(self)
            return self
        components = [function.component for function in self.reward.functions]
        wanted = self.evaluation.correct_component
        if wanted is not None and wanted not in components:
            raise ValueError(f"evaluation.correct_component must be one of {components}, got {wanted!r}")
        filtered = self.algorithm.filter_on
        if filtered is not None and not any(f"{filtered}/".startswith(f"{name}/") for name in components):
            raise ValueError(f"algorithm.filter_on must be one of {components}, got {filtered!r}")
        if not self.algorithm.paths():  # to look at a user's algorithm runs its code, which a run does when it starts
            self._algorithm_fits()
        if self.evaluation.every and not self.data.heldout_fraction and self.data.heldout_source is None:
            raise ValueError(
                "evaluation.every needs held-out prompts: set data.heldout_fraction above 0 or data.heldout_source, "
                "or every to 0"
            )
        too_large = [k for k in self.evaluation.pass_at if k > self.evaluation.samples]
        if self.evaluation.samples and too_large:
            raise ValueError(
                f"evaluation.pass_at must be at most samples ({self.evaluation.samples}), got {too_large[0]}"
            )
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_completion_tokens:
            raise ValueError("algorithm.overlong_buffer_tokens must be at most rollout.max_completion_tokens")
        return self

    def _algorithm_fits(self) -> None:
        from rft_core.distillation_options import refuse_teacher
        from rft_core.resolve import check, resolve_algorithm  # it reads these settings

        algorithm = resolve_algorithm(self.algorithm)
        check(algorithm, self.training)
        check_critic(self.critic, algorithm, self.steps)
        self._mini_batches_fit()
        refuse_experts(algorithm, self.experts, self.rollout.temperature)
        refuse_teacher(algorithm, self.teacher)
        self._data_fits(algorithm)
        if self.evaluation.reference is not None and not algorithm.is_measured_by_margin:
            raise ValueError(
                f"evaluation.reference has no effect: no margin to a reference is measured for {algorithm.name}"
            )
        if algorithm.compares_groups and self.algorithm.min_group_size > self.rollout.group_size:
            raise ValueError(
                f"algorithm.min_group_size ({self.algorithm.min_group_size}) must be at most "
                f"rollout.group_size ({self.rollout.group_size}): no group could train"
            )
        clipped = next((function.component for function in self.reward.functions if function.clip is not None), None)
        if algorithm.advantage == "per_component" and clipped is not None:
            raise ValueError(f"reward clip of {clipped} has no effect: advantage per_component standardises the scores")
        if algorithm.advantage == "per_step_group_zscore" and self.reward.steps.split == "none":
            raise ValueError(
                "reward.steps.split must say how completions are divided (lines, paragraphs, tags or custom) for "
                "advantage per_step_group_zscore, which reads a reward of each step, got none"
            )

    def _mini_batches_fit(self) -> None:
        """An optimizer step without a group would be empty in every step of the run."""
        num_groups = {"rollout.prompts_per_step": self.rollout.prompts_per_step}
        if self.experts is not None:
            num_groups["experts.per_step"] = self.experts.per_step
        for setting, count in num_groups.items():
            if self.training.mini_batches > count:
                raise ValueError(
                    f"training.mini_batches ({self.training.mini_batches}) must be at most {setting} ({count}): groups "
                    "stay whole, so some optimizer steps would have none"
                )

    def _data_fits(self, algorithm: Algorithm) -> None:
        record = self.data.record
        if record not in algorithm.records:
            from rft_core.algorithms import ALGORITHMS

            fitting = sorted(row.name for row in ALGORITHMS.values() if record in row.records)
            raise ValueError(
                f"data.record must be {' or '.join(algorithm.records)} for algorithm {algorithm.name}, got {record}"
                + (f", which {', '.join(fitting)} train on" if fitting else "")
            )
        if algorithm.samples:
            self._rewards_fit(algorithm)
            if algorithm.preference is not None and self.rollout.group_size < 2:
                raise ValueError(
                    f"rollout.group_size must be at least 2 for algorithm {algorithm.name}, which sets the best of a "
                    f"group against its worst, got {self.rollout.group_size}"
                )
            return
        self._refuse_sampling(algorithm)
        if self.reward.functions:
            raise ValueError(
                f"reward.functions must be empty for algorithm {algorithm.name}: the data says what its completions "
                f"are worth, got {self.reward.functions[0].component}"
            )
        if self.data.order in ("easy_to_hard", "targeted"):
            raise ValueError(
                f"data.order must be shuffled, sequential or difficulty for algorithm {algorithm.name}: nothing is "
                f"sampled, so no pass rate is measured, got {self.data.order}"
            )
        if self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature must be 1 for algorithm {algorithm.name}: given completions were sampled by no "
                f"policy of ours, got {self.rollout.temperature:g}"
            )

    def _refuse_sampling(self, algorithm: Algorithm) -> None:
        """What tells how to sample, where the data gives the completions."""
        told = {
            "rollout": (self.rollout, ("group_size", "top_p", "top_k", "ahead")),
            "evaluation": (self.evaluation, ("samples", "greedy", "temperature", "pass_at")),
        }
        for section, (settings, names) in told.items():
            for name in names:
                field = type(settings).model_fields[name]
                if getattr(settings, name) != field.get_default(call_default_factory=True):
                    raise ValueError(
                        f"{section}.{name} has no effect for algorithm {algorithm.name}: nothing is sampled, the data "
                        "gives the completions that are trained on and measured"
                    )

    def _rewards_fit(self, algorithm: Algorithm) -> None:
        if self.reward.functions:
            return
        if algorithm.reads_rewards:
            raise ValueError(
                f"reward.functions must name what is rewarded: {algorithm.name} trains on completions that the "
                "policy samples"
            )
        if self.evaluation.every:
            raise ValueError(
                "evaluation.every needs reward.functions, which say how good a completion is; without them set it to 0"
            )
        if self.data.order in ("easy_to_hard", "targeted"):
            raise ValueError(
                f"data.order {self.data.order} needs reward.functions, which say what a prompt's pass rate is"
            )

    def content(self) -> dict[str, Any]:
        """Of a recipe with phases: what each of them is. What they share has no meaning of its own."""
        if self.phases:
            parts = phase_recipes(self)
            return {"seed": self.seed, "phases": [{"name": name, **own.content()} for name, own in parts.items()]}
        content = super().content()
        del content["phases"]
        return content

    @property
    def component_weights(self) -> dict[str, float]:
        """Weights by reward component, for advantages that standardise components: of a scale only the sign counts."""
        functions = self.reward.functions
        return {function.component: function.weight * math.copysign(1.0, function.scale) for function in functions}

    @property
    def correct_component(self) -> str:
        """The reward component that says correct (at least 1). Raises SettingsError where nothing is rewarded."""
        if not self.reward.functions:
            raise SettingsError("reward.functions must name what says how good a completion is, the recipe has none")
        return self.evaluation.correct_component or self.reward.functions[0].component
