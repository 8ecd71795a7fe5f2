"""Blocks scored beside generation: what waits, what is raised where, and how it ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from data_contracts.ledger import Lease, Ledger
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.errors import GraderUnavailable, RewardFunctionError
from rft_core.rewards import build_grader
from rft_core.rewards.settings import RewardSettings
from tasks.beside import BesideGeneration
from tasks.context import RunContext, register, unregister
from tasks.rewards import score_rollouts
from tasks.scoring import BlockScorer
from tasks.stage import Slot
from tests.rft_core.rewards.judge.endpoint import Act, ScriptedEndpoint
from tests.rft_core.rewards.tables import prompts_table, rollouts_table


def table(number: int) -> pa.Table:
    return pa.table({"number": [number]})


@pytest.fixture
def beside():
    made = BesideGeneration()
    yield made
    made.close(lambda: None)


def test_blocks_are_scored_in_order_and_taken_once(beside):
    scored = []

    def score(number):
        scored.append(number)
        return table(number)

    for number in range(5):
        beside.hand_over("key", number, lambda number=number: score(number))
    assert [beside.take("key", number) for number in (4, 0, 1, 2, 3)] == [table(n) for n in (4, 0, 1, 2, 3)]
    assert scored == [0, 1, 2, 3, 4]
    assert beside.take("key", 0) is None and beside.take("other", 0) is None


def test_an_error_is_raised_where_the_block_is_taken_and_later_blocks_are_left(beside):
    def fails():
        raise GraderUnavailable("it is down")

    may_go_on = threading.Event()
    beside.hand_over("key", 0, lambda: table(0))
    beside.hand_over("key", 1, fails)
    beside.hand_over("key", 2, lambda: table(2))
    beside.hand_over("other", 0, lambda: may_go_on.wait() and table(7))
    may_go_on.set()
    assert beside.take("other", 0) == table(7)
    assert beside.take("key", 0) == table(0)
    with pytest.raises(GraderUnavailable, match="it is down"):
        beside.take("key", 1)
    assert beside.take("key", 1) is None and beside.take("key", 2) is None  # for the stage to score itself


def test_what_is_forgotten_is_not_scored(beside):
    may_go_on, scored = threading.Event(), []
    beside.hand_over("other", 0, lambda: may_go_on.wait() and table(0))
    beside.hand_over("key", 0, lambda: scored.append("key") or table(1))
    beside.forget("key")
    may_go_on.set()
    beside.take("other", 0)
    beside.hand_over("other", 1, lambda: table(2))
    assert beside.take("other", 1) == table(2)
    assert scored == [] and beside.take("key", 0) is None


# The reward stage. Writes down what it is asked; a file says what to do about prompt `c`.
REWARD = """
from pathlib import Path
here = Path(__file__).parent
def length(rows):
    with open(here / "calls.log", "a") as file:
        file.write("".join(row.prompt_id for row in rows) + "\\n")
    about_c = (here / "about_c").read_text()
    if about_c == "raise" and rows[0].prompt_id == "c":
        raise ValueError("c is too hard")
    return [None if about_c == "none" and row.prompt_id == "c" else float(len(row.completion_text)) for row in rows]
