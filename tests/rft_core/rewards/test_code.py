"""From completions and rows to scores: every handed program, forms of tests, credit, languages, secrets."""

from __future__ import annotations

import json
import shutil

import pytest
from pydantic import ValidationError

from data_contracts.validation import check_table
from rft_core.errors import SettingsError
from rft_core.rewards import build_grader, code
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction, RewardSettings
from tests.rft_core.rewards.programs import is_expected, read_cases, score
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
PIPELINE = {case["id"]: case for case in read_cases("pipeline_cases.jsonl")}


def wrong_ones(cases, **settings):
    """The cases whose score is not of their kind, with the score."""
    scores = score([(case["program"], case["tests"]) for case in cases], **settings)
    return [
        (case["id"], scored)
        for case, scored in zip(cases, scores, strict=True)
        if not is_expected(scored, case["expected_score_kind"])
    ]


def test_every_handed_program_gets_its_kind():
    assert wrong_ones(read_cases("code_programs.jsonl")) == []


def test_partial_credit_goes_on_after_a_failure():
    # code-30: signs of 5 and 0 are right, of -5 and -1 wrong.
    case = next(case for case in read_cases("code_programs.jsonl") if case["id"] == "code-30")
    assert score([(case["program"], case["tests"])], credit="partial")[0].value == 0.5
    assert score([(case["program"], case["tests"])])[0].value == 0.0


def test_partial_credit_counts_what_was_never_reached():
    # The second of three calls ends the process: one passed, one failed, one never ran.
    program = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x\n"
    tests = "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3\n"
    scored = score([(program, tests)], credit="partial")[0]
    assert scored.value == pytest.approx(1 / 3)
    assert scored.metrics == {"has_program": 1.0, "passed": 1.0, "tests": 3.0}


@pytest.mark.slow
def test_kinds_hold_ten_times_in_parallel_with_honest_programs():
    """The handed programs ten times over, honest ones between them, in one batch of four at once."""
    handed = [case for case in read_cases("code_programs.jsonl") for _ in range(10)]
    honest = [case for case in read_cases("own_programs.jsonl") if case["id"].startswith("honest/")]
    mixed = [case for index, case in enumerate(handed) for case in (case, honest[index % len(honest)])]
    assert wrong_ones(mixed, workers=4, cpu_seconds=2.0) == []  # a hoard of memory takes time to fill


@pytest.mark.slow
def test_honest_programs_of_many_kinds_pass():
    cases = [case for case in read_cases("own_programs.jsonl") if not case["id"].startswith("hostile/")]
    assert wrong_ones(cases, cpu_seconds=5.0) == []


@pytest.mark.slow
def test_hostile_programs_gain_nothing():
    cases = [case for case in read_cases("own_programs.jsonl") if case["id"].startswith("hostile/")]
    assert len(cases) >= 60
    assert wrong_ones(cases) == []


@pytest.mark.parametrize("given", PIPELINE["rw-11-no-tests"]["input"], ids=lambda given: given["id"])
def test_rw_11_no_tests_is_unscored(given):
    assert score([(given["program"], given["tests"])])[0].value is None
    prompts = prompts_table({"prompt_id": "p", "metadata": {"tests": given["tests"]}})
    grader = build_grader(RewardSettings(functions=[RewardFunction(name="code")]))
    assert [bad.prompt_id for bad in grader.unreadable_answers(prompts)] == ["p"]


def test_rw_13_a_program_sees_no_secret(monkeypatch, tmp_path):
    case = PIPELINE["rw-13-secrets-in-environment"]["input"]
    for name, value in case["parent_env"].items():
        monkeypatch.setenv(name, value)
    secret = tmp_path / "secret"
    secret.write_text("canary-5")
    # It prints what it sees; every line of it is held against the canaries here, so that a leak is a wrong answer.
    spy = (
        "import glob, io, os, contextlib\nseen = io.StringIO()\nwith contextlib.redirect_stdout(seen):\n"
        + "".join(f"    {line}\n" for line in case["program"].splitlines())
        + "    print(sorted(os.environ))\n"
        + "    for path in [*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), "
        + f"{str(secret)!r}, '/proc/1/root{secret}']:\n"
        + "        try:\n            print(open(path, errors='replace').read())\n"
        + "        except OSError:\n            pass\n"
        + "def seen_text():\n    return seen.getvalue()\n"
    )
    tests = (
        "assert 'canary-' not in seen_text()\n"
        "assert 'blocked' in seen_text() or 'PATH' in seen_text()\n"
        "assert 'HF_TOKEN' not in seen_text() and 'DSN' not in seen_text()\n"
    )
    assert score([(spy, tests)])[0].value == 1.0


WANTED_15 = (1.0, 0.0, 0.0, 1.0, 0.0)  # raw code not allowed; the unclosed fence is of a truncated completion


