"""Whether what a completion says about itself is true: a confidence or a verdict, against the component `of`.

confidence: minus the Brier score, -(confidence - truth)^2, in [-1, 0]; beside the component itself this is RLCR (Damani
et al. 2025). verdict: 1 if "correct" / "incorrect" (yes / no, true / false, right / wrong) is true, else 0. What is
said is the content of the last <TAG>...</TAG>; nothing, or what cannot be read, is the worst score with a reason.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from rft_core.rewards.extract import tagged
from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1
CONFIDENCE = re.compile(r"(\d{1,3}(?:\.\d{1,20})?|\.\d{1,20})\s*(%?)")
TRUE = frozenset({"correct", "right", "true", "yes"})
FALSE = frozenset({"incorrect", "wrong", "false", "no", "not correct"})


def read_confidence(text: str) -> float | None:
    """In [0, 1]; a percentage is divided by 100.

    >>> read_confidence("0.8"), read_confidence("80%"), read_confidence("80"), read_confidence("high")
    (0.8, 0.8, None, None)
    """
    match = CONFIDENCE.fullmatch(text.strip())
    if match is None:
        return None
    value = float(match[1]) / (100 if match[2] else 1)
    return value if 0 <= value <= 1 and math.isfinite(value) else None


def read_verdict(text: str) -> bool | None:
    word = text.strip().strip(".!").lower()
    return True if word in TRUE else False if word in FALSE else None


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    own = settings.verification

    def score(row: RewardRow) -> Scored:
        truth = row.earlier[settings.of or ""]
        if truth is None:
            return Scored(None, f"{settings.of} has no score, so nobody knows what is true")
        is_correct = truth >= settings.threshold
        said = tagged(row.completion_text, own.tag)
        if own.kind == "verdict":
            verdict = read_verdict(said) if said is not None else None
            if verdict is None:
                return Scored(0.0, _unread(said, own.tag, "correct or incorrect"))
            return Scored(float(verdict == is_correct))
        confidence = read_confidence(said) if said is not None else None
        if confidence is None:
            return Scored(-1.0, _unread(said, own.tag, "a number from 0 to 1, or a percentage"))
        return Scored(-((confidence - is_correct) ** 2), None, {"confidence": confidence})

    return Scorer(lambda rows: [score(row) for row in rows], {"semantics": SEMANTICS}, needs_earlier=True)


def _unread(said: str | None, tag: str, must: str) -> str:
    return f"no <{tag}>" if said is None else f"<{tag}> must hold {must}, got {said[:40]!r}"
