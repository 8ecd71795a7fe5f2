"""Pairs of answers and gold answers, handed and our own, and input that fights the grader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rft_core.rewards import build_grader, math_equivalence, num_timeouts
from rft_core.rewards.math_equivalence import BULK_ROWS, MathScorer
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction, RewardSettings
from tests.house.sources import REPOSITORY
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

CASES = REPOSITORY / "tests" / "cases"
PAIRS = [
    json.loads(line)
    for name in ("math_pairs.jsonl", "own_math_pairs.jsonl")
    for line in (CASES / name).read_text().splitlines()
]
HANGS = r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^k}}"  # sympy adds the terms up one by one


@pytest.fixture(scope="module")
def scorer():
    made = MathScorer(RewardFunction(name="math_equivalence", math={"workers": 2}))
    yield made
    made.pool.close()


def row(text: str, answer: str | None, finish_reason: str = "stop") -> RewardRow:
    return RewardRow("r", "p", [], text, answer, {}, finish_reason)


def test_pairs_are_distinct():
    assert len({pair["id"] for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_pair(pair, scorer):
    Path("/tmp/owned_by_answer").unlink(missing_ok=True)
    began = time.perf_counter()
    scored = scorer.score([row(pair["prediction"], pair["gold"])])[0]
    assert scored.value == float(pair["expected"]), (pair["note"], scored.reason)
    assert time.perf_counter() - began < 10  # 5 s by the clock of an idle machine, and the workers' start
    assert not Path("/tmp/owned_by_answer").exists()


@pytest.mark.slow
def test_many_rows_are_scored_as_each_alone(scorer):
    rows = [row(pair["prediction"], pair["gold"]) for pair in PAIRS]
    rows += [row("no answer here", "7"), row("7", None), row("7", "")]
    alone = scorer.score(rows)
    repeated = rows * (BULK_ROWS // len(rows) + 1)
    together = MathScorer(RewardFunction(name="math_equivalence", math={"workers": 2})).score(repeated)
    values = [scored.value for scored in alone]
    assert [scored.value for scored in together] == values * (len(repeated) // len(rows))
    assert values[-3:] == [0.0, None, None]


def test_gold_that_cannot_be_read_is_unscored(scorer):
    assert scorer.score([row("5", None), row("5", ""), row("5", "The claim follows by induction.")]) == [
        Scored(None, "the prompt has no answer"),
        Scored(None, "answer: it is empty"),
        Scored(None, "answer: it reads as prose, not as an answer"),
    ]


@pytest.mark.parametrize(
    ("answer", "is_readable"),
    [
        ("42", True),
        ("[3,9)", True),
        ("New York", True),
        ("neither even nor odd", True),
        (r"\triangle ABC", True),
        (r"x = \pm 3", True),
        ("Work: 240-12. Therefore, the answer is: 228.", True),
        ("   ", False),
        (r"\boxed{}", False),
        ("We prove the statement. Let n be even. Then n^2 is even, which shows it.", False),
        (r"\frac{1}{2", False),
        ("x" * 200_000, False),
    ],
)
def test_unreadable_answers(answer, is_readable):
    assert (math_equivalence.unreadable(answer, {}) is None) == is_readable


def test_where_answers_stand():
    tagged = MathScorer(RewardFunction(name="math_equivalence", answer_in="tag.final"))
    assert [scored.value for scored in tagged.score([row("7 <final>8</final>", "8"), row("8", "8")])] == [1.0, 0.0]
    as_json = MathScorer(RewardFunction(name="math_equivalence", answer_in="json.answer"))
    assert as_json.score([row('{"answer": "\\\\frac{1}{2}"}', "0.5")])[0].value == 1.0
    strict = MathScorer(RewardFunction(name="math_equivalence", math={"lenient": False}))
    scores = strict.score([row("It is 7.", "7"), row("The answer is 7.", "7"), row(r"\boxed{7}", "7")])
    assert [scored.value for scored in scores] == [0.0, 1.0, 1.0]


def test_an_open_answer_tag_counts_unless_the_completion_was_cut(scorer):
    text = "<think>a</think><answer>12"
    assert scorer.score([row(text, "12"), row(text, "12", "length")]) == [
        Scored(1.0),
        Scored(0.0, "no answer: the completion ends inside <answer>"),
    ]


# Case rw-07: the instruction and the numbers of the prompt earn nothing; only the completion is scored.
def test_case_rw_07_the_prompt_is_not_scored(scorer):
    assert scorer.score([row("I think it is forty-something.", "42")])[0].value == 0.0


@pytest.mark.slow
def test_case_rw_05_slow_expressions_are_timed_out_and_counted():
    grader = build_grader(RewardSettings(functions=[{"name": "math_equivalence", "math": {"workers": 2}}]))
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{9})!}", HANGS, r"\boxed{7}"]
    prompts = prompts_table(*({"prompt_id": str(index), "answer": "7" if index == 3 else "3"} for index in range(4)))
    rollouts = rollouts_table(*({"prompt_id": str(index), "text": text} for index, text in enumerate(texts)))
    began = time.perf_counter()
    rewards = grader.score(rollouts, prompts)
    assert time.perf_counter() - began < 15
    assert rewards["reward"].to_pylist() == [0.0, 0.0, 0.0, 1.0]
    statuses = [dict(row)["math_equivalence"] for row in rewards["component_status"].to_pylist()]
    assert statuses[0].startswith("scored: too large") and statuses[1].startswith("scored: too large")
    assert statuses[2] == "scored: timeout: the comparison did not end within 4 s"
    assert num_timeouts(rewards) == 1


@pytest.mark.slow
def test_hung_workers_are_replaced_and_equal_pairs_are_judged_once():
    scorer = MathScorer(RewardFunction(name="math_equivalence", math={"workers": 2, "seconds": 1.0}))
    hard = r"\boxed{\csc^2 t}", r"1 + \cot^2 t"
    assert scorer.score([row(*hard)])[0].value == 1.0
    before = scorer.pool.process_ids
    began = time.perf_counter()
    scores = scorer.score([row(HANGS, "3")] * 40 + [row(r"\boxed{\sin^2 t}", r"1 - \cos^2 t")])
    assert time.perf_counter() - began < 10  # forty would take twenty
    assert {scored.value for scored in scores[:-1]} == {0.0} and scores[-1].value == 1.0
    assert not set(before) & set(scorer.pool.process_ids)
    scorer.pool.close()


NASTY = {
    "a megabyte of digits": r"\boxed{" + "7" * 1_000_000 + "}",
    "a megabyte of boxes": r"\boxed{" * 150_000,
    "a megabyte of closed boxes": r"\boxed{1}" * 110_000,
    "deep boxes": r"\boxed{" * 50_000 + "1" + "}" * 50_000,
    "deep brackets": r"\boxed{" + "(" * 1500 + "1" + ")" * 1500 + "}",
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "deep roots": r"\boxed{" + r"\sqrt{" * 35 + "2" + "}" * 35 + "}",
    "deep sets": r"\boxed{" + r"\{" * 500 + "1" + r"\}" * 500 + "}",
    "many values": r"\boxed{\{" + ",".join(map(str, range(900))) + r"\}}",
    "many roots": r"\boxed{" + "+".join(rf"\sqrt{{{n}}}" for n in range(2, 250)) + "}",
    "many signs": r"\boxed{" + "-" * 3000 + "1}",
    "many unions": r"\boxed{" + r"\cup".join(["(1,2)"] * 400) + "}",
    "both signs, often": r"\boxed{" + r"\pm 1" * 30 + "}",
    "a large power of a sum": r"\boxed{(a+b+c+d+f)^{64}}",
    "a fraction of large powers": r"\boxed{\frac{2^{10^{8}}}{3^{10^{8}}}}",
    "a root of large index": r"\boxed{\sqrt[1000000]{2^{1000000}}}",
    "a tower": r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    "open thoughts": "<think>" * 150_000,
    "answers without end": "The answer is " * 70_000,
    "labels without end": "\nAnswer: not" * 80_000,
    "dollars": "$" * 1_000_000,
    "line breaks": "\n" * 1_000_000,
    "stars": "*" * 1_000_000,
    "hashes": "#### " * 200_000,
    "backslashes": "\\" * 1_000_000,
    "letters": "A " * 500_000,
    "text commands": r"\boxed{" + r"\text{" * 600 + "a" + "}" * 600 + "}",
    "null characters": "\\boxed{" + "\0" * 3000 + "}",
    "half a surrogate": "\\boxed{\ud800}",
    "right-to-left digits": "\\boxed{٤٢}",
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
@pytest.mark.parametrize("gold", ["3", "B", r"\{1, 2\}"])
def test_hostile_text_ends_in_time(text, gold, scorer):
    began = time.perf_counter()
    scored = scorer.score([row(text, gold)])[0]
    assert scored.value == 0.0
    assert time.perf_counter() - began < 10  # the limit is 4 s of an idle machine's clock


RUN = """
import sys
from rft_core.rewards.math_equivalence import MathScorer
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction
scorer = MathScorer(RewardFunction(name="math_equivalence", math={"workers": 1, "seconds": 3.0}))
rows = [RewardRow("r", "p", [], text, "1 + \\\\cot^2 t", {}, "stop") for text in (r"\\boxed{\\csc^2 t}", sys.argv[1])]
scorer.score(rows[:1])
print(*scorer.pool.process_ids, flush=True)
scorer.score(rows[1:])
"""


@pytest.mark.slow
@pytest.mark.faults
def test_a_busy_worker_ends_with_its_killed_parent(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", RUN, HANGS]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    time.sleep(0.5)  # into the work that hangs
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([worker], timeout=10)  # its alarm is due after three seconds
    assert not worker.is_running()