def test_rw_15_code_block_choice():
    rows = PIPELINE["rw-15-code-block-choice"]["input"]
    scorer = code.build(RewardFunction(name="code"), None)
    scores = scorer.score(
        [
            RewardRow(f"r{index}", f"p{index}", [], row["completion"], None, {"tests": row["tests"]}, "length")
            for index, row in enumerate(rows)
        ]
    )
    assert tuple(scored.value for scored in scores) == WANTED_15
    assert [scored.reason for scored in scores[1:3]] == [
        "no code block",
        "the code block is not closed (finish_reason length)",
    ]
    assert [scored.metrics["has_program"] for scored in scores] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert score([(rows[1]["completion"], rows[1]["tests"])], raw=True)[0].value == 1.0
    assert score([(rows[2]["completion"], rows[2]["tests"])], raw=False)[0].value == 1.0  # it stopped by itself


@pytest.mark.parametrize(
    "tests",
    [
        ADD_TESTS,
        ["assert add(2, 3) == 5", "assert add(1, 1) == 2"],
        json.dumps(["assert add(2, 3) == 5"]),
        {"inputs": [[2, 3], [1, 1]], "outputs": [5, 2], "fn_name": "add"},
        json.dumps({"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}),
        [{"input": "2\n3", "output": "5", "testtype": "functional", "func_name": "add"}],
        {"test": "def check(candidate):\n    assert candidate(2, 3) == 5\n", "entry_point": "add"},
        "from solution import add\n\ndef test_add():\n    assert add(2, 3) == 5\n",
        {
            "kind": "pytest",
            "code": "import main\n\nclass TestAdd:\n    def test(self):\n        assert main.add(1, 2) == 3\n",
        },
    ],
    ids=["text", "list", "json_list", "calls", "json_calls", "functional", "check", "pytest", "pytest_kind"],
)
def test_forms_of_tests_that_call(tests):
    tests = {**tests[0], "fn_name": "add"} if isinstance(tests, list) and isinstance(tests[0], dict) else tests
    given = [tests] if isinstance(tests, dict) and "testtype" in tests else tests
    metadata = {"tests": given, "func_name": "add"}
    rows = [RewardRow(f"r{n}", f"p{n}", [], text, None, metadata, "stop") for n, text in enumerate((ADD, "add = max"))]
    scores = code.build(RewardFunction(name="code", code={"raw": True}), None).score(rows)
    assert [scored.value for scored in scores] == [1.0, 0.0]


def test_tests_may_be_the_answer():
    scorer = code.build(RewardFunction(name="code", code={"raw": True}), None)
    assert scorer.score([RewardRow("r", "p", [], ADD, ADD_TESTS, {}, "stop")])[0].value == 1.0


def test_a_method_of_solution_is_called_by_name():
    program = "class Solution:\n    def twoSum(self, nums, target):\n        return (0, 1)\n"
    tests = {"inputs": [[[2, 7], 9]], "outputs": [[0, 1]], "fn_name": "twoSum"}
    assert score([(program, tests)])[0].value == 1.0


def test_calls_compare_values_not_texts():
    tests = {"inputs": [[1], [2], [3], [4]], "outputs": [True, 0.3, {"1": [2]}, None], "fn_name": "f"}
    right = "def f(x):\n    return [True, 0.1 + 0.2, {1: (2,)}, None][x - 1]\n"
    wrong = "def f(x):\n    return [1, '0.3', {1: [2], '1': [3]}, False][x - 1]\n"
    scores = score([(right, tests), (wrong, tests)], credit="partial")
    assert [scored.value for scored in scores] == [1.0, 0.0]


def test_equal_programs_for_a_prompt_are_judged_once():
    program = "import uuid\nDRAWN = uuid.uuid4().int % 2\ndef f():\n    return DRAWN\n"
    rows = [RewardRow(f"r{n}", "p", [], program, None, {"tests": "assert f() == 1\n"}, "stop") for n in range(8)]
    scores = code.build(RewardFunction(name="code", code={"raw": True}), None).score(rows)
    assert len({scored.value for scored in scores}) == 1  # by chance once in 128 otherwise


def test_rows_keep_their_order_and_failures_their_reason():
    prompts = prompts_table(
        {"prompt_id": "a", "metadata": {"tests": ADD_TESTS}}, {"prompt_id": "b", "metadata": {"tests": []}}
    )
    rollouts = rollouts_table(
        {"prompt_id": "b", "text": f"```python\n{ADD}```"},
        {"prompt_id": "a", "text": "I cannot write that."},
        {"prompt_id": "a", "index": 1, "text": f"```python\n{ADD}```"},
        {"prompt_id": "a", "index": 2, "text": "```python\ndef add(a, b): return a - b\n```"},
    )
    grader = build_grader(RewardSettings(functions=[RewardFunction(name="code")]))
    rewards = grader.score(rollouts, prompts)
    check_table(rewards, "rewards")
    table = rewards.to_pylist()
    assert [row["reward"] for row in table] == [None, 0.0, 1.0, 0.0]
    assert table[0]["reason"] == "code: no tests: the list of tests is empty"
    statuses = [dict(row["component_status"])["code"] for row in table[1:]]
    assert statuses == ["scored: no code block", "scored", "scored: assert add(2, 3) == 5"]
    assert dict(table[2]["components"]) == {"code": 1.0, "code/has_program": 1.0, "code/passed": 2.0, "code/tests": 2.0}


def test_a_prelude_comes_before_the_program():
    program = "def f(xs: List[int]) -> int:\n    return math.prod(xs)\n"
    scores = [
        score([(program, "assert f([2, 3]) == 6\n")], prelude=prelude)[0].value
        for prelude in ("", "import math\nfrom typing import *")
    ]
    assert scores == [0.0, 1.0]


def test_packages_are_seen_where_they_are_named():
    program = "import numpy as np\ndef f():\n    return np.arange(3) * 2.0\n"
    tests = "import numpy as np\nassert np.allclose(f(), [0, 2, 4])\nassert isinstance(f(), np.ndarray)\n"
    without, with_numpy = (score([(program, tests)], packages=names)[0] for names in ([], ["numpy"]))
    assert (without.value, with_numpy.value) == (0.0, 1.0)
    assert "No module named 'numpy'" in without.reason
    lacking = score([("def f():\n    return 1\n", tests)])[0]
    assert (lacking.value, lacking.reason) == (None, "the tests need the module numpy, which is not in the sandbox")
    with pytest.raises(SettingsError, match=r"code\.packages must name importable packages, 'not_there' is none"):
        code.build(RewardFunction(name="code", code={"packages": ["not_there"]}), None)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_another_language_by_its_command():
    settings = {"language": "bash", "command": ["bash", "{file}"], "raw": False}
    tests = {"inputs": ["2 3\n"], "outputs": ["5"]}
    right, wrong = "```bash\nread a b; echo $((a + b))\n```", "```sh\nread a b; echo $((a - b))\n```"
    scores = score(
        [(right, tests), (wrong, tests), ("```python\nprint(5)\n```", tests), (right, ADD_TESTS)], **settings
    )
    assert [scored.value for scored in scores] == [1.0, 0.0, 0.0, None]
    assert scores[2].reason == "no code block of bash, only of python"
    assert scores[3].reason.startswith("tests of kind assert call Python functions")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_virtual_machine_that_reserves_memory_runs():
    program = "console.log(require('fs').readFileSync(0, 'utf8').split(' ').map(Number).reduce((a, b) => a + b))"
    settings = {"language": "javascript", "command": ["node", "{file}"], "cpu_seconds": 5.0}
    assert score([(program, {"inputs": ["2 3 4"], "outputs": ["9"]})], **settings)[0].value == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": "go"}, "language go needs command"),
        ({"command": ["node", "main.js"]}, r"command must hold \{file\}"),
        ({"memory_mib": 1}, "greater than or equal to 64"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardFunction(name="code", code=settings)


def test_a_command_that_is_missing_or_out_of_sight(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="'not-there-at-all', which is not on the PATH"):
        code.build(RewardFunction(name="code", code={"command": ["not-there-at-all", "{file}"]}), None)
    (tmp_path / "lang").write_text("#!/bin/sh\ncat $1\n")
    (tmp_path / "lang").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SettingsError, match="which programs cannot see: add the folder"):
        code.build(RewardFunction(name="code", code={"command": ["lang", "{file}"]}), None)
    settings = {"command": [str(tmp_path / "lang"), "{file}"], "readonly": [str(tmp_path)]}
    code.build(RewardFunction(name="code", code=settings), None)


def test_without_bubblewrap_it_refuses_to_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="bwrap is not on the PATH; install the system package bubblewrap"):
        code.build(RewardFunction(name="code"), None)


def test_the_unsandboxed_mode_says_so_and_judges_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    seen = "import os\ndef add(a, b):\n    return a + b + ('HF_TOKEN' in os.environ)\n"
    loops = "def add(a, b):\n    while True: pass\n"
    cases = {"inputs": ["5\n"], "outputs": ["5"]}
    settings = {"sandbox": "unsafe_unsandboxed"}
    scores = score([(seen, ADD_TESTS), (loops, ADD_TESTS), ("print(input())", cases)], **settings)
    assert [scored.value for scored in scores] == [1.0, 0.0, 1.0]
    assert scores[1].reason.startswith("timeout: more than 1 s of processor time")


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getppid(), 9)"])
def test_tests_that_end_their_own_process_leave_their_row_unscored_and_no_other(how):
    killing = f"import os\n{how}\nassert add(1, 2) == 3\n"
    scores = score([(ADD, ADD_TESTS), (ADD, killing), (ADD, ADD_TESTS)])
    assert [scored.value for scored in scores] == [1.0, None, 1.0]
    assert scores[1].reason.startswith("the tests' process")
