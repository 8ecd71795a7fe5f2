"""The share of a completion that is in the wanted language, by letters.

Identified line by line (py3langid), lines without enough letters together with those that follow. Code blocks, LaTeX,
links and tags belong to no language. A completion with too few letters to tell is 1.0 with a note.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rft_core.errors import SettingsError
from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1
MIN_LETTERS = 24  # fewer are a guess; ideographs count four times
MAX_CHARACTERS = 100_000
OUTSIDE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[A-Za-z]+|https?://\S+|</?[\w-]+>",
    re.DOTALL,
)


@cache
def identifier() -> Any:
    """100 MB and two seconds: once per process, when a recipe asks for it."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def passages(text: str) -> Iterator[tuple[str, int]]:
    """(a passage with enough letters to tell its language, its weight). The last may have too few and is left out."""
    held, weight = "", 0
    for line in OUTSIDE.sub(" ", text[:MAX_CHARACTERS]).splitlines():
        held += f" {line}"
        weight += sum(4 if ord(letter) >= 0x2E80 else 1 for letter in line if letter.isalpha())
        if weight >= MIN_LETTERS:
            yield held.strip(), weight
            held, weight = "", 0


def language(text: str, wanted: str) -> Scored:
    found = [(identifier().classify(passage)[0], weight) for passage, weight in passages(text)]
    if not found:
        return Scored(1.0, "too little text to tell its language")
    total = sum(weight for _, weight in found)
    share = sum(weight for name, weight in found if name == wanted) / total
    others = sorted({name for name, _ in found} - {wanted})
    return Scored(share, f"found {', '.join(others)}" if others else None)


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Raises SettingsError for a language that the identifier does not know."""
    known = sorted(identifier().nb_classes)
    if settings.language not in known:
        raise SettingsError(
            f"language of {settings.component} must be among {', '.join(known)}, got {settings.language!r}"
        )
    wanted = settings.language

    def score(rows: list[RewardRow]) -> list[Scored]:
        return [language(row.completion_text, wanted) for row in rows]

    return Scorer(score, {"semantics": SEMANTICS, "py3langid": importlib.metadata.version("py3langid")})
