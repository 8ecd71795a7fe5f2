"""Settings of the data stage: sources, fields, cleaning, policies, the order of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from data_contracts.reasons import REASONS, Policy
from rft_core.settings import NOT_BLANK, Settings, execution

RecordName = Literal["prompts", "demonstrations", "preferences", "labelled", "trajectories", "stepwise"]
# Our names of what a row holds; `data.fields` maps them to a file's own.
FieldName = Literal[
    "id", "prompt", "system", "completion", "messages", "text", "chosen", "rejected", "margin", "label", "reward",
    "turn_rewards", "steps", "step_labels", "answer", "tools",
]  # fmt: skip


def source_label(source: str) -> str:
    """A source's name without the folder that it happens to lie in.

    >>> source_label("/home/me/sums.jsonl"), source_label("reasoning_gym:chain_sum")
    ('sums.jsonl', 'reasoning_gym:chain_sum')
    """
    return source if ":" in source and "://" not in source else Path(source).name


class DataPart(Settings):
    """One source of a mixture."""

    source: str = Field(pattern=NOT_BLANK, description="As data.source.", json_schema_extra={"execution": True})
    weight: float = Field(1.0, gt=0, description="Share of the prompts drawn from this source, relative to the others.")
    label: str | None = Field(
        None, pattern=NOT_BLANK, description="Its name in the column `dataset`; null takes the source's."
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="As data.parameters.")
    size: int | None = Field(None, ge=1, description="As data.size.")
    fields: dict[FieldName, str] = Field(default_factory=dict, description="As data.fields.")

    @property
    def name(self) -> str:
        return self.label or source_label(self.source)


class CleaningOperator(Settings):
    name: Literal["unicode", "strip", "length", "language", "exact_duplicates", "near_duplicates", "custom"] = Field(
        description="What is done to each row, in the order of the list; custom takes `path`."
    )
    form: Literal["NFC", "NFKC"] = Field("NFC", description="unicode: the normal form of all texts.")
    on: Literal["prompt", "completion", "both"] = Field("both", description="The texts that the operator looks at.")
    min_characters: int | None = Field(None, ge=0, description="length: shorter rows are dropped (all texts together).")
    max_characters: int | None = Field(None, ge=1, description="length: longer rows are dropped.")
    languages: list[str] = Field(
        default_factory=list,
        description="language: ISO 639 codes that stay, e.g. en; a row with few letters or in doubt stays too.",
    )
    threshold: float = Field(
        0.8,
        gt=0,
        le=1,
        description="near_duplicates: estimated share of runs of three words in common (Jaccard) from which a row is "
        "dropped. In texts from one template one word in thirty is within 0.8.",
    )
    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="custom: module.function, or FILE.py:function. It gets one row (a dict of the record's fields) and "
        "gives the row, changed or not, or null to drop it.",
        json_schema_extra={"execution": True},
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (self.name == "custom") != (self.path is not None):
            raise ValueError("cleaning operator custom needs path, and path goes with custom alone")
        if self.name == "language" and not self.languages:
            raise ValueError("cleaning operator language needs languages, e.g. [en]")
        if self.name == "length" and self.min_characters is None and self.max_characters is None:
            raise ValueError("cleaning operator length needs min_characters or max_characters")
        return self


class DataSettings(Settings):
    record: RecordName = Field(
        "prompts", description="What the rows are; prompts are rolled out, the others were completed by someone."
    )
    source: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="A file (.jsonl .json .csv .parquet .arrow, also .gz .zst), a glob, a folder saved by datasets, a "
        "URL (s3://...), hub:ORG/NAME, or reasoning_gym:NAME. Its content enters the keys.",
        json_schema_extra={"execution": True},
    )
    mixture: list[DataPart] = Field(default_factory=list, description="Several sources by weight, instead of source.")
    heldout_source: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="Held-out rows from a source of their own; rows of `source` that render alike are dropped.",
        json_schema_extra={"execution": True},
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of a procedural source, or of hub: (name, split, revision).",
    )
    size: int | None = Field(None, ge=1, description="Rows to take from the source; null takes all.")
    seed: int = Field(0, ge=0, description="Seed of a procedural source.")
    fields: dict[FieldName, str] = Field(
        default_factory=dict,
        description="Our name of a field -> its name in the file (dots go into objects), where it is not recognised; "
        "an empty name leaves the field out.",
    )
    render: Literal["chat", "plain"] = Field(
        "chat", description="chat: texts become messages in the chat template. plain: texts are joined as they are."
    )
    system: str | None = Field(None, description="System message put before every prompt that has none.")
    suffix: str = Field("", description="Text appended to the last user message, e.g. an instruction on the format.")
    train_on: Literal["all_turns", "last_turn"] = Field(
        "all_turns", description="Which turns of the assistant in a given conversation are trained."
    )
    unpair: bool = Field(False, description="labelled: read pairs as two rows, chosen true and rejected false.")
    cleaning: list[CleaningOperator] = Field(default_factory=list, description="Operators on rows, in order.")
    policies: dict[str, Policy] = Field(
        default_factory=dict,
        description="Reason code -> reject, repair or keep, where the default (see the README's table) does not suit.",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer rendered prompts are rejected into quarantine.")
    max_tokens: int | None = Field(
        None, ge=1, description="Longer rendered examples (prompt and completion) are rejected; null is no limit."
    )
    heldout_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of distinct prompts kept for evaluation, chosen by content hash."
    )
    order: Literal["shuffled", "sequential", "difficulty", "easy_to_hard", "targeted"] = Field(
        "shuffled",
        description="Order of prompts. shuffled: anew each epoch. difficulty: by difficulty_field, ascending. "
        "easy_to_hard: by the pass rate measured so far. targeted: those whose pass rate is likely near "
        "target_pass_rate.",
    )
    difficulty_field: str = Field(
        "difficulty",
        pattern=NOT_BLANK,
        description="difficulty: metadata field with a number, which every train prompt needs; dots go into objects.",
    )
    target_pass_rate: float = Field(0.5, gt=0, lt=1, description="targeted: the pass rate that teaches most.")
    stats_decay: float = Field(
        1.0, gt=0, le=1, description="targeted, easy_to_hard: weight left of earlier counts at each new measurement."
    )
    max_rejected_fraction: float = execution(
        0.05, ge=0, le=1, description="More rejected rows than this share fail the stage. Duplicates do not count."
    )
    workers: int | None = execution(
        None, ge=1, description="Processes that read and render a large source; null takes one a core."
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (self.source is None) == (not self.mixture):
            raise ValueError("give either data.source or data.mixture")
        labels = [part.name for part in self.mixture]
        if len(set(labels)) < len(labels):
            raise ValueError(f"labels of data.mixture must differ, got {labels}: give those that share a name a label")
        for code, policy in self.policies.items():
            if code not in REASONS:
                raise ValueError(f"data.policies must name reason codes, got {code!r}; see the README's table")
            if policy not in REASONS[code].allowed:
                raise ValueError(
                    f"data.policies.{code} must be one of {', '.join(REASONS[code].allowed)}, got {policy}"
                )
        if self.unpair and self.record != "labelled":
            raise ValueError(f"data.unpair goes with record labelled, got {self.record}")
        return self

    @property
    def parts(self) -> list[DataPart]:
        """The sources: those of the mixture, or the one."""
        if self.mixture:
            return self.mixture
        assert self.source is not None, "a validator made sure of it"
        return [DataPart(source=self.source, parameters=self.parameters, size=self.size, fields=self.fields)]


class ExpertSettings(DataSettings):
    """Demonstrations beside the prompts of `data`. What only prompts or evaluations need is refused."""

    record: RecordName = Field("demonstrations", description="What the rows are: demonstrations or trajectories.")
    per_step: int = Field(8, ge=1, description="Expert examples a step.")
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Name of a source in the column `dataset` -> weight of its rows in the loss over expert rows; "
        "others have 1. 2 stands for a row that counts twice, 0 leaves its rows out.",
    )
    heldout_fraction: float = Field(
        0.0, ge=0, lt=1, description="Stays 0: evaluations ask the held-out prompts of data, which no expert answers."
    )

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.record not in ("demonstrations", "trajectories"):
            raise ValueError(f"experts.record must be demonstrations or trajectories, got {self.record}")
        if self.heldout_fraction or self.heldout_source is not None:
            raise ValueError(
                "experts.heldout_fraction and heldout_source have no effect: evaluations ask the held-out prompts of "
                "data; leave them out"
            )
        if self.order in ("easy_to_hard", "targeted"):
            raise ValueError(
                f"experts.order must be shuffled, sequential or difficulty, got {self.order}: of completions that the "
                "data gives no pass rate is measured"
            )
        names = [part.name for part in self.parts]
        for name in self.source_weights:
            if name not in names:
                raise ValueError(
                    f"experts.source_weights must name sources of experts ({', '.join(names)}), got {name}"
                )
        return self
