"""Whole runs whose blocks are scored while the next are generated."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest

from data_contracts.ledger import Ledger
from flows.train import train
from rft_core.config import Recipe
from rft_core.engines import ENGINES
from rft_core.engines.scripted import ScriptedEngine
from rft_core.errors import RewardFunctionError
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests, generated_blocks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 2
BLOCKS = 3  # of a step
REWARD = """
import time
from pathlib import Path

here = Path(__file__).parent

def reward(rows):
    is_probe = rows[0].rollout_id.startswith("probe")
    what = (here / "what").read_text() if (here / "what").exists() else ""
    if what == "raise" and not is_probe:
        raise ValueError("no such score")
    if what == "sleep" and not is_probe:
        (here / "asleep").touch()
        time.sleep(600)
    with open(here / "scored.log", "a") as file:
        file.write(rows[0].rollout_id + "\\n")
    return [float(sum(map(ord, row.completion_text)) % 7) for row in rows]
"""


@pytest.fixture
def recipe_of(recipe_file: Path, tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARD)

    def make(*overrides: str) -> Recipe:
        functions = json.dumps([{"name": "custom", "path": f"{tmp_path}/rewards.py:reward"}])
        always = ["rollout.engine=scripted", "evaluation.every=0", f"reward.functions={functions}"]
        return load_recipe(recipe_file, [*always, *overrides])

    return make


def engine_that(before_block):
    """The scripted engine, which first calls `before_block(number of the call)`."""
    calls = []

    class Engine(ScriptedEngine):
        def generate(self, *arguments, **named):
            calls.append(1)
            before_block(len(calls))
            return super().generate(*arguments, **named)

    return lambda holder, settings, place: Engine(holder.tokenizer, settings.script)


def num_scored(folder: Path) -> int:
    log = folder / "scored.log"
    return log.read_text().count("step-") if log.exists() else 0


def wait_until(is_so, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def at_work() -> tuple[list[psutil.Process], list[str]]:
    """Processes of users' functions, and threads that score, which this process has."""
    children = psutil.Process().children(recursive=True)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "beside-generation"]
    return [child for child in children if "user_worker.py" in " ".join(child.cmdline())], threads


def test_a_block_is_scored_before_the_next_is_generated_and_tables_are_the_same(recipe_of, tmp_path, monkeypatch):
    """The engine waits until all committed blocks are scored, so that a run which scored later would never end."""
    train(recipe=recipe_of("execution.score_beside_generation=false"), run="x", root=str(tmp_path / "after"))
    (tmp_path / "scored.log").unlink()
    engine = engine_that(lambda number: wait_until(lambda: num_scored(tmp_path) == number - 1))
    monkeypatch.setitem(ENGINES, "scripted", engine)
    train(recipe=recipe_of(), run="x", root=str(tmp_path / "beside"))
    assert num_scored(tmp_path) == STEPS * BLOCKS  # each once
    assert all_digests(tmp_path / "beside", "x") == all_digests(tmp_path / "after", "x")
    assert at_work() == ([], [])


def test_a_graders_error_is_raised_when_the_rollouts_are_made(recipe_of, tmp_path):
    (tmp_path / "what").write_text("raise")
    with pytest.raises(RewardFunctionError, match="raised ValueError: no such score"):
        train(recipe=recipe_of(), run="x", root=str(tmp_path))
    ledger = Ledger(tmp_path / "runs/x")
    assert ledger.get("main", 1, "rollouts") is not None and ledger.get("main", 1, "rewards") is None
    (tmp_path / "what").unlink()
    train(recipe=recipe_of(), run="x", root=str(tmp_path))
    assert len(generated_blocks(tmp_path, "x")) == STEPS * BLOCKS  # those of step 1 once


def test_an_interrupt_leaves_no_grader_at_work(recipe_of, tmp_path, monkeypatch):
    """The function sleeps on the first block when the second is interrupted."""
    (tmp_path / "what").write_text("sleep")

    def interrupt(number):
        if number == 2:
            wait_until((tmp_path / "asleep").exists)
            raise KeyboardInterrupt

    monkeypatch.setitem(ENGINES, "scripted", engine_that(interrupt))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(recipe=recipe_of(), run="x", root=str(tmp_path))
    assert time.monotonic() - began < 60
    assert at_work() == ([], [])
    assert json.loads((tmp_path / "runs/x/state.json").read_text())["state"] == "interrupted"
