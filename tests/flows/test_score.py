"""`rft score`: files of completions, graded without a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.score import build_scorer, score_file
from rft_core.errors import SettingsError
from rft_core.rewards.rows import Scored
from tests.rft_core.rewards.programs import is_expected, read_cases

QUESTION = {"role": "user", "content": "2+2?"}


def score(tmp_path: Path, rows: list[dict] | str, reward: str, sets: list[str] | None = None) -> list[dict]:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    source.write_text(text)
    score_file(build_scorer(tmp_path, reward, sets or []), str(source), out)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_keep_their_order_and_fields(tmp_path):
    rows = [
        {"id": "a", "completion": "so 4", "answer": "4", "level": 3},
        {"id": "b", "prediction": "five", "gold": 5},
        {"id": "c", "response": "1", "answer": None},
        {"id": "d", "messages": [QUESTION, {"role": "assistant", "content": "4"}], "gold": "4"},
        {"id": "e", "answer": "4"},
    ]
    found = score(tmp_path, rows, "numeric_answer")
    assert [{name: row[name] for name in given} for row, given in zip(found, rows, strict=True)] == rows
    assert [row["reward"] for row in found] == [1.0, 0.0, None, 1.0, None]
    assert [row["status"] for row in found] == ["scored", "scored", "unscored", "scored", "unscored"]
    assert found[1]["reason"] == "completion: no number"
    assert found[2]["reason"] == "numeric_answer: the prompt has no answer"
    assert found[4]["reason"] == (
        "a row must have a text under one of completion, prediction, program, response, output; this one has id, answer"
    )


def test_a_line_that_cannot_be_read_is_a_row_too(tmp_path):
    found = score(
        tmp_path,
        '{"completion": "4", "answer": "4"}\n{"completion": \n{"completion": "4", "answer": "5"}\n',
        "exact_match",
    )
    assert [row["reward"] for row in found] == [1.0, None, 0.0]
    assert found[1]["raw"] == '{"completion": ' and "rows.jsonl:2" in found[1]["reason"]


def test_settings_are_those_of_the_function(tmp_path):
    rows = [{"completion": "3.2", "answer": "3"}]
    assert score(tmp_path, rows, "numeric_answer")[0]["reward"] == 0.0
    assert score(tmp_path, rows, "numeric_answer", ["tolerance=0.1"])[0]["reward"] == 1.0
    with pytest.raises(SettingsError, match="did you mean"):
        build_scorer(tmp_path, "numeric_answer", ["tolerence=1"])
    with pytest.raises(SettingsError, match="did you mean numeric_answer"):
        build_scorer(tmp_path, "numeric_anser", [])


def test_a_users_function_and_more_rows_than_a_batch(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    return [float(row.completion_text) for row in rows]\n")
    rows = [{"completion": str(number)} for number in range(1500)]
    found = score(tmp_path, rows, f"{tmp_path}/mine.py:reward")
    assert [row["reward"] for row in found] == [float(number) for number in range(1500)]


def test_programs(tmp_path):
    cases = [case for case in read_cases("code_programs.jsonl") if case["expected_score_kind"] in ("full", "unscored")]
    for row, case in zip(score(tmp_path, cases, "code"), cases, strict=True):
        assert is_expected(Scored(row["reward"], row["reason"]), case["expected_score_kind"]), case["id"]


def test_what_is_read_is_never_written(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "4", "answer": "4"}\n')
    (tmp_path / "link.jsonl").symlink_to(rows)
    for arguments in (
        ["score", str(rows), "--reward", "exact_match", "--out", str(tmp_path / "link.jsonl")],
        ["validate", str(rows), "--quarantine", str(rows)],
        ["validate", str(rows), "--docs", str(rows)],
    ):
        ended = CliRunner().invoke(app, [*arguments, "--root", str(tmp_path)])
        assert isinstance(ended.exception, SettingsError) and "must be another file" in str(ended.exception)
    assert rows.read_text() == '{"completion": "4", "answer": "4"}\n'


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("answer_in=tga.answer", r"answer_in must be tag.NAME or json.FIELD, found the text 'tga.answer'"),
        ("judge.api_key_env=sk-my secret", r"api_key_env must be a text of the form \^\[A-Za-z_\]"),
    ],
)
def test_texts_of_another_form_are_told_in_words(tmp_path, setting, message):
    with pytest.raises(SettingsError, match=message):
        build_scorer(tmp_path, "exact_match", [setting])


def test_data_of_any_record_can_be_tried_with_other_settings(tmp_path):
    (tmp_path / "thumbs.csv").write_text("prompt,completion,label\na,b,yes\nc,d,no\n")
    arguments = ["validate", str(tmp_path / "thumbs.csv"), "--record", "labelled", "--no-tokenizer", "--json"]
    repaired = ["--set", "data.policies.label_not_boolean=repair", "--root", str(tmp_path)]
    ended = CliRunner().invoke(app, [*arguments, *repaired])
    assert ended.exit_code == 0 and json.loads(ended.output)["counts"]["used"] == 2


def test_what_users_code_prints_and_fields_that_nobody_has(tmp_path, capfd):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    print('HELLO')\n    return [1.0] * len(rows)\n")
    (tmp_path / "rows.jsonl").write_text('{"completion": "4", "level": 3}\n')
    arguments = ["score", str(tmp_path / "rows.jsonl"), "--reward", f"{tmp_path}/mine.py:reward", "--json"]
    ended = CliRunner().invoke(app, [*arguments, "--root", str(tmp_path), "--set", "when=levle > 2"])
    result = json.loads(ended.stdout)
    assert (result["unscored"], len(result["notes"])) == (1, 1)
    assert "when of custom names the field levle, which none of the prompts has" in result["notes"][0]
    ended = CliRunner().invoke(app, [*arguments, "--root", str(tmp_path), "--set", "when=level > 2"])
    assert json.loads(ended.stdout)["mean_reward"] == 1.0 and json.loads(ended.stdout)["notes"] == []
    assert "HELLO" in capfd.readouterr().err  # of the process that users' code runs in


def test_a_function_that_hangs_costs_its_rows_and_an_error_shows_the_users_lines(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def reward(rows):\n"
        "    if rows[0].answer == '1':\n"
        "        time.sleep(600)\n"
        "    return [1 / (row.answer != '2') for row in rows]\n"
    )
    given = [{"completion": "4", "answer": "1"}]
    (found,) = score(tmp_path, given, f"{tmp_path}/mine.py:reward", ["call_seconds=1"])
    assert (found["reward"], found["reason"]) == (None, "custom: mine.py:reward did not end within 1 s")
    (tmp_path / "rows.jsonl").write_text('{"completion": "4", "answer": "2"}\n')
    arguments = ["score", str(tmp_path / "rows.jsonl"), "--reward", f"{tmp_path}/mine.py:reward", "-v"]
    command = [sys.executable, "-m", "flows.cli", *arguments, "--root", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert 'mine.py", line 5, in reward' in ended.stderr
    assert "raised ZeroDivisionError: division by zero at row" in ended.stderr


def test_a_name_that_says_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"completion": "4", "answer": "4"}\n')
    for arguments in (
        ["score", str(tmp_path / "rows.jsonl"), "--reward", "exact_match", "--out", str(tmp_path / "o.csv")],
        ["validate", str(tmp_path / "rows.jsonl"), "--quarantine", str(tmp_path / "q.jsonl.gz")],
    ):
        ended = CliRunner().invoke(app, [*arguments, "--root", str(tmp_path)])
        assert isinstance(ended.exception, SettingsError) and "must end in" in str(ended.exception)


def test_fields_that_fit_no_record_are_told_in_every_form(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"foo": 1}\n')
    arguments = ["validate", str(tmp_path / "rows.jsonl"), "--no-tokenizer", "--root", str(tmp_path)]
    ended = CliRunner().invoke(app, [*arguments, "--json", "--docs", str(tmp_path / "page.html")])
    assert ended.exit_code == 3 and "record prompts needs prompt" in json.loads(ended.stdout)["problem"]
    assert "record prompts needs prompt" in (tmp_path / "page.html").read_text()


def test_the_command(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"completion": "4", "answer": "4"}\n{"completion": "4", "answer": "x"}\n')
    arguments = ["score", str(tmp_path / "rows.jsonl"), "--reward", "numeric_answer", "--root", str(tmp_path)]
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    assert ended.exit_code == 0
    result = json.loads(ended.output)
    assert (result["rows"], result["scored"], result["mean_reward"]) == (2, 1, 1.0)
    assert result["reasons"] == [{"reason": "numeric_answer: answer: 'x' is no number", "rows": 1}]
    assert "rows\tscored" in CliRunner().invoke(app, arguments).output.replace("reward\t", "", 1)
    nowhere = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "no" / "out.jsonl")])
    assert isinstance(nowhere.exception, SettingsError)
