"""Users' functions that hang, crash, print and leave processes behind: what it costs, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from rft_core.errors import GraderUnavailable, RewardFunctionError, SettingsError
from rft_core.rewards import build_grader, custom, unscored_reasons
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction, RewardSettings, StepSettings
from rft_core.rewards.steps import build_splitter
from rft_core.rewards.user_process import UserCode
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

# Does what the first row's answer says.
MINE = r"""
import atexit, ctypes, json, os, signal, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
calls = []
atexit.register(lambda: (here / "left").write_text("properly"))

def leave_processes():
    # One in our group, one in a session of its own, one that its parent has left.
    code = "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code])
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.run(["sh", "-c", f"setsid {sys.executable} -c '{code}' > /dev/null 2>&1 &"])

def reward(rows):
    what = rows[0].answer
    calls.append(len(rows))
    if what == "leave processes":
        leave_processes()
        (here / "ready").touch()
        time.sleep(600)
    if what == "sleep":
        time.sleep(600)
    if what == "stall":
        (here / "ready").touch()
        9 ** 9 ** 9
    if what == "exit":
        os._exit(7)
    if what == "crash":
        ctypes.string_at(0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        return [1 / (row.rollout_id != "s/p/01") for row in rows]
    if what == "down":
        from rft_core.errors import GraderUnavailable
        class Mine(GraderUnavailable): pass
        raise Mine("the endpoint is down")
    if what == "fork" and os.fork() == 0:
        sys.exit()
    if what == "print":
        print("said on stdout", flush=True)
        os.write(1, b"written to 1\n")
    if what == "calls":
        return [float(len(calls))] * len(rows)
    if what == "environment":
        return [float(os.environ["OF_OURS"])] * len(rows)
    if what == "all":
        return [
            {"score": 1.0, "reason": "why", "n": row.num_tokens, "level": row.metadata["level"],
             "earlier": row.earlier["first"], "steps": [float(end) for end in row.step_ends],
             "asked": len(row.messages), "is_right": [row.prompt_id, row.group_id, row.source, row.dataset,
             row.finish_reason, row.token_ids] == ["p", "step-00001/p", "test", "test", "stop", [5, 7]]}
            for row in rows
        ]
    return [0.5] * len(rows)

async def later(rows):
    import asyncio
    await asyncio.sleep(0.01)
    return [0.25] * len(rows)

def split(text):
    if text == "sleep":
        time.sleep(600)
    return text.split(";")
"""
MOMENT_SECONDS = 5.0


@pytest.fixture
def mine(tmp_path):
    """Scorers of MINE, one per call. All that they started is gone at the end."""
    (tmp_path / "mine.py").write_text(MINE)
    codes = []

    def make(function: str = "reward", seconds: float = 60.0):
        codes.append(UserCode())
        settings = RewardFunction(name="custom", path=f"mine.py:{function}", call_seconds=seconds)
        scorer = custom.build(settings, tmp_path, codes[-1])
        return scorer, codes[-1]

    yield make
    for code in codes:
        code.close()
    assert_gone(below(psutil.Process()))


def rows(what: str | None, count: int = 2) -> list[RewardRow]:
    return [RewardRow(f"s/p/{i:02d}", "p", [], f"text {i}", what, {}, "stop") for i in range(count)]


def below(process: psutil.Process) -> list[psutil.Process]:
    """Those that run a user's file."""
    return [child for child in process.children(recursive=True) if "user_worker.py" in " ".join(child.cmdline())]


def assert_gone(processes: list[psutil.Process], seconds: float = MOMENT_SECONDS) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def wait_until(is_so, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["sleep", "stall"])
def test_a_call_that_does_not_end_costs_its_rows(mine, what):
    """`stall` holds Python's lock for ever, so that no thread or handler of that process could end it."""
    scorer, code = mine(seconds=1.0)
    first = below(psutil.Process())
    began = time.monotonic()
    assert scorer.score(rows(what)) == [Scored(None, "mine.py:reward did not end within 1 s")] * 2
    assert time.monotonic() - began < 10
    assert_gone(first, 0)
    assert code.process_id is None
    assert scorer.score(rows("fine")) == [Scored(0.5)] * 2


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("exit", "with exit status 7"),
        ("crash", "by SIGSEGV"),
        ("killed", "by SIGKILL (memory ran out, or someone killed it)"),
    ],
)
def test_a_process_that_ends_costs_its_rows(mine, what, found):
    scorer, _ = mine()
    assert scorer.score(rows(what)) == [Scored(None, f"mine.py:reward ended its process {found}")] * 2
    assert scorer.score(rows("calls")) == [Scored(1.0)] * 2  # a fresh process has no state


