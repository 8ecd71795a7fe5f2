"""Numbers are read as a person would read them, exactly, and no text can stall the reading."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from rft_core.rewards import numeric_answer
from rft_core.rewards.numeric_answer import Number, Unreadable, find_last_number, parse_number
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction


def score(text: str, answer: str | None, **settings: float):
    function = RewardFunction(name="numeric_answer", **settings)
    row = RewardRow("r", "p", [], text, answer, {}, "stop")
    return numeric_answer.build(function, None).score([row])[0]


# Case gsm8k_values (open-instruct).
@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("so -3", "-3", 1), ("it is +7", "7", 1), ("-3.5", "-3.5", 1), (r"\boxed{-3}", "-3", 1), ("3", "-3", 0)],
)
def test_gsm8k_values(text, answer, expected):
    assert score(text, answer).value == expected


# Case to_float (torchforge).
@pytest.mark.parametrize(
    ("text", "expected"),
    [("$1,000", 1000), ("1,234.56", Fraction(123456, 100)), ("$ 42.50 ", Fraction(85, 2)), ("1e6", 10**6)],
)
def test_to_float(text, expected):
    assert parse_number(text).value == expected
    assert find_last_number(f"It costs {text} now.").value == expected


def test_to_float_refuses_two_points():
    assert parse_number("12.34.56") == Unreadable("'12.34.56' is no number")
    assert score("release 12.34.56", "56").value == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 2 = 5", 5),
        ("10-3", 3),  # a subtraction, not -3
        ("x=-3", -3),
        ("\u22127 degrees", -7),
        ("-$5 or $-5", -5),
        ("3/4 of it", Fraction(3, 4)),
        (r"thus \frac{3}{4}.", Fraction(3, 4)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"2\frac{1}{4}", Fraction(9, 4)),  # (2 x 4 + 1) / 4
        ("1{,}250{,}000", 1250000),  # math-044
        ("between 3,4", 4),  # math-047: a comma list is not 34
        ("96, in total, for that month.", 96),  # math-052
        (".5", Fraction(1, 2)),
        ("It is 42.", 42),
        ("1.5E-3", Fraction(3, 2000)),
        ("wait 5...6", 6),
        ("41 or 42?\n\n" + "Indeed. " * 5000, 42),  # a long tail hides nothing (dapo_tail_window)
    ],
)
def test_last_number(text, expected):
    assert find_last_number(text).value == expected


@pytest.mark.parametrize("text", ["", "I think it is forty-something.", "\u00bd", "\u0663"])
def test_no_number_is_zero_with_a_reason(text):
    scored = score(text, "42")
    assert scored.value == 0.0
    assert scored.reason == "completion: no number"


@pytest.mark.parametrize("text", ["3/0", "on 3/4/2024", "1e999999999", "9" * 5000])
def test_what_looks_like_a_number_and_is_none(text):
    assert isinstance(find_last_number(text), Unreadable)
    assert score(text, "3").value == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("50%", "50", 1),
        ("50%", "0.5", 1),
        ("0.375", r"37.5\%", 1),  # math-039
        (r"10\%", "1/10", 1),  # math-040
        ("50", "0.5", 0),  # a factor of 100 without a percent sign is wrong
        ("0.5%", "50%", 0),
    ],
)
def test_percent(text, answer, expected):
    assert score(text, answer).value == expected


def test_tolerance_is_decimal_and_relative_above_one():
    assert score("0.333333", "1/3").value == 1.0  # off by 3.3e-7
    assert score("1.01", "1", tolerance=0.01).value == 1.0  # exactly at the bound; 1.01 - 1 > 0.01 in floats
    assert score("1.0101", "1", tolerance=0.01).value == 0.0
    assert score("1010", "1000", tolerance=0.01).value == 1.0
    assert score("0", "0.02", tolerance=0.01).value == 0.0  # absolute below 1
    assert score("9007199254740993", "9007199254740992", tolerance=0).value == 0.0  # equal as floats


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "the prompt has no answer"),
        ("", "answer: it is empty"),
        ("five", "answer: 'five' is no number"),
        ("3, 4", "answer: '3, 4' is no number"),
        ("1/0", "answer: '1/0' divides by zero"),
    ],
)
def test_unreadable_answers_are_unscored(answer, reason):
    scored = score("5", answer)
    assert (scored.value, scored.reason) == (None, reason)


def test_answer_after_the_mark_of_gsm8k():
    assert score("18 dollars", "16 - 3 - 4 = 9, 9 * 2 = 18\n#### 18").value == 1.0
    assert parse_number("$5$").value == 5
    assert parse_number("- 3.").value == -3


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**7,
        "0" * 10**7 + "a",
        "a" * 10**7,
        "1/" * 10**6 + "1",
        "1,000," * 10**6 + "000",
        r"\frac{" * 10**6 + "1",
        "9" * 999 + r"\frac" * 500 + "1",
        "-" * 10**6 + "1",
        "1 " * 10**6 + " " * 10**6 + "%",
    ],
)
def test_hostile_text_ends_in_time(text):
    began = time.perf_counter()
    score(text, "3")
    assert isinstance(parse_number(text), Number | Unreadable)
    assert time.perf_counter() - began < 5  # milliseconds to a tenth; a squared cost would be hours
