"""One answer against one gold answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from rft_core.rewards.maths.answers import Kind, is_mathematical
from rft_core.rewards.maths.compare import compare
from rft_core.rewards.maths.forms import Expression, Words, as_listed, read
from rft_core.rewards.maths.oracle import Oracle
from rft_core.rewards.maths.text import MAX_CHARACTERS, plain_latex
from rft_core.rewards.options import is_option, names_several, option_in


@dataclass(frozen=True, slots=True)
class Verdict:
    """`is_equal` is null where only symbolic work could tell. `stage`: text, exact, floating or symbolic."""

    is_equal: bool | None
    stage: str
    reason: str | None = None


def judge(answer: str, gold: str, oracle: Oracle | None = None) -> Verdict:
    if spelling(answer) == spelling(gold):
        return Verdict(True, "text")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(False, "text", f"the answer has {len(answer)} characters, more than {MAX_CHARACTERS}")
    if (letter := gold_option(gold)) is not None:
        chosen = option_in(answer)
        if chosen is None:
            reason = "the answer names several options" if names_several(answer) else "the answer names no option"
            return Verdict(False, "text", reason)
        return Verdict(chosen == letter, "text")
    oracle = oracle or Oracle()
    form, gold_form = read(answer), read(gold)
    is_equal = compare(form, gold_form, oracle)
    if is_equal is False and (listed := as_listed(answer)) is not None:
        is_equal = compare(listed, gold_form, oracle)
    stage = next((name for name in ("symbolic", "floating", "exact") if name in oracle.stages), "text")
    reason = oracle.note if is_equal is not True else None
    if is_equal is False and isinstance(form, Words) and form.is_formula:
        reason = f"the answer is no formula that can be read: {form.problem}"
    return Verdict(is_equal, stage, reason)


@lru_cache(maxsize=20_000)
def kind_of(gold: str) -> Kind:
    if gold_option(gold) is not None:
        return "option"
    return "number" if isinstance(read(gold), Expression) else "other"


@lru_cache(maxsize=20_000)
def gold_option(gold: str) -> str | None:
    """The letter of a gold answer that is one: D, (D), or (D) with the option's text."""
    if len(gold) > MAX_CHARACTERS or not MAY_BE_OPTION.search(gold):
        return None
    if is_option(gold) or (WITH_TEXT.match(plain_latex(gold)) and not is_mathematical(read(gold))):
        return option_in(gold)
    return None


@lru_cache(maxsize=20_000)
def spelling(text: str) -> str:
    """What is compared first: without white space, dollar signs, \\text and, for words, case."""
    text = SPELLING.sub("", WORDS.sub(r"\1", text))
    return text.casefold() if text.isalpha() and (len(text) > 2 or text.casefold() == "no") else text


SPELLING = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<!\\)\$|\.$")
MAY_BE_OPTION = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])|\([a-z]\)")
WORDS = re.compile(r"\\(?:text|mbox|textbf)\s*\{([^{}]*)\}")
WITH_TEXT = re.compile(r"(?:\\text\s*\{)?\s*\([A-Z]\)|(?:\\text\s*\{)?\s*[A-Z]\s*[:.)]\s")
