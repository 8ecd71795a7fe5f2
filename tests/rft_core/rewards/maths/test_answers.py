"""Where completions and gold texts state their answers."""

from __future__ import annotations

import pytest

from rft_core.rewards.maths.answers import NoAnswer, find_answer, gold_answer, last_box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}} and \boxed{x^{2}}", "x^{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 9, I think", "9"),
        (r"\boxed{ 5 } Answer: (C)", "5"),  # no line of its own
        ("\\boxed{5}\nAnswer: 6", "6"),
        ("\\boxed{5}\nAnswer: as I said above", "5"),
        ("\\boxed{5}\n#### Solution", "5"),
        ("Answer: 3\nAnswer: 4", "4"),
        ("The answer is 3. The answer is not 4.", "3"),
        ("**Final answer:** $x = 2$", "$x = 2$"),
        ("#### 1,260", "1,260"),
        ("The answer is $5$ dollars because $a=b$.", "$5$ dollars"),
        ("the answer is 2, 3", "2, 3"),
        ("We get $x=1$, hence $y = 4$.", "y = 4"),
        ("It is 12 (of 15).", "15"),
        ("<think>\\boxed{1}</think> The answer is 2", "2"),
        ("<think>a</think><answer> 7 </answer>", "7"),
    ],
)
def test_found(text, answer):
    assert find_answer(text, "number") == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{12", "the last box is not closed"),
        (r"\boxed{1} \boxed{\frac{1}{2}", "the last box is not closed"),
        (r"\boxed{ }", "the box is empty"),
        ("<think> 12", "the completion ends inside its reasoning"),
        ("</think> a <think> 12", "the completion ends inside its reasoning"),
        ("no idea", "no box, and no number"),
        ("It is not 12", "the last number is denied"),
        ("<answer></answer>", "<answer> is empty"),
    ],
)
def test_not_found(text, reason):
    assert find_answer(text, "number") == NoAnswer(f"no answer: {reason}")


def test_what_is_not_stated_counts_only_if_lenient():
    assert find_answer("So it is 12.", "number") == "12"
    assert isinstance(find_answer("So it is 12.", "number", is_lenient=False), NoAnswer)
    assert find_answer("I would go for B, because a train stops.", "option") == "B"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42"),
        (r"Hence $u = \boxed{4}$.", "4"),
        ("48/2 = 24\n#### 72", "72"),
        ("Work: 240-12. Therefore, the answer is: 228.", "228"),
        ("Answer: B", "B"),
        ("[3,9)", "[3,9)"),
    ],
)
def test_gold(gold, answer):
    assert gold_answer(gold) == answer


def test_boxes_within_boxes():
    assert last_box(r"\boxed{\boxed{17}}.") == ("{17}", 18)
    assert last_box("no box") is None