def test_what_it_started_is_killed_with_it(mine, tmp_path):
    scorer, code = mine(seconds=3.0)
    seen = []

    def look():
        wait_until((tmp_path / "ready").exists)
        seen.extend(psutil.Process(code.process_id).children(recursive=True))

    watching = threading.Thread(target=look)
    watching.start()
    assert scorer.score(rows("leave processes"))[0].value is None
    watching.join()
    assert len(seen) == 4  # the function's process, and three that it started
    assert_gone(seen, 0)


def test_state_is_kept_between_calls_and_a_block_is_one_call(mine):
    scorer, _ = mine()
    scorer.score(rows("fine", 1000))
    assert scorer.score(rows("calls", 3)) == [Scored(2.0)] * 3


def test_it_sees_our_environment_and_prints_to_stderr(mine, monkeypatch, capfd):
    monkeypatch.setenv("OF_OURS", "0.75")
    scorer, _ = mine()
    assert scorer.score(rows("environment")) == [Scored(0.75)] * 2
    scorer.score(rows("print"))
    said = capfd.readouterr()
    assert said.out == "" and "said on stdout\nwritten to 1\n" in said.err


def test_errors_name_function_row_and_value_and_hold_the_users_traceback(mine):
    scorer, _ = mine()
    with pytest.raises(
        RewardFunctionError, match=r"custom \(mine.py:reward\) raised ZeroDivisionError: .* at row s/p/01 .*'text 1'"
    ) as raised:
        scorer.score(rows("raise"))
    said = str(raised.value.__cause__)
    assert 'mine.py", line' in said and "in reward" in said and "ZeroDivisionError: division by zero" in said
    with pytest.raises(GraderUnavailable, match="the endpoint is down"):
        scorer.score(rows("down"))
    assert scorer.score(rows("calls")) == [Scored(3.0)] * 2  # the same process all along


def test_a_forked_child_that_comes_back_answers_nothing(mine):
    scorer, _ = mine()
    assert scorer.score(rows("fork")) == [Scored(0.5)] * 2
    assert scorer.score(rows("calls")) == [Scored(2.0)] * 2


def test_async_functions(mine):
    scorer, _ = mine("later")
    assert scorer.score(rows("fine")) == [Scored(0.25)] * 2


def test_a_probe_that_gets_no_answer_is_an_error(mine):
    scorer, _ = mine()
    assert scorer.probe(rows("fine")) == [Scored(0.5)] * 2
    with pytest.raises(RewardFunctionError, match=r"\(mine.py:reward\) must give scores, .* from s/p/00 it ended its"):
        scorer.probe(rows("exit"))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "import os\nos._exit(3)",
            RewardFunctionError,
            "must be importable, but it ended its process with exit",
        ),
        ("import not_there_at_all", RewardFunctionError, "must be importable, it raised ModuleNotFoundError"),
        ("def other(rows): pass", SettingsError, r"has no function 'reward'; it has \['other'\]"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path, text, error, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(error, match=message):
        custom.build(RewardFunction(name="custom", path="bad.py:reward"), tmp_path)


def test_a_fresh_process_must_find_the_same_code(mine, tmp_path):
    scorer, _ = mine()
    scorer.score(rows("exit"))
    (tmp_path / "mine.py").write_text(MINE + "\n")
    with pytest.raises(RewardFunctionError, match=r"mine.py:reward must stay as it was when the run began"):
        scorer.score(rows("fine"))


def test_a_process_that_ended_between_calls_is_replaced(mine):
    scorer, code = mine()
    os.kill(code.process_id, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(code.process_id) or psutil.Process(code.process_id).status() == "zombie")
    assert scorer.score(rows("fine")) == [Scored(0.5)] * 2


def test_exit_handlers_run_when_the_run_is_over(mine, tmp_path):
    scorer, code = mine()
    scorer.score(rows("fine"))
    left = below(psutil.Process())
    assert len(left) == 2
    code.close()
    assert_gone(left, 0)
    assert (tmp_path / "left").read_text() == "properly"
    with pytest.raises(GraderUnavailable, match="was closed"):
        scorer.score(rows("fine"))


def test_closing_ends_a_call_of_another_thread(mine, tmp_path):
    scorer, code = mine()
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(scorer.score(rows("stall"))))
    thread.start()
    wait_until((tmp_path / "ready").exists)
    code.close()
    thread.join(MOMENT_SECONDS)
    assert not thread.is_alive() and scores[0].value is None


