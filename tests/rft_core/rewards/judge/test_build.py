"""The judge as a reward function: settings, identity, secrets, interrupts, tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import pytest
from pydantic import ValidationError

from data_contracts.replies import Replies
from data_contracts.schemas import RECORDS
from rft_core.errors import GraderUnavailable, SettingsError
from rft_core.rewards import build_grader, unscored_reasons
from rft_core.rewards.settings import RewardFunction, RewardSettings
from tests.rft_core.rewards.judge.endpoint import Request, ScriptedEndpoint, refusal, said, score
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

REPOSITORY = Path(__file__).parents[4]
KEY = "sk-canary-0123456789"
URL = "http://127.0.0.1:9/v1"


def settings(url: str = URL, max_unscored_fraction: float = 0.2, **judge) -> RewardSettings:
    judge = {"url": url, "model": "m", "backoff_seconds": 0.0, "retries": 1, **judge}
    function = {"name": "judge", "judge": judge}
    return RewardSettings(functions=[function], max_unscored_fraction=max_unscored_fraction)


def digest(folder: Path | None = None, **judge) -> str:
    return build_grader(settings(**judge), folder).digest


PROMPTS = prompts_table({"prompt_id": "a", "answer": "4"}, {"prompt_id": "b", "answer": "5"})
ROLLOUTS = rollouts_table(
    {"prompt_id": "a", "index": 0, "text": "four"},
    {"prompt_id": "a", "index": 1, "text": "prose"},
    {"prompt_id": "b", "index": 0, "text": "five"},
)


def script(request: Request):
    return said("Lovely!") if request.candidates[0] == "prose" else score(0.5)


def test_rows_of_the_table_and_kept_replies(tmp_path):
    replies = Replies(str(tmp_path))
    with ScriptedEndpoint(script) as endpoint:
        grader = build_grader(settings(endpoint.url), replies=replies)
        table = grader.score(ROLLOUTS, PROMPTS)
        assert len(endpoint.requests) == 2 + 2
        again = grader.score(ROLLOUTS, PROMPTS)
        assert len(endpoint.requests) == 4 + 2  # only the unreadable one
    assert table.schema.equals(RECORDS["rewards"].schema, check_metadata=True)
    assert table["reward"].to_pylist() == again["reward"].to_pylist() == [0.5, None, 0.5]
    assert table["component_status"].to_pylist()[0] == [("judge", "scored: so it is")]
    assert table["components"].to_pylist()[0] == [
        ("judge", 0.5),
        ("judge/completion_tokens", 10.0),
        ("judge/prompt_tokens", 100.0),
    ]
    assert again["components"].to_pylist()[0] == table["components"].to_pylist()[0]
    (reason,) = unscored_reasons(table)
    assert reason == "judge: the judge's reply must hold a JSON object, it holds none: 'Lovely!'"
    with pytest.raises(GraderUnavailable, match=r"at most 20% .* 1 of 3 are: 1 x judge: the judge's reply"):
        grader.refuse_unscored(unscored_reasons(table), 3)
    files = [path.name for path in (tmp_path / "replies").rglob("*.json")]
    assert len(files) == 2
    assert not list((tmp_path / "replies").rglob("*.tmp"))


def test_the_probe_asks_the_example_and_two_rows(tmp_path):
    with ScriptedEndpoint(lambda request: score(0.5)) as endpoint:
        grader = build_grader(settings(endpoint.url), replies=Replies(str(tmp_path)))
        grader.probe(PROMPTS)
        assert [request.candidates for request in endpoint.requests] == [["2"], ["4"], [""]]
        build_grader(settings(endpoint.url), replies=Replies(str(tmp_path))).probe(PROMPTS)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("fault", [401, 400, 500, "echo", "prose"])
def test_the_key_is_sent_and_nowhere_else(fault, tmp_path, monkeypatch, caplog, capfd):
    """An endpoint that repeats the key in what it says does not get it into tables, files, logs or errors."""
    caplog.set_level("DEBUG")
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def echoing(request: Request):
        assert request.headers["authorization"] == f"Bearer {KEY}"
        if fault == "echo":
            return score(0.5) if "four" in request.candidates else said(f'{{"reason": "{KEY}", "score": 0.5}}')
        return said(f"key {KEY}") if fault == "prose" else refusal(fault, f"Incorrect API key: {KEY}")

    texts = []
    with ScriptedEndpoint(echoing) as endpoint:
        chosen = settings(endpoint.url, api_key_env="JUDGE_KEY")
        grader = build_grader(chosen, replies=Replies(str(tmp_path)))
        try:
            table = grader.score(ROLLOUTS, PROMPTS)
            texts.append(str(table.to_pylist()))
            grader.refuse_unscored(unscored_reasons(table), 3)
        except (SettingsError, GraderUnavailable) as error:
            texts += ["".join(traceback.format_exception(error)), repr(error), repr(error.__context__)]
        place = endpoint.url.split("/")[2]
    assert texts and (fault == "echo" or len(texts) > 1)
    texts += [path.read_text() for path in tmp_path.rglob("*.json")]
    texts += [str(chosen.model_dump()), caplog.text, *capfd.readouterr()]
    assert [text for text in texts if KEY in text] == []
    assert "[key]" in texts[0]
    assert place not in texts[0]  # no table holds an address


def test_settings_that_are_wrong(monkeypatch, tmp_path):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(SettingsError, match=r"names the environment variable JUDGE_KEY, which is not set"):
        build_grader(settings(api_key_env="JUDGE_KEY"))
    with pytest.raises(SettingsError, match=r"judge.instruction_file must be a text file: .*none.txt"):
        build_grader(settings(instruction_file="none.txt"), tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(SettingsError, match="must hold the instruction"):
        build_grader(settings(instruction_file="empty.txt"), tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs the package openai: pip install 'rft-pipeline\[judge\]'"):
        build_grader(settings())


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        ({"url": None}, "reward function judge needs judge.url and judge.model"),
        ({"model": None}, "reward function judge needs judge.url and judge.model"),
        ({"url": "localhost:8000"}, "String should match pattern"),
        ({"url": "http://me:secret@host/v1"}, "url must hold no user, password or query"),
        ({"url": "http://host/v1?key=1"}, "url must hold no user, password or query"),
        ({"low": 1.0}, "low must be less than high"),
        ({"mode": "rubric"}, "criteria go with mode: rubric, got 0"),
        ({"criteria": [{"name": "a", "description": "b"}]}, "criteria go with mode: rubric, got 1"),
        ({"mode": "rubric", "criteria": [{"name": "a", "description": "b"}] * 2}, "names of criteria must differ"),
        ({"mode": "rubric", "criteria": [{"name": "a", "description": "b", "low": 2.0}]}, "low of criterion a must be"),
        ({"instruction": "x", "instruction_file": "y"}, "exclude each other"),
        ({"extra_body": {"stream": True}}, "extra_body must not hold stream"),
        ({"at_once": 2}, "greater than or equal to 3"),
        ({"prices": [1.0]}, "at least 2 items"),
    ],
)
def test_settings_that_contradict(judge, sentence):
    with pytest.raises(ValidationError, match=sentence):
        settings(**judge)


def test_the_section_goes_with_the_judge_alone():
    with pytest.raises(ValidationError, match="section judge goes with name: judge"):
        RewardFunction(name="exact_match", judge={"model": "m"})


def test_identity_is_what_decides_scores(tmp_path):
    (tmp_path / "one.txt").write_text("Be brief.")
    (tmp_path / "same.txt").write_text("Be brief.")
    (tmp_path / "other.txt").write_text("Be kind.")
    digests = [
        digest(),
        digest(model="other"),
        digest(instruction="Be brief."),
        digest(temperature=1.0),
        digest(mode="pairwise"),
        digest(mode="ranking"),
        digest(high=10.0),
        digest(tmp_path, instruction_file="one.txt"),
        digest(tmp_path, instruction_file="other.txt"),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(tmp_path, instruction_file="same.txt") == digests[7]
    assert digest(url="http://elsewhere:1/v1", concurrency=1, retries=9, timeout_seconds=1.0) == digests[0]


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test process may be told to ignore it
from rft_core.rewards.judge import build
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardFunction
judge = {"model": "m", "url": sys.argv[1], "timeout_seconds": 60.0}
scorer = build(RewardFunction(name="judge", judge=judge), None)
rows = [RewardRow(str(n), "p", [], f"text {n}", None, {}, "stop", "g") for n in range(50)]
try:
    scorer.score(rows)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_ends_it_promptly():
    with ScriptedEndpoint(lambda request: score(1.0, hang_seconds=60)) as endpoint:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(INTERRUPTED), endpoint.url]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ}, **pipes) as process:
            deadline = time.monotonic() + 60
            while len(endpoint.requests) < 16 and time.monotonic() < deadline:
                time.sleep(0.02)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            try:
                output, errors = process.communicate(timeout=30)
            finally:
                process.kill()
    assert (output, errors, process.returncode) == ("interrupted\n", "", 0)
    assert time.monotonic() - began < 5
    assert len(endpoint.requests) == 16  # the default concurrency
