"""Rollout engines: who turns prompts into completions.

An engine is a pure function of (requests, sampling, settings, weights): the order of requests, other calls and other
blocks change nothing. Every row draws from its own seed, one uniform per position. A row that fails is data: a
completion with finish_reason `error` and a reason. An engine that cannot work at all raises EngineUnavailable.

An engine that outlives a stage (a server) is kept in the run's Workplace: it is told before each stage whose weights to
serve, when training begins, and when the run ends.

To add one: a file beside this one, a factory and a row in ENGINES, its name in `RolloutSettings.engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rft_core.config import MIN_TEMPERATURE, ModelSettings, RolloutSettings
from rft_core.engines.batch_budget import MOST_BATCH_TOKENS
from rft_core.errors import EngineForbidden, SettingsError

Progress = Callable[[int, int, str], None]  # done, total, note


@dataclass(frozen=True)
class Sampling:
    """How a completion is drawn.

    The order is temperature, then top_k (0 is off), then top_p among what top_k left. Temperature 0 is greedy: the
    likeliest token, top_k and top_p without effect, and logprobs of the untruncated distribution at temperature 1.

    >>> Sampling(temperature=1.0, top_p=1.0, top_k=0, max_completion_tokens=16).is_greedy
    False
    """

    temperature: float
    top_p: float
    top_k: int
    max_completion_tokens: int

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not (temperature == 0 or (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE)):
            raise SettingsError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {temperature}")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise SettingsError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if self.max_completion_tokens < 1:
            raise SettingsError(f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens of the vocabulary can never be drawn."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One completion to make. Requests of one `group` have equal prompts, which an engine may run once."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    group: str


@dataclass(frozen=True)
class Completion:
    """What an engine made of a request.

    `token_ids` end with the stop token when finish_reason is `stop`; `length` means that max_completion_tokens were
    made. `logprobs` (nat, float32 values, aligned) are of the distribution really sampled, truncation included; None
    when the engine cannot tell. finish_reason `error` has no tokens and an error_reason.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    error_reason: str | None = None

    @classmethod
    def failed(cls, reason: str) -> Completion:
        return cls([], [], "error", reason)


class Engine(Protocol):
    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        """One completion per request, in the order of the requests."""
        ...


class KeptEngine(Engine, Protocol):
    """An engine that outlives a stage."""

    @property
    def provenance(self) -> dict[str, Any]: ...

    def rest(self) -> None:
        """Free what training needs; serving again undoes it."""

    def close(self) -> None: ...


@dataclass
class Workplace:
    """What an engine that outlives a stage has of its run. `run` names it among all that share a machine; `policy_id`
    is of the policy that is wanted now; `kept` holds the engine once it is there."""

    folder: Path  # the engine's own
    run: str
    model: ModelSettings
    note: Callable[[str], None]
    policy_id: str = ""
    kept: list[KeptEngine] = field(default_factory=list)


class EngineFactory(Protocol):
    def __call__(self, policy: Any, settings: RolloutSettings, place: Workplace | None = None) -> Engine: ...


class ForbiddenEngine:
    """Stands where nothing may be generated: offline runs, reruns from stored rollouts."""

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        raise EngineForbidden(
            f"This run is offline (rollout.engine: none), but {len(requests)} completions were asked for that are not "
            "in the store. To allow generation set rollout.engine=transformers."
        )


def _none(policy: Any, settings: RolloutSettings, place: Workplace | None = None) -> Engine:
    return ForbiddenEngine()


def _scripted(policy: Any, settings: RolloutSettings, place: Workplace | None = None) -> Engine:
    from rft_core.engines.scripted import ScriptedEngine

    return ScriptedEngine(policy.tokenizer, settings.script)


def _transformers(policy: Any, settings: RolloutSettings, place: Workplace | None = None) -> Engine:
    from rft_core.engines.transformers import TransformersEngine  # imports torch

    return TransformersEngine(policy, settings.batch_tokens or MOST_BATCH_TOKENS)


def _vllm(policy: Any, settings: RolloutSettings, place: Workplace | None = None) -> Engine:
    from rft_core.engines.vllm import VllmEngine

    assert place is not None, "a server needs a place to live in"
    if not place.kept:
        place.kept.append(VllmEngine(settings.vllm, place.model, place.folder, place.run, place.note))
    (engine,) = place.kept
    assert isinstance(engine, VllmEngine)
    engine.serve(policy, place.policy_id)
    return engine


ENGINES: dict[str, EngineFactory] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "scripted": _scripted,
    "none": _none,
}

# Engines that sample from the resident policy's weights; the others need its tokenizer alone.
NEEDS_WEIGHTS = frozenset({"transformers", "vllm"})

# Engines that compute the policy by other code than the trainer does: what they report differs from the trainer's
# logprobs by more than the last bits, and rows carry the engine's name.
COMPUTES_APART = frozenset({"vllm"})


def check_engine(settings: RolloutSettings) -> None:
    """Raise SettingsError where the engine cannot run on this machine; before anything is loaded."""
    if settings.engine == "vllm" and not settings.vllm.urls:
        from rft_core.engines.vllm.managed import check_interpreter

        check_interpreter(settings.vllm)