class Alarm(Exception):
    """Stands in for Ctrl-C, which pytest keeps to itself."""


def test_an_interrupt_ends_the_process_at_once(mine):
    scorer, _ = mine()
    at_work = below(psutil.Process())

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Alarm):
            scorer.score(rows("stall"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < MOMENT_SECONDS
    assert_gone(at_work, 0)


PARENT = """
import sys
from pathlib import Path
from rft_core.rewards import custom
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction
folder, what = sys.argv[1:]
scorer = custom.build(RewardFunction(name="custom", path="mine.py:reward"), Path(folder))
scorer.score([RewardRow("s/p/00", "p", [], "text", "fine", {}, "stop")])
if what == "rest":
    (Path(folder) / "ready").touch()
    sys.stdin.read()
scorer.score([RewardRow("s/p/00", "p", [], "text", what, {}, "stop")])
"""


@pytest.mark.parametrize("what", ["rest", "stall", "leave processes"])
def test_nothing_outlives_a_kill_of_the_parent(tmp_path, what):
    (tmp_path / "mine.py").write_text(MINE)
    command = [sys.executable, "-c", PARENT, str(tmp_path), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        wait_until((tmp_path / "ready").exists)
        left = psutil.Process(parent.pid).children(recursive=True)
        assert len(left) == (5 if what == "leave processes" else 2)
        parent.kill()
    assert_gone(left)


# Whole graders.

TABLES = (
    rollouts_table(*({"prompt_id": name, "index": i, "text": "t"} for name in "ab" for i in range(2))),
    prompts_table({"prompt_id": "a", "answer": "fine"}, {"prompt_id": "b", "answer": "fine"}),
)


def test_lost_rows_are_unscored_with_the_component_and_counted(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    function = {"name": "custom", "path": f"{tmp_path}/mine.py:reward", "label": "quality"}  # tables hold no folders
    prompts = prompts_table({"prompt_id": "a", "answer": "exit"}, {"prompt_id": "b", "answer": "fine"})
    grader = build_grader(RewardSettings(functions=[function]), tmp_path)
    table = grader.score(TABLES[0], prompts)
    reason = "quality: mine.py:reward ended its process with exit status 7"
    assert table["status"].to_pylist() == ["unscored"] * 4
    assert unscored_reasons(table) == Counter({reason: 4})
    with pytest.raises(GraderUnavailable, match=r"quality: mine.py:reward ended its process"):
        grader.refuse_unscored(unscored_reasons(table), 4)
    assert grader.score(*TABLES)["reward"].to_pylist() == [0.5] * 4
    with pytest.raises(RewardFunctionError, match="must give scores"):
        grader.probe(prompts)
    grader.close()


def test_rows_arrive_whole(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    row = {"prompt_id": "p", "text": "one\ntwo", "token_ids": [5, 6, 7], "mask": [True, False, True]}
    rollouts = rollouts_table(row)
    prompts = prompts_table({"prompt_id": "p", "answer": "all", "metadata": {"level": 3}})
    functions = [
        {"name": "exact_match", "label": "first"},
        {"name": "custom", "path": "mine.py:reward", "label": "mine"},
    ]
    grader = build_grader(RewardSettings(functions=functions, steps={"split": "lines"}), tmp_path)
    (scored,) = grader.score(rollouts, prompts).to_pylist()
    assert dict(scored["components"]) == {
        "first": 0.0,
        "mine": 1.0,
        "mine/n": 2.0,
        "mine/level": 3.0,
        "mine/earlier": 0.0,
        "mine/asked": 2.0,
        "mine/is_right": 1.0,
    }
    assert dict(scored["component_status"])["mine"] == "scored: why"
    assert scored["step_rewards"] == [3.0, 7.0]
    grader.close()


def test_the_limit_is_no_content_and_goes_with_custom():
    short, usual = (RewardFunction(name="custom", path="a.b", call_seconds=seconds) for seconds in (1.0, 600.0))
    assert short.content() == usual.content()
    with pytest.raises(ValueError, match="call_seconds goes with name: custom, got name: exact_match"):
        RewardFunction(name="exact_match", call_seconds=1.0)


def test_a_splitter_is_killed_too(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    code = UserCode()
    settings = StepSettings(split="custom", path="mine.py:split", call_seconds=1.0)
    split, _ = build_splitter(settings, tmp_path, code)
    with pytest.raises(GraderUnavailable, match=r"mine.py:split must divide completions, but it did not end within"):
        split("sleep")
    assert split("a;b") == (1, 3)
    code.close()
