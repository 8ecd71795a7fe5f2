"""Multiple choice by letter and by the text of a choice."""

from __future__ import annotations

import pytest

from rft_core.rewards import choice
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction

COLOURS = ["red", "green", "blue", "none of the above"]


def score(text: str, answer: str | None, choices: object = None, finish_reason: str = "stop", **settings) -> Scored:
    scorer = choice.build(RewardFunction(name="choice", **settings), None)
    metadata = {} if choices is None else {"choices": choices}
    return scorer.score([RewardRow("r", "p", [], text, answer, metadata, finish_reason)])[0]


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(b)",
        "**B**",
        r"\boxed{B}",
        r"so \boxed{\text{(B)}}",
        r"A, then C, but \boxed{A} is wrong: \boxed{B: green}",
        "<think>A?</think><answer>B</answer>",
        "The answer is (B).",
        "The answer is B. Note that A is a common trap.",
        "Long thoughts on A and C.\nAnswer: B",
        "Long thoughts on A and C.\n\nB) green",
        "Thoughts.\nOption B",
        "**Answer:** B. green",
        "The correct option is B",
    ],
)
def test_right_letters(text):
    assert score(text, "B") == Scored(1.0)
    assert score(text, "(B)", COLOURS) == Scored(1.0)
    assert score(text, "C").value == 0.0


@pytest.mark.parametrize("text", ["green", "The answer is green.", r"\boxed{\text{Green}}", "<answer>green</answer>"])
def test_the_text_of_the_choice_counts(text):
    assert score(text, "B", COLOURS) == Scored(1.0)
    assert score(text, "green", COLOURS) == Scored(1.0)
    assert score(text, "B").value == 0.0
    assert score(text, "C", COLOURS) == Scored(0.0)


@pytest.mark.parametrize(
    "choices",
    [{"A": "red", "B": "green"}, {"a": "red", "b": "green"}, {"label": ["A", "B"], "text": ["red", "green"]}],
)
def test_forms_of_choices(choices):
    assert score("green", "B", choices) == Scored(1.0)
    assert score("A", "green", choices) == Scored(0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A or B", "ambiguous: A or B"),
        (r"\boxed{A, B}", "ambiguous: A, B"),
        ("The answer is A or B.", "ambiguous: A or B"),
        ("", "no answer: the completion is empty"),
        ("I don't know", "no option is named: I don't know"),
        ("A good question.", "no option is named: A good question."),
        (r"It is \boxed{B", "no answer: the last box is not closed"),
        ("<think>B", "no answer: the completion ends inside its reasoning"),
        ("F", "F is none of the choices"),
    ],
)
def test_what_chooses_nothing_says_why(text, reason):
    assert score(text, "B", COLOURS) == Scored(0.0, reason)


@pytest.mark.parametrize(
    ("answer", "choices", "reason"),
    [
        (None, None, "the prompt has no answer"),
        ("green", None, "the answer is neither a letter nor the text of a choice"),
        ("", None, "the answer is neither a letter nor the text of a choice"),
        ("F", COLOURS, "the answer is F, and the choices are A, B, C, D"),
        ("red", ["red", "red"], "the answer is the text of several choices: A, B"),
    ],
)
def test_answers_that_cannot_be_read(answer, choices, reason):
    assert score("B", answer, choices) == Scored(None, reason)
    assert choice.unreadable(answer, {"choices": choices}) == reason


def test_where_the_choice_stands():
    assert score("A <pick>B</pick> C", "B", answer_in="tag.pick") == Scored(1.0)
    assert score('{"choice": "B"}', "B", answer_in="json.choice") == Scored(1.0)
    assert score("B", "B", answer_in="tag.pick").value == 0.0
    scorer = choice.build(RewardFunction(name="choice", choice={"field": "options"}), None)
    assert scorer.score([RewardRow("r", "p", [], "green", "B", {"options": COLOURS}, "stop")]) == [Scored(1.0)]


def test_a_cut_answer_tag_chooses_nothing():
    assert score("<answer>B", "B", finish_reason="length").value == 0.0
    assert score("<answer>B", "B").value == 1.0