"""
BLOCKS = ("ab", "cd", "ef")


@pytest.fixture
def run(tmp_path):
    """An open run with three blocks of rollouts, the first two of them scored beside generation; gives the context,
    what there is to do about prompt c, and how to score."""
    (tmp_path / "mine.py").write_text(REWARD)
    function = {"name": "custom", "label": "length", "path": f"{tmp_path}/mine.py:length"}
    recipe = Recipe.model_validate(
        {
            "steps": 1,
            "model": {"path": "unused"},
            "data": {"source": "unused.jsonl"},
            "reward": {"functions": [function], "max_unscored_fraction": 0.1},
        }
    )
    store, folder = Store(str(tmp_path)), tmp_path / "runs/x"
    lease = Lease.acquire(folder)
    (folder / "ledger").mkdir()
    context = RunContext(tmp_path, "x", recipe, store, Ledger(folder, lease), {"grader": "g"}, Path("unused"), {})
    prompts = store.write("prompts", "p", prompts_table(*({"prompt_id": name} for name in "abcdef")), {})
    scorer = BlockScorer(store, context.grader, prompts)

    def generate(about_c: str) -> None:
        (tmp_path / "about_c").write_text(about_c)
        writer = store.writer("rollouts", "r", {})
        for index, names in enumerate(BLOCKS):
            rows = [{"prompt_id": name, "index": i, "text": "x" * i} for name in names for i in range(2)]
            block = rollouts_table(*rows)
            writer.commit(index, block)
            if index < 2:
                context.beside.hand_over("r", index, lambda block=block: scorer.score(block))
        context.rollouts = writer.close()

    def score(about_c: str) -> list[float]:
        (tmp_path / "about_c").write_text(about_c)
        score_rollouts.fn("x", Slot(1, "rewards"), context.rollouts, prompts)
        ref = context.ledger.get("main", 1, "rewards").refs["rewards"]
        return [block["reward"].to_pylist() for block in store.read_blocks(ref)]

    register(context)
    yield context, generate, score
    unregister("x")
    context.beside.close(context.grader.close)
    lease.release()


def calls(context: RunContext) -> list[str]:
    return (context.root / "calls.log").read_text().split()


def test_the_stage_takes_what_is_scored_and_scores_the_rest(run):
    context, generate, score = run
    generate("fine")
    assert score("fine") == [[0, 1, 0, 1]] * 3
    assert calls(context) == ["aabb", "ccdd", "eeff"]
    assert context.beside.take("r", 0) is None


def test_an_error_is_the_stages_and_a_retry_scores_again(run):
    context, generate, score = run
    generate("raise")
    with pytest.raises(RewardFunctionError, match="raised ValueError: c is too hard"):
        score("raise")
    assert context.ledger.get("main", 1, "rewards") is None
    assert score("fine") == [[0, 1, 0, 1]] * 3
    assert calls(context) == ["aabb", "ccdd", "ccdd", "eeff"]


def test_unscored_rows_wait_for_the_verdict_and_a_retry_scores_them_again(run):
    context, generate, score = run
    generate("none")
    with pytest.raises(GraderUnavailable, match=r"at most 10% .* 2 of 12 are"):
        score("none")
    assert score("fine") == [[0, 1, 0, 1]] * 3
    assert calls(context) == ["aabb", "ccdd", "eeff", "ccdd"]


# How it ends while a grader is stuck.

STUCK = """
import time
def reward(rows):
    if rows[0].rollout_id.startswith("probe"):
        return [1.0] * len(rows)
    time.sleep(600)
"""
PROGRAM = "```python\nimport time\ntime.sleep(600)\n```"


def stuck_functions(tmp_path: Path, url: str) -> dict[str, dict]:
    (tmp_path / "stuck.py").write_text(STUCK)
    return {
        "custom": {"name": "custom", "path": f"{tmp_path}/stuck.py:reward"},
        "code": {"name": "code", "code": {"wall_seconds": 600, "sandbox": "unsafe_unsandboxed"}},
        "judge": {"name": "judge", "judge": {"url": url, "model": "m", "timeout_seconds": 600}},
    }


@pytest.mark.parametrize("name", ["custom", "code", "judge"])
def test_closing_ends_a_stuck_grader(tmp_path, name):
    with ScriptedEndpoint(lambda request: Act({}, hang_seconds=600)) as endpoint:
        function = stuck_functions(tmp_path, endpoint.url)[name]
        grader = build_grader(RewardSettings.model_validate({"functions": [function]}))
        prompts = prompts_table({"prompt_id": "a", "metadata": {"tests": ["assert 1"]}})
        rollouts = rollouts_table({"prompt_id": "a", "text": PROGRAM})
        beside = BesideGeneration()
        beside.hand_over("key", 0, lambda: grader.score(rollouts, prompts))
        time.sleep(1.5)
        began = time.monotonic()
        beside.close(grader.close)
        assert time.monotonic() - began < 2.5
        assert "beside-generation" not in {thread.name for thread in threading.enumerate()}


def test_where_it_helps():
    def works_apart(*functions, **settings) -> bool:
        return build_grader(RewardSettings.model_validate({"functions": functions, **settings})).works_apart

    assert works_apart({"name": "math_equivalence"})
    assert works_apart({"name": "exact_match"}, {"name": "judge", "judge": {"url": "http://h", "model": "m"}})
    assert not works_apart({"name": "exact_match"})
    assert not works_apart({"name": "math_equivalence"}, steps={"split": "lines"})
