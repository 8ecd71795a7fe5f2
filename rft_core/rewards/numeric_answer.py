r"""1.0 if the last number in the completion equals the answer within a tolerance, else 0.0.

Numbers: 42  -3  +7  1,234.56  .5  1e6  3/4  50%  $1,000  -$5, U+2212 as minus, and of LaTeX 1{,}000  \frac{3}{4}
2\frac{1}{4}  50\%  \$5. A minus after a digit, letter or closing bracket is a subtraction (5-3 ends in 3); "12.34.56"
and "3/4/2024" are no numbers. A percentage equals its plain reading and its hundredth (50% is 50 or 0.5), so nobody is
right by a factor of 100 without a percent sign. Values are fractions of integers: no rounding, no overflow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from rft_core.rewards.extract import NotThere, extract
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1
# A number of more characters, or of a larger exponent, is not read: exact arithmetic must stay cheap on hostile text.
MAX_NUMBER_CHARACTERS = 1000
MAX_EXPONENT = 1000
WINDOW_CHARACTERS = 4 * MAX_NUMBER_CHARACTERS  # before the last digit; holds any readable fraction with room to spare
TAIL_CHARACTERS = 6  # after the last digit: a closing brace and a percent sign

NUMBER = re.compile(
    r"""
    (?P<sign>(?<![0-9A-Za-z)\]}])[-+])?
    (?:\\?[$€£¥][ ]?)?
    (?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![.0-9])\.[0-9]+)
    (?:[eE](?P<exponent>[-+]?[0-9]+))?
    (?:[ ]?/[ ]?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?
    (?P<rest>(?:[./][0-9]+)*)
    (?P<percent>[ ]?\\?%)?
    """,
    re.VERBOSE,
)
LAST_DIGIT = re.compile(r".*[0-9]", re.DOTALL)  # from the end, in one scan
LATEX_FRACTION = re.compile(
    r"(?:(?<![0-9.])([0-9]{1,999})[ ]?)?\\[dt]?frac[ ]?\{([-+]?[0-9]{1,999})\}[ ]?\{([0-9]{1,999})\}"
)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number as it stood in a text. `value` of a percentage is before division by 100."""

    value: Fraction
    is_percent: bool
    text: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a text holds no number that can be compared."""

    reason: str


def find_last_number(text: str) -> Number | Unreadable:
    """The last number in a text. Reads a window before the last digit, so any length of text costs one scan.

    >>> find_last_number("2 + 2 is 5, no: -4.50 dollars").value
    Fraction(-9, 2)
    >>> find_last_number("I do not know")
    Unreadable(reason='no number')
    """
    last = LAST_DIGIT.match(text)
    if last is None:
        return Unreadable("no number")
    end = last.end() - 1
    start = max(0, end - WINDOW_CHARACTERS)
    match = None
    for match in NUMBER.finditer(_plain(text[start : end + 1 + TAIL_CHARACTERS])):  # noqa: B007 (the last one is wanted)
        pass
    if match is None or (start > 0 and match.start() == 0):
        return Unreadable("the last number is too long to read")
    return _read(match)


@lru_cache(maxsize=4096)  # a group's completions share their answer
def parse_number(text: str) -> Number | Unreadable:
    """A text that is one number and nothing else; what follows #### where that mark occurs (GSM8K's form).

    >>> parse_number("$1,000").value, parse_number("12.34.56")
    (Fraction(1000, 1), Unreadable(reason="'12.34.56' is no number"))
    """
    stripped = text[text.rfind("####") + 4 :] if "####" in text else text
    stripped = stripped.strip().strip("$").strip().removesuffix(".")
    if not stripped:
        return Unreadable("it is empty")
    if len(stripped) > WINDOW_CHARACTERS:
        return Unreadable("it is too long to be a number")
    match = NUMBER.fullmatch(re.sub(r"^([-+]) ", r"\1", _plain(stripped)))
    return _read(match) if match else Unreadable(f"{_shown(text)} is no number")


def is_equal(number: Number, answer: Number, tolerance: Fraction) -> bool:
    """|number - answer| <= tolerance x max(1, |answer|), in either reading of a percentage that stands alone."""
    pairs = [(number.value, answer.value)]
    if number.is_percent and not answer.is_percent:
        pairs.append((number.value / 100, answer.value))
    if answer.is_percent and not number.is_percent:
        pairs.append((number.value, answer.value / 100))
    return any(ours == theirs or _is_near(ours, theirs, tolerance) for ours, theirs in pairs)


def _is_near(ours: Fraction, theirs: Fraction, tolerance: Fraction) -> bool:
    """In integers, which takes a tenth of the time of fractions."""
    a, b, c, d = ours.numerator, ours.denominator, theirs.numerator, theirs.denominator
    return abs(a * d - c * b) * tolerance.denominator <= tolerance.numerator * max(d, abs(c)) * b


def numeric_answer(row: RewardRow, tolerance: Fraction, answer_in: str | None = None) -> Scored:
    reason = _unreadable(row.answer)
    if reason is not None:
        return Scored(None, reason)
    try:
        number = find_last_number(extract(row.completion_text, answer_in))
    except NotThere as error:
        return Scored(0.0, f"completion: {shortened(str(error), 120)}")
    if isinstance(number, Unreadable):
        return Scored(0.0, f"completion: {number.reason}")
    return Scored(float(is_equal(number, parse_number(row.answer), tolerance)))


def unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
    return _unreadable(answer)


def _unreadable(answer: str | None) -> str | None:
    if answer is None:
        return "the prompt has no answer"
    number = parse_number(answer)
    return f"answer: {number.reason}" if isinstance(number, Unreadable) else None


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    tolerance = Fraction(str(settings.tolerance))  # the decimal that the user wrote, not its binary neighbour

    def score(rows: list[RewardRow]) -> list[Scored]:
        return [numeric_answer(row, tolerance, settings.answer_in) for row in rows]

    return Scorer(score, {"semantics": SEMANTICS}, unreadable)


def _plain(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\,", ",")
    return LATEX_FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    whole, numerator, denominator = match.groups()
    if whole is not None:
        numerator = str(int(whole) * int(denominator) + int(numerator))
    glued = match.start() > 0 and match.string[match.start() - 1] in "0123456789"
    return f"{' ' if glued else ''}{numerator}/{denominator}"


def _read(match: re.Match[str]) -> Number | Unreadable:
    text = match.group().strip()
    exponent = match["exponent"] or "0"
    if match["rest"]:
        return Unreadable(f"{_shown(text)} is no number")
    parts = (match["value"], match["divisor"] or "1")
    if max(map(len, parts)) > MAX_NUMBER_CHARACTERS or len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return Unreadable(f"{_shown(text)} is too long or too large to read")
    digits = parts[0].replace(",", "")
    value = Fraction(int(digits) if digits.isdecimal() else digits)
    if match["divisor"]:
        divisor = Fraction(parts[1])
        if divisor == 0:
            return Unreadable(f"{_shown(text)} divides by zero")
        value /= divisor
    if match["exponent"]:
        value *= Fraction(10) ** int(exponent)
    return Number(-value if match["sign"] == "-" else value, bool(match["percent"]), text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
