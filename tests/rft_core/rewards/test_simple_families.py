"""exact_match and answer_format."""

from __future__ import annotations

import time

import pytest

from rft_core.errors import SettingsError
from rft_core.rewards import answer_format, exact_match
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction


def row(text: str, answer: str | None = None) -> RewardRow:
    return RewardRow("r", "p", [], text, answer, {}, "stop")


def test_exact_match():
    scorer = exact_match.build(RewardFunction(name="exact_match"), None)
    rows = [row(" yes\n", "yes"), row("Yes", "yes"), row("yes!", "yes"), row("", ""), row("x", None)]
    assert scorer.score(rows) == [
        Scored(1.0),
        Scored(0.0),
        Scored(0.0),
        Scored(1.0),
        Scored(None, "the prompt has no answer"),
    ]


def test_exact_match_ignores_case_by_folding():
    scorer = exact_match.build(RewardFunction(name="exact_match", ignore_case=True), None)
    assert [s.value for s in scorer.score([row("YES", "yes"), row("STRASSE", "stra\u00dfe")])] == [1.0, 1.0]


def formatted(pattern: str, text: str) -> Scored:
    scorer = answer_format.build(RewardFunction(name="answer_format", pattern=pattern), None)
    return scorer.score([row(text)])[0]


TAGS = r"<think>.*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),  # the dot crosses lines
        ("<think>a</think><answer>4</answer> and more", 0.0),  # the whole completion must match
        ("sure: <think>a</think><answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text, expected):
    assert formatted(TAGS, text).value == expected


def test_backtracking_ends_with_a_reason():
    began = time.perf_counter()
    scored = formatted(r"(?:a|a)*", "a" * 40 + "b")  # 2^40 ways to fail
    assert scored.value == 0.0
    assert scored.reason is not None and scored.reason.startswith("timeout")
    assert time.perf_counter() - began < 20


def test_wrong_pattern_is_a_settings_error():
    with pytest.raises(SettingsError, match=r"answer_format: pattern must be a regular expression, got '\(a'"):
        formatted("(a", "a")
