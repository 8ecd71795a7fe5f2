"""Rewards by length, in tokens that the policy wrote.

soft_overlong (DAPO): 0 up to max_tokens - buffer, falling linearly to -1 at max_tokens, -1 beyond.
length_cosine (Yeo et al. 2025): along half a cosine from one bound at length 0 to the other at max_tokens and beyond;
right completions earn most when short, wrong ones lose least when long. Whether one is right says the component `of`.
"""

from __future__ import annotations

import math
from pathlib import Path

from rft_core.errors import SettingsError
from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.settings import LengthSettings, RewardFunction

SEMANTICS = 1


def soft_overlong(length: int, settings: LengthSettings) -> float:
    """In [-1, 0]."""
    free = settings.max_tokens - settings.buffer
    return -min(max(length - free, 0), settings.buffer) / settings.buffer


def length_cosine(length: int, is_correct: bool, settings: LengthSettings) -> float:
    """Between the bounds of `correct` or of `wrong`, each [at length 0, at max_tokens]."""
    start, end = settings.correct if is_correct else settings.wrong
    progress = min(length, settings.max_tokens) / settings.max_tokens
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


def build_soft_overlong(settings: RewardFunction, folder: Path | None) -> Scorer:
    if not settings.length.buffer <= settings.length.max_tokens:
        raise SettingsError(
            f"length.buffer of {settings.component} must be at most length.max_tokens ({settings.length.max_tokens}), "
            f"got {settings.length.buffer}"
        )

    def score(row: RewardRow) -> Scored:
        length = row.num_tokens
        return Scored(None, NO_TOKENS) if length is None else Scored(soft_overlong(length, settings.length))

    return Scorer(lambda rows: [score(row) for row in rows], {"semantics": SEMANTICS})


def build_length_cosine(settings: RewardFunction, folder: Path | None) -> Scorer:
    def score(row: RewardRow) -> Scored:
        length, truth = row.num_tokens, row.earlier[settings.of or ""]
        if length is None:
            return Scored(None, NO_TOKENS)
        if truth is None:
            return Scored(None, f"{settings.of} has no score, so nobody knows whether it is right")
        return Scored(length_cosine(length, truth >= settings.threshold, settings.length))

    return Scorer(lambda rows: [score(row) for row in rows], {"semantics": SEMANTICS}, needs_earlier=True)


NO_TOKENS = "the row has no tokens, whose number is the length"
