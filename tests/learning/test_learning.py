"""The task gives nothing away, verdicts are by hand, and one case with its control runs for one seed. All cases and
seeds: `make learning`."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rft_core.algorithms import ALGORITHMS
from rft_core.recipes import load_recipe
from tests.faults.harness import Runs
from tests.learning.cases import CASES, LN2, Case
from tests.learning.measure import Gain, Outcome, judge, run_case
from tests.learning.task import write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("learning") / "task")


def lines(task: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def test_train_and_held_out_prompts_share_no_text(task):
    train, heldout = ({row["prompt"] for row in lines(task, f"prompts-{part}")} for part in ("train", "heldout"))
    assert (len(train), len(heldout), train & heldout) == (480, 240, set())


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_no_constant_answer_gets_much_more_than_one_digit_in_ten(task, part):
    answers = [row["answer"] for row in lines(task, f"prompts-{part}")]
    best = sum(max(Counter(answer[place] for answer in answers).values()) for place in (0, 1))
    assert best / (2 * len(answers)) < 0.15


def test_controls_hold_no_right_answer_and_the_same_completions(task):
    answers = {row["prompt"]: row["answer"] for row in lines(task, "prompts-train")}
    for name, keys in (("answers-control", ["completion"]), ("pairs-control", ["chosen", "rejected"])):
        rows = lines(task, name)
        assert [row["prompt"] for row in rows] == list(answers)
        for key in keys:
            assert sorted(row[key] for row in rows) == sorted(answers.values())
            assert all(row[key] != answers[row["prompt"]] for row in rows)
    for row in lines(task, "pairs-train"):
        assert row["chosen"] == answers[row["prompt"]] != row["rejected"]


def test_a_prompt_is_a_token_a_character(task):
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "4071"}], tokenize=True, return_dict=False)
    assert [tokenizer.decode([number]) for number in ids] == ["4", "0", "7", "1", "="]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_and_its_control_is_a_valid_recipe_that_differs_in_the_truth_alone(task, case):
    assert case.name in ALGORITHMS
    true, control = (
        load_recipe(task / f"{case.recipe}.yaml", [part.format(task=task) for part in sets])
        for sets in (case.sets, (*case.sets, *case.control))
    )
    assert true != control
    given = {"data": true.data} if case.recipe == "given" else {"reward": true.reward}
    assert control.model_copy(update=given) == true


def outcome(seed: int, before: float, after: float, error: float = 0.0, first_loss: float = 0.0) -> Outcome:
    return Outcome(seed, before, after, error, 0.0, first_loss, steps=9)


CASE = Case("toy", "sampled", "mean_reward", 0.3, (), ())


def test_a_gain_has_the_errors_of_seeds_and_of_prompts():
    # Gains .3, .5 and .7: mean .5, variance .04 / 3 over the seeds; over the prompts (.1^2 + .1^2 + .2^2) / 3 = .02.
    gain = Gain.of([outcome(0, 0.2, 0.5, 0.1), outcome(1, 0.2, 0.7, 0.1), outcome(2, 0.2, 0.9, 0.2)], CASE)
    assert (gain.mean, gain.error) == (pytest.approx(0.5), pytest.approx((0.04 / 3 + 0.02) ** 0.5))
    assert Gain.of([outcome(0, 1.0, 0.4)], replace(CASE, falls=True)).mean == pytest.approx(0.6)
    # Of a metric that starts below chance only what is above chance counts.
    assert Gain.of([outcome(0, 0.0, 0.9)], replace(CASE, chance=0.5)).mean == pytest.approx(0.4)
    assert Gain.of([outcome(0, 0.6, 0.9)], replace(CASE, chance=0.5)).mean == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "afters", "controls", "said"),
    [
        ({}, (0.6, 0.6, 0.7), (0.2, 0.1, 0.25), []),
        ({}, (0.3, 0.3, 0.4), (), ["must reach 0.3"]),
        ({}, (0.0, 0.3, 1.3), (), ["must exceed 2 standard errors"]),  # gains -.2, .1, 1.1: .33 +- .39
        ({}, (0.6, 0.6, 0.7), (0.4, 0.4, 0.4), ["more than 2 standard errors", "more than a third"]),
        ({}, (0.6, 0.6, 0.7), (0.22, 0.22, 0.22), ["more than 2 standard errors"]),
        ({"least": 0.65}, (0.6, 0.7, 0.7), (), ["seed 0 ends at 0.6"]),
        ({"start": 0.0}, (0.6, 0.6, 0.7), (), [f"seed {seed} starts at 0.2" for seed in range(3)]),
        ({"first_loss": LN2}, (0.6, 0.6, 0.7), (), [f"seed {seed} has first loss 0" for seed in range(3)]),
        ({"falls": True}, (0.6, 0.6, 0.7), (), ["must reach 0.3", "must exceed"]),
    ],
)
def test_verdicts(changes: dict[str, Any], afters: tuple[float, ...], controls: tuple[float, ...], said: list[str]):
    outcomes, control = ([outcome(i, 0.2, after) for i, after in enumerate(each)] for each in (afters, controls))
    found = judge(replace(CASE, **changes), outcomes, control).faults
    assert len(found) == len(said) and all(part in fault for part, fault in zip(said, found, strict=True))


class Row:
    def __init__(self, completion_text: str, answer: str = "42", rollout_id: str = "r") -> None:
        self.completion_text, self.answer, self.rollout_id = completion_text, answer, rollout_id


def test_the_reward_is_the_share_of_digits(task, monkeypatch):
    monkeypatch.syspath_prepend(str(task))
    rewards = importlib.import_module("rewards")  # as a run finds it: beside the recipe
    for name in ("rewards", "shuffled"):
        monkeypatch.delitem(sys.modules, name)
    matches, matches_dealt_out = rewards.matches, rewards.matches_dealt_out
    given = [Row(text, rollout_id=text) for text in ("42", "41", "24", "4", "421", "")]
    assert matches(given) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    dealt = matches_dealt_out(given)
    assert sorted(dealt) == sorted(matches(given)) and dealt != matches(given)
    assert sum(map(Fraction, dealt)) == Fraction(3, 2)


@pytest.mark.slow
def test_a_case_holds_for_one_seed(task, prefect_api, tmp_path):
    runs = Runs(prefect_api, tmp_path / "runs.log")
    try:
        verdict = run_case(runs, CASES["dpo"], (3,), task, tmp_path, with_control=True)
    finally:
        runs.close()
    assert verdict.faults == []
    (only,) = verdict.outcomes
    assert (only.before, only.steps) == (0.0, 16) and only.first_loss == pytest.approx(LN2, abs=1e-12)
