"""Settings of the reward `judge`. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rft_core.settings import NOT_BLANK, Settings, execution

RESERVED = frozenset({"messages", "model", "n", "response_format", "stream", "tools"})  # what the judge itself decides


class Criterion(Settings):
    name: str = Field(pattern=r"^[A-Za-z_][\w-]*$", description="Key of its score in the judge's reply.")
    description: str = Field(pattern=NOT_BLANK, description="What the judge is told about it.")
    weight: float = Field(1.0, gt=0, description="Weight in the mean.")
    low: float | None = Field(None, description="Lowest score; null takes the judge's.")
    high: float | None = Field(None, description="Highest score; null takes the judge's.")


class JudgeSettings(Settings):
    mode: Literal["score", "rubric", "pairwise", "ranking"] = Field(
        "score",
        description="A score for each completion, or by several criteria; comparisons of two of a group, or a ranking "
        "of a whole group.",
    )
    model: str | None = Field(None, pattern=NOT_BLANK, description="The model's name at the endpoint.")
    url: str | None = execution(
        None, pattern=r"^https?://[^/\s]+", description="OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1."
    )
    api_key_env: str | None = execution(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable that holds the key; null sends none."
    )
    instruction: str | None = Field(None, pattern=NOT_BLANK, description="What makes a completion good, for the judge.")
    instruction_file: str | None = execution(
        None, pattern=NOT_BLANK, description="File of the instruction; its text enters the grader's identity."
    )
    criteria: list[Criterion] = Field(default_factory=list, description="rubric: what is scored, each by its own.")
    opponents: Literal["all", "anchor"] = Field(
        "all", description="pairwise: each completion against every other, or against the group's first."
    )
    at_once: int = Field(8, ge=3, description="ranking: larger groups are divided into parts of at most so many.")
    low: float = Field(0.0, description="Lowest score.")
    high: float = Field(1.0, description="Highest score.")
    show_answer: bool = Field(True, description="Show the judge the ground truth, where a prompt has one.")
    temperature: float | None = Field(0.0, ge=0, description="Null leaves it to the endpoint.")
    max_tokens: int | None = Field(1024, ge=1, description="Tokens of a reply; null leaves it to the endpoint.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of each request.")
    reply_schema: Literal["auto", "none"] = Field(
        "auto", description="auto sends the reply's JSON schema, and stops where the endpoint refuses it."
    )
    repair: bool = Field(True, description="Ask once more, saying what was wrong, when a reply can't be read.")
    prices: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[prompt, reply] per million tokens, from which the metric cost is made."
    )
    concurrency: int = execution(16, ge=1, le=1024, description="Requests at once.")
    timeout_seconds: float = execution(60.0, gt=0, description="For one request, from its start to its last byte.")
    retries: int = execution(4, ge=0, description="After 429, 5xx, a timeout or a lost connection.")
    backoff_seconds: float = execution(
        1.0, ge=0, description="First delay before a retry; doubles each time, with jitter. Retry-After goes before it."
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.url is not None:
            parts = urlsplit(self.url)
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError("url must hold no user, password or query: a key belongs in the variable api_key_env")
        if self.instruction is not None and self.instruction_file is not None:
            raise ValueError("instruction and instruction_file exclude each other")
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, got {self.low} and {self.high}")
        if bool(self.criteria) != (self.mode == "rubric"):
            raise ValueError(f"criteria go with mode: rubric, got {len(self.criteria)} with mode: {self.mode}")
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) < len(names):
            raise ValueError(f"names of criteria must differ, got {names}")
        for name, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"low of criterion {name} must be less than its high, got {low} and {high}")
        if reserved := sorted(RESERVED & self.extra_body.keys()):
            raise ValueError(f"extra_body must not hold {', '.join(reserved)}, which the judge sets itself")
        return self

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """(low, high) by criterion."""
        return {
            criterion.name: (
                self.low if criterion.low is None else criterion.low,
                self.high if criterion.high is None else criterion.high,
            )
            for criterion in self.criteria
        }
