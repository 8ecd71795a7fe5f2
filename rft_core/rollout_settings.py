"""Settings of generation. Importable without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rft_core.settings import NOT_BLANK, Settings
from rft_core.vllm_settings import VllmSettings

MIN_TEMPERATURE = 1e-3  # below, logits / temperature leave float32; 0 itself means greedy


class RolloutSettings(Settings):
    engine: Literal["transformers", "vllm", "scripted", "none"] = Field(
        "transformers",
        description="Who generates. transformers: the policy itself, in this process. vllm: a vLLM server. none: an "
        "offline run; asking it to generate is an error.",
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
    batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Positions of cache decoded at once inside a block: a prompt's tokens, once for its group, and "
        "max_completion_tokens a row. null: 131072, or what an eighth of the memory holds if that is less; resolved "
        "once, at the start of a run.",
    )
    ahead: int = Field(
        0, ge=0, le=8, description="Rollouts of step s come from policy version s - 1 - ahead; 0 is on-policy."
    )
    script: str | None = Field(
        None, pattern=NOT_BLANK, description="Completions for the scripted engine: a JSON file. For tests."
    )
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="Of the engine vllm.")

    @model_validator(mode="after")
    def _engine_fits(self) -> Self:
        # `none` stands for the engine that made the tables which an offline run reads.
        if self.engine not in ("vllm", "none") and self.vllm != VllmSettings():
            raise ValueError(f"vllm has no effect: it is read by engine vllm, got {self.engine}")
        return self
