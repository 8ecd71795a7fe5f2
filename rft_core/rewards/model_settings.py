"""Settings of rewards that a local model gives. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rft_core.settings import NOT_BLANK, Settings, execution


class ScoringModelSettings(Settings):
    """What every model that scores needs."""

    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="A model folder, a name fetched with `rft fetch-model`, or a hub id. Its content enters the "
        "grader's identity.",
        json_schema_extra={"execution": True},
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute; auto takes CUDA if present.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute type; auto: bfloat16 where the hardware multiplies it natively, else float32."
    )
    render: Literal["auto", "chat", "plain"] = Field(
        "auto",
        description="chat: by the model's chat template; plain: the texts of the prompt by line, after_prompt, the "
        "completion; auto: chat where there is a template.",
    )
    chat_template: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="A Jinja file that replaces the model's own chat template.",
        json_schema_extra={"execution": True},
    )
    after_prompt: str = Field("\n", description="plain: text between the prompt and the completion.")
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a rendered conversation; null takes what the model allows."
    )
    too_long: Literal["unscored", "cut_left"] = Field(
        "unscored",
        description="Longer conversations: unscored with the reason, or without their first tokens (a BOS stays), "
        "whose number is a metric of the row.",
    )
    batch_tokens: int = execution(
        8192, ge=1, description="Tokens of a batch on a GPU, padding counted. On a CPU each row is computed alone."
    )

    @model_validator(mode="after")
    def _template_is_used(self) -> Self:
        if self.chat_template is not None and self.render == "plain":
            raise ValueError("chat_template goes with render: chat, got render: plain")
        return self


class RewardModelSettings(ScoringModelSettings):
    read: Literal["logit", "probability", "expected"] = Field(
        "logit",
        description="logit of the label; its probability (softmax, sigmoid where there is one label); or the "
        "expectation of label_values over all labels.",
    )
    label: int | str | None = Field(
        None, description="Index or name of the label that logit and probability read; null where there is one."
    )
    label_values: list[float] | None = Field(
        None, min_length=2, description="expected: what each label is worth; null takes 0, 1, 2, ..."
    )
    append_eos: bool = Field(False, description="End a plain conversation with the tokenizer's EOS, as TRL does.")
    normalise: Literal["none", "stored"] = Field(
        "none", description="stored: (score - mean) / std, from reward_statistics.json in the model's folder."
    )

    @model_validator(mode="after")
    def _reading_fits(self) -> Self:
        if self.read == "expected" and self.label is not None:
            raise ValueError("label goes with read: logit or probability, got read: expected")
        if self.read != "expected" and self.label_values is not None:
            raise ValueError(f"label_values goes with read: expected, got read: {self.read}")
        return self


class ProcessModelSettings(ScoringModelSettings):
    kind: Literal["token_labels", "next_token"] = Field(
        "token_labels",
        description="token_labels: a token classification head judges each step's last token (TRL's PRMTrainer). "
        "next_token: a causal model says good_token or bad_token after each separator (Math-Shepherd).",
    )
    separator: str = Field("\n", description="Put after each step; its last token is where the step is judged.")
    keep_spaces: bool = Field(
        False, description="Keep the white space between steps; else they are divided by the separator alone."
    )
    good_label: int | str = Field(1, description="token_labels: index or name of the label of good steps.")
    good_token: Annotated[str, Field(pattern=NOT_BLANK)] = Field("+", description="next_token: after a good step.")
    bad_token: Annotated[str, Field(pattern=NOT_BLANK)] = Field("-", description="next_token: after a bad step.")
    add_bos: bool = Field(
        False,
        description="Begin a plain prompt with the tokenizer's BOS where it does not add one itself, as TRL's "
        "PRMTrainer does.",
    )
    aggregate: Literal["min", "product", "last", "mean"] = Field(
        "min", description="How the probabilities of the steps become the row's score."
    )

    @model_validator(mode="after")
    def _kind_fits(self) -> Self:
        if self.kind == "next_token" and not self.separator:
            raise ValueError("separator must not be empty with kind: next_token")
        if self.kind == "next_token" and self.good_token == self.bad_token:
            raise ValueError(f"good_token and bad_token must differ, got {self.good_token!r} twice")
        return self
