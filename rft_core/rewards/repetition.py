"""A penalty for repeated n-grams (Yeo et al. 2025): max_penalty x the share of n-grams that occurred before.

Counted over the tokens that the policy wrote, or over words in lower case.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1


def repetition(units: Sequence[object], ngram: int, max_penalty: float) -> float:
    """0 where nothing repeats or the text is shorter than an n-gram.

    >>> repetition([1, 2, 1, 2, 1, 2], 2, -1.0)
    -0.6
    """
    total = len(units) - ngram + 1
    if total <= 0:
        return 0.0
    distinct = len({tuple(units[start : start + ngram]) for start in range(total)})
    return max_penalty * (total - distinct) / total


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    own = settings.repetition

    def score(row: RewardRow) -> Scored:
        units: Sequence[object] | None = row.completion_text.lower().split() if own.unit == "words" else row.token_ids
        if units is None:
            return Scored(None, "the row has no tokens; repetition.unit: words counts words")
        return Scored(repetition(units, own.ngram, own.max_penalty))

    return Scorer(lambda rows: [score(row) for row in rows], {"semantics": SEMANTICS})
