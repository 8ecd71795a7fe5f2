"""Settings of the reward functions. Importable without torch.

A function is chosen by `name`. What several functions share is flat; what one family alone needs is a section of its
own, named in SECTIONS. A section enters the grader's identity only where its function is used.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rft_core.rewards.judge_settings import JudgeSettings
from rft_core.rewards.model_settings import ProcessModelSettings, RewardModelSettings, ScoringModelSettings
from rft_core.settings import NOT_BLANK, Settings, execution

TAG = r"^[A-Za-z][\w-]*$"
PLACE = r"^(tag\.[A-Za-z][\w-]*|json\..+)$"
COMPONENT = r"^[^/]*[^/\s][^/]*$"  # not blank either; a slash divides a component from its metrics
GATED = "gated: "  # begins the reason of a row that an `only_if` kept from the function
GATE = re.compile(r"\s*(?P<component>.*?\S)\s*(?P<operator><=|>=|!=|=|<|>)\s*(?P<bound>[-+]?[0-9.]+)\s*")

Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class CodeSettings(Settings):
    tests: str = Field("tests", pattern=NOT_BLANK, description="Metadata field of the tests; without it, the answer.")
    credit: Literal["all", "partial"] = Field("all", description="1 if all tests pass, or the share that passes.")
    language: str = Field("python", description="Language of the code blocks that count as the program.")
    command: list[str] | None = Field(
        None, min_length=1, description='Command that runs another language, e.g. ["node", "{file}"].'
    )
    raw: bool = Field(False, description="A completion without a code block is the program itself.")
    prelude: str = Field("", description="Python text before each program, e.g. imports.")
    modules: list[str] = Field(
        default_factory=lambda: ["solution", "main", "program", "candidate", "submission"],
        description="Names under which tests may import the program.",
    )
    packages: list[str] = Field(
        default_factory=list, description="Installed packages that programs and tests may import, e.g. numpy."
    )
    cpu_seconds: float = Field(5.0, gt=0, description="Processor time of all tests, or of one stdin case.")
    wall_seconds: float = Field(20.0, gt=0, description="The same by the clock, from the start of the work.")
    memory_mib: int = Field(512, ge=64, description="Memory of a program's processes together.")
    processes: int = Field(32, ge=4, description="Processes and threads of a program.")
    file_mib: int = Field(64, ge=1, description="All files that a program writes.")
    output_mib: int = Field(4, ge=1, le=8, description="What a program may print for one stdin case.")
    tolerance: float = Field(1e-6, ge=0, description="Of numbers with a fraction, relative or absolute.")
    workers: int | None = execution(None, ge=1, description="Programs at once; null takes one per core.")
    readonly: list[str] = execution([], description="Further folders that programs may read, e.g. Java's.")
    sandbox: Literal["bubblewrap", "unsafe_unsandboxed"] = Field(
        "bubblewrap", description="unsafe_unsandboxed lets programs do to this machine what you can do."
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.language != "python" and not self.command:
            raise ValueError(f"language {self.language} needs command: the command that runs a program")
        if self.command and not any("{file}" in part for part in self.command):
            raise ValueError("command must hold {file}, which stands for the program's file")
        return self


class LengthSettings(Settings):
    max_tokens: int = Field(1024, ge=1, description="Tokens of a completion from which nothing changes any more.")
    buffer: int = Field(256, ge=1, description="soft_overlong: tokens before max_tokens over which -1 builds up.")
    correct: Pair = Field([1.0, 0.5], description="length_cosine: a right completion's, [short, long].")
    wrong: Pair = Field([-1.0, -0.5], description="length_cosine: a wrong completion's, [short, long].")


class RepetitionSettings(Settings):
    ngram: int = Field(3, ge=1, description="Length of the n-grams that are counted.")
    max_penalty: float = Field(-1.0, le=0, description="The score if every n-gram were a repeated one.")
    unit: Literal["tokens", "words"] = Field("tokens", description="What an n-gram is made of.")


class VerificationSettings(Settings):
    kind: Literal["confidence", "verdict"] = Field("confidence", description="A probability, or correct / incorrect.")
    tag: str = Field("confidence", pattern=TAG, description="It is the content of the last <TAG>...</TAG>.")


class MathSettings(Settings):
    lenient: bool = Field(
        True, description="A completion without a box or stated answer is judged by its last formula, number or option."
    )
    seconds: float = Field(4.0, gt=0, description="Clock time of one comparison by sympy, from its start.")
    memory_mib: int = Field(1024, ge=256, description="Memory of a process that compares.")
    workers: int | None = execution(None, ge=1, description="Processes that compare; null takes one per core.")


class ChoiceSettings(Settings):
    field: str = Field(
        "choices", pattern=NOT_BLANK, description="Metadata field of the choices' texts, if there is one."
    )


class RewardFunction(Settings):
    name: Literal[
        "exact_match",
        "numeric_answer",
        "math_equivalence",
        "choice",
        "answer_format",
        "reasoning_gym",
        "code",
        "soft_overlong",
        "length_cosine",
        "repetition",
        "language",
        "self_verification",
        "reward_model",
        "process_reward_model",
        "judge",
        "custom",
    ] = Field(description="Which reward function; custom takes `path`.")
    label: str | None = Field(
        None, pattern=COMPONENT, description="Name of its component in tables; null takes `name`."
    )
    weight: float = Field(1.0, description="Weight in the sum.")
    when: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="SQL condition on the prompt: source, dataset, answer, finish_reason and metadata fields, e.g. "
        "dataset = 'code'. The function does not apply elsewhere and counts as absent there.",
    )
    only_if: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="Gate on an earlier component, e.g. answer_format > 0. Where it fails, the function is not called "
        "and adds 0.",
    )
    center: float = Field(0.0, description="Subtracted from the score before scale, clip and weight.")
    scale: float = Field(1.0, description="Multiplies the centred score, before clip and weight.")
    clip: Pair | None = Field(None, description="Lowest and highest scaled score.")
    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="custom: module.function, or FILE.py:function.",
        json_schema_extra={"execution": True},
    )
    depends_on: list[Annotated[str, Field(pattern=NOT_BLANK)]] = Field(
        default_factory=list,
        description="Files that a custom function reads; their content enters the grader's identity.",
        json_schema_extra={"execution": True},
    )
    score_key: str = Field(
        "score", pattern=NOT_BLANK, description="custom: key of the score when the function gives dicts."
    )
    call_seconds: float = execution(
        600.0, gt=0, description="custom: clock time of one call, for a block of rows. Then they are unscored."
    )
    ignore_case: bool = Field(False, description="exact_match: compare without regard to case.")
    tolerance: float = Field(1e-6, ge=0, description="numeric_answer: largest relative or absolute difference.")
    answer_in: str | None = Field(
        None,
        pattern=PLACE,
        description="exact_match, numeric_answer, math_equivalence, choice: judge tag.NAME (the last "
        "<NAME>...</NAME>) or json.FIELD (where the completion is a JSON object) instead of all of it.",
    )
    pattern: str | None = Field(
        None, min_length=1, description="answer_format: regular expression the whole completion must match."
    )
    tags: list[Annotated[str, Field(pattern=TAG)]] = Field(
        default_factory=list, description="answer_format: tags that the completion consists of, in order."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="answer_format: JSON schema of the object that the completion must be."
    )
    language: str = Field("en", pattern=NOT_BLANK, description="language: wanted language, ISO 639-1.")
    of: str | None = Field(
        None,
        pattern=COMPONENT,
        description="length_cosine, self_verification: the earlier component that says whether a completion is right.",
    )
    threshold: float = Field(0.5, description="length_cosine, self_verification: it is right from this score on.")
    length: LengthSettings = Field(default_factory=LengthSettings, description="Settings of rewards by length.")
    repetition: RepetitionSettings = Field(default_factory=RepetitionSettings, description="Settings of repetition.")
    verification: VerificationSettings = Field(
        default_factory=VerificationSettings, description="Settings of self_verification."
    )
    code: CodeSettings = Field(default_factory=CodeSettings, description="Settings of code.")
    reward_model: RewardModelSettings = Field(
        default_factory=RewardModelSettings, description="Settings of reward_model."
    )
    process_reward_model: ProcessModelSettings = Field(
        default_factory=ProcessModelSettings, description="Settings of process_reward_model."
    )
    judge: JudgeSettings = Field(default_factory=JudgeSettings, description="Settings of judge.")
    math: MathSettings = Field(default_factory=MathSettings, description="Settings of math_equivalence.")
    choice: ChoiceSettings = Field(default_factory=ChoiceSettings, description="Settings of choice.")

    @property
    def component(self) -> str:
        return self.label or self.name

    @property
    def gate(self) -> tuple[str, str, float] | None:
        """(component, operator, bound) of `only_if`."""
        if self.only_if is None:
            return None
        match = GATE.fullmatch(self.only_if)
        assert match is not None, "checked by the validator"
        return match["component"], match["operator"], float(match["bound"])

    @property
    def scoring_model(self) -> ScoringModelSettings | None:
        """The section of a function that a local model computes."""
        section = getattr(self, SECTIONS.get(self.name, ""), None)
        return section if isinstance(section, ScoringModelSettings) else None

    def content(self) -> dict[str, Any]:
        """Without the sections of other functions."""
        own = SECTIONS.get(self.name)
        return {name: value for name, value in super().content().items() if name == own or name not in OWNERS}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.name == "custom" and not self.path:
            raise ValueError("reward function custom needs path: module.function or FILE.py:function")
        if self.name != "custom" and self.path:
            raise ValueError(f"path goes with name: custom, got name: {self.name}")
        if self.name != "custom" and self.call_seconds != type(self).model_fields["call_seconds"].default:
            raise ValueError(f"call_seconds goes with name: custom, got name: {self.name}")
        if self.scoring_model is not None and self.scoring_model.path is None:
            raise ValueError(f"reward function {self.name} needs {self.name}.path: a model folder, a name or a hub id")
        if self.name == "judge" and (self.judge.url is None or self.judge.model is None):
            raise ValueError("reward function judge needs judge.url and judge.model")
        if self.component == "rollout_error":
            raise ValueError("label must not be rollout_error, which stands for rollouts that failed")
        if self.name == "answer_format" and sum(map(bool, (self.pattern, self.tags, self.json_schema))) != 1:
            raise ValueError("reward function answer_format needs one of pattern, tags and json_schema")
        if (self.of is not None) != (self.name in JUDGED_BY_ANOTHER):
            raise ValueError(
                f"`of` names the component that {' and '.join(JUDGED_BY_ANOTHER)} go by, got of: {self.of} with name: "
                f"{self.name}"
            )
        for section, owners in OWNERS.items():
            is_set = getattr(self, section) != type(self).model_fields[section].get_default(call_default_factory=True)
            if is_set and self.name not in owners:
                raise ValueError(f"section {section} goes with name: {' or '.join(owners)}, got name: {self.name}")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip must be [lowest, highest], got {self.clip}")
        if self.only_if is not None and not _is_gate(self.only_if):
            raise ValueError(f"only_if must be COMPONENT > NUMBER (or >=, <, <=, =, !=), got {self.only_if!r}")
        return self


class StepSettings(Settings):
    split: Literal["none", "lines", "paragraphs", "tags", "custom"] = Field(
        "none", description="How a completion is divided into reasoning steps; functions may then score each."
    )
    tag: str = Field("step", pattern=TAG, description="tags: a step ends with </TAG>.")
    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="custom: module.function, or FILE.py:function, from a text to the list of its steps' texts.",
        json_schema_extra={"execution": True},
    )
    depends_on: list[Annotated[str, Field(pattern=NOT_BLANK)]] = Field(
        default_factory=list,
        description="Files that a custom function reads.",
        json_schema_extra={"execution": True},
    )
    call_seconds: float = execution(
        600.0, gt=0, description="custom: clock time for the completions of a block; more fails the stage as transient."
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (self.split == "custom") != (self.path is not None):
            raise ValueError(f"path goes with split: custom, got split: {self.split} and path: {self.path}")
        return self


class RewardSettings(Settings):
    functions: list[RewardFunction] = Field(
        default_factory=list, description="Summed by weight. None where the data says what completions are worth."
    )
    missing: Literal["sum_present", "unscored"] = Field(
        "sum_present",
        description="A rollout that some functions could not score: sum those that could, or leave it unscored. "
        "It is unscored in any case when no function scored it.",
    )
    steps: StepSettings = Field(default_factory=StepSettings, description="Reasoning steps of completions.")
    max_unscored_fraction: float = execution(
        0.2,
        ge=0,
        le=1,
        description="More unscored rollouts than this share of a step fail the stage as transient. Rollouts that "
        "failed themselves are not counted: scoring again would not mend them.",
    )

    @model_validator(mode="after")
    def _components_fit(self) -> Self:
        earlier: set[str] = set()
        for function in self.functions:
            if function.component in earlier:
                raise ValueError(
                    f"reward components must differ, got {function.component!r} twice; give one of them a label"
                )
            for setting, named in (("only_if", function.gate and function.gate[0]), ("of", function.of)):
                if named is not None and named not in earlier:
                    known = ", ".join(sorted(earlier)) or "none"
                    raise ValueError(
                        f"{setting} of {function.component} must name an earlier component (there is {known}), "
                        f"got {named!r}"
                    )
            if function.name == "process_reward_model" and self.steps.split == "none":
                raise ValueError(
                    f"{function.component} scores reasoning steps: reward.steps.split must say how completions are "
                    "divided (lines, paragraphs, tags or custom), got none"
                )
            earlier.add(function.component)
        return self


def _is_gate(text: str) -> bool:
    match = GATE.fullmatch(text)
    if match is None:
        return False
    try:
        float(match["bound"])
    except ValueError:
        return False
    return True


JUDGED_BY_ANOTHER = ("length_cosine", "self_verification")
SECTIONS = {  # function -> its section
    "code": "code",
    "math_equivalence": "math",
    "choice": "choice",
    "soft_overlong": "length",
    "length_cosine": "length",
    "repetition": "repetition",
    "self_verification": "verification",
    "reward_model": "reward_model",
    "process_reward_model": "process_reward_model",
    "judge": "judge",
}
OWNERS = {section: [name for name, own in SECTIONS.items() if own == section] for section in SECTIONS.values()}
