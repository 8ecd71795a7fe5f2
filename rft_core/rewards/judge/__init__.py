"""A language model as judge, at any OpenAI-compatible endpoint: prompts.py asks, client.py talks, replies.py reads,
asking.py keeps replies, modes.py scores.

A reply that can't be read, and an endpoint that gives none, leave rows unscored with the reason; what no retry mends
(key, model, address) is a SettingsError. Metrics per row: prompt_tokens, completion_tokens, and with prices cost:
of the reply when it was given, be it kept or new; null where the endpoint does not say.
"""

from __future__ import annotations

from pathlib import Path

from data_contracts.schemas import canonical_json
from rft_core.errors import GraderUnavailable, SettingsError
from rft_core.rewards.judge.asking import Judge, ReplyCache, api_key
from rft_core.rewards.judge.client import check_client
from rft_core.rewards.judge.modes import MODES
from rft_core.rewards.judge.prompts import Questions
from rft_core.rewards.rows import RewardRow, Scorer
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1
# What is asked before anything expensive, so that a wrong key or model is found where no row would find it: behind a
# gate, or in groups of one.
EXAMPLE = ("What is 1 + 1?", ("2", "3"))


def build(settings: RewardFunction, folder: Path | None, replies: ReplyCache | None = None) -> Scorer:
    """Raises SettingsError where the package, the key or the instruction's file is missing."""
    check_client()
    api_key(settings.judge)
    questions = Questions(settings.judge, _instruction(settings, folder))
    judge = Judge(settings.judge, replies)
    score = MODES[settings.judge.mode]

    def check() -> None:
        verdict = judge.ask([questions.about(_example(settings))])[0]
        if verdict.fault == "refused":
            raise SettingsError(f"{settings.component}: the endpoint must take its requests: {verdict.reason}")
        if verdict.fault == "unanswered":
            raise GraderUnavailable(f"{settings.component}: {verdict.reason}; judge.url must name a running endpoint")

    identity = {"semantics": SEMANTICS, "system": questions.system(2), "schema": questions.form(2).schema}
    return Scorer(lambda rows: score(rows, questions, judge.ask) if rows else [], identity, check=check)


def _instruction(settings: RewardFunction, folder: Path | None) -> str | None:
    name = settings.judge.instruction_file
    if name is None:
        return settings.judge.instruction
    path = (folder or Path.cwd()) / name
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"judge.instruction_file must be a text file: {path}: {error}") from error
    if not text.strip():
        raise SettingsError(f"judge.instruction_file must hold the instruction, {path} is empty")
    return text


def _example(settings: RewardFunction) -> list[RewardRow]:
    question, texts = EXAMPLE
    messages = canonical_json([{"role": "user", "content": question}])
    rows = [RewardRow(f"example/{text}", "example", messages, text, texts[0], {}, "stop", "example") for text in texts]
    return rows[:1] if settings.judge.mode in ("score", "rubric") else rows
