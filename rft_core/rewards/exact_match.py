"""1.0 if the completion is the answer, else 0.0. White space around either does not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_core.rewards.extract import NotThere, extract
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1


def exact_match(row: RewardRow, ignore_case: bool, answer_in: str | None = None) -> Scored:
    """Compares stripped texts, code point by code point; `ignore_case` compares their Unicode case foldings."""
    if row.answer is None:
        return Scored(None, "the prompt has no answer")
    try:
        completion, answer = extract(row.completion_text, answer_in).strip(), row.answer.strip()
    except NotThere as error:
        return Scored(0.0, shortened(str(error), 120))
    if ignore_case:
        completion, answer = completion.casefold(), answer.casefold()
    return Scored(float(completion == answer))


def unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
    return "the prompt has no answer" if answer is None else None


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    def score(rows: list[RewardRow]) -> list[Scored]:
        return [exact_match(row, settings.ignore_case, settings.answer_in) for row in rows]

    return Scorer(score, {"semantics": SEMANTICS}, unreadable)
