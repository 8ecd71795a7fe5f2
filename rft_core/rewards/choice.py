"""1.0 if a completion chooses the right option of multiple choice, else 0.0 with a reason.

The answer is a letter, or the text of one of the metadata field `choices`: a list, {letter: text}, or {"label": [...],
"text": [...]}. What a completion chooses is stated, in this order of preference, by the last box, the last <answer>,
the last line "Answer: ...", the last "the answer is (B)", the last line. There, a letter counts in the forms B, (b),
B), B: its text, option B; so does the text of a choice. Text that names several, such as "A or B", chooses none.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any

from rft_core.rewards.extract import NotThere, extract
from rft_core.rewards.maths.answers import NoAnswer, find_answer, visible
from rft_core.rewards.options import names_several, option_in
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1

Choices = dict[str, str]  # letter -> text, folded


def choice(row: RewardRow, field: str, answer_in: str | None = None) -> Scored:
    choices = _choices(row.metadata.get(field))
    right = _right(row.answer, choices)
    if len(right) != 1:
        return Scored(None, right)
    try:
        part = extract(row.completion_text, answer_in)
    except NotThere as error:
        return Scored(0.0, f"completion: {shortened(str(error), 120)}")
    stated = part if answer_in is not None else _stated(part, row.finish_reason == "length")
    if isinstance(stated, NoAnswer):
        return Scored(0.0, stated.reason)
    chosen = _chosen(stated, choices)
    return Scored(float(chosen == right)) if len(chosen) == 1 else Scored(0.0, chosen)


def unreadable(answer: str | None, metadata: dict[str, Any], field: str = "choices") -> str | None:
    right = _right(answer, _choices(metadata.get(field)))
    return None if len(right) == 1 else right


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    field = settings.choice.field

    def score(rows: list[RewardRow]) -> list[Scored]:
        return [choice(row, field, settings.answer_in) for row in rows]

    return Scorer(score, {"semantics": SEMANTICS}, lambda answer, metadata: unreadable(answer, metadata, field))


def _choices(found: Any) -> Choices:
    """Empty where there are none, or in no form that we know."""
    if isinstance(found, dict) and isinstance(found.get("label"), list) and isinstance(found.get("text"), list):
        pairs = list(zip(found["label"], found["text"], strict=False))
    elif isinstance(found, dict):
        pairs = list(found.items())
    elif isinstance(found, list):
        pairs = list(zip(string.ascii_uppercase, found, strict=False))
    else:
        return {}
    return {str(letter).strip().upper(): _folded(str(text)) for letter, text in pairs if len(str(letter).strip()) == 1}


def _right(answer: str | None, choices: Choices) -> str:
    """The right letter, or (longer than one) why there is none."""
    if answer is None:
        return "the prompt has no answer"
    letters = _letters_of(answer, choices)
    if len(letters) == 1:
        return letters[0]
    if len(letters) > 1:
        return f"the answer is the text of several choices: {', '.join(letters)}"
    letter = option_in(answer)
    if letter is None:
        return "the answer is neither a letter nor the text of a choice"
    if choices and letter not in choices:
        return f"the answer is {letter}, and the choices are {', '.join(choices)}"
    return letter


def _stated(text: str, is_cut: bool) -> str | NoAnswer:
    found = find_answer(text, "option", is_lenient=False, is_cut=is_cut)
    if not isinstance(found, NoAnswer):
        return found
    rest = visible(text)
    if isinstance(rest, NoAnswer) or "\\boxed" in rest or (is_cut and "<answer>" in rest):
        return found
    lines = rest.strip().rsplit("\n", 1)
    return lines[-1] if lines[-1].strip() else NoAnswer("no answer: the completion is empty")


def _chosen(stated: str, choices: Choices) -> str:
    """The letter, or (longer than one) why there is none."""
    letters = _letters_of(stated, choices)
    if len(letters) == 1:
        return letters[0]
    if names_several(stated):
        return f"ambiguous: {shortened(stated.strip(), 60)}"
    letter = option_in(stated)
    if letter is None:
        return f"no option is named: {shortened(stated.strip(), 60)}"
    if choices and letter not in choices:
        return f"{letter} is none of the choices"
    return letter


def _letters_of(text: str, choices: Choices) -> list[str]:
    folded = _folded(text)
    return [letter for letter, of_choice in choices.items() if of_choice and of_choice == folded]


def _folded(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s$*_]+", " ", text).strip(" .,;:!?\"'").casefold()
