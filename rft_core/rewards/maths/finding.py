"""From a completion and a gold text to the two answers that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rft_core.rewards.extract import NotThere, extract
from rft_core.rewards.maths.answers import Kind, NoAnswer, find_answer, gold_answer, last_box, unreadable_gold
from rft_core.rewards.maths.judge import kind_of

MAX_GOLD_CHARACTERS = 100_000  # of a whole solution

Pair = tuple[str, str]  # answer, gold answer


@dataclass(frozen=True, slots=True)
class Gold:
    text: str
    kind: Kind
    problem: str | None  # why it can't be read


@dataclass(frozen=True, slots=True)
class Place:
    """Where in completions answers stand."""

    answer_in: str | None
    is_lenient: bool


def find_pair(completion: str, gold: Gold, place: Place, is_cut: bool) -> Pair | NoAnswer:
    try:
        part = extract(completion, place.answer_in)
    except NotThere as error:
        return NoAnswer(f"completion: {error}")
    if place.answer_in is not None and last_box(part) is None:
        return part.strip(), gold.text
    answer = find_answer(part, gold.kind, place.is_lenient, is_cut)
    return answer if isinstance(answer, NoAnswer) else (answer, gold.text)


@lru_cache(maxsize=20_000)
def read_gold(answer: str) -> Gold:
    if len(answer) > MAX_GOLD_CHARACTERS:
        return Gold("", "other", f"it has {len(answer)} characters, more than {MAX_GOLD_CHARACTERS}")
    text = gold_answer(answer)
    if isinstance(text, NoAnswer):
        return Gold("", "other", text.reason)
    return Gold(text, kind_of(text), unreadable_gold(text))
