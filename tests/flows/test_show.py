"""Rows of a run's tables, through SQL conditions that can reach nothing else."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from data_contracts.schemas import RECORDS
from flows.inspect import jsonl_lines, print_rows, show
from flows.inspect.show import SHOWN, TABLES
from rft_core.errors import SettingsError
from tests.flows.sample_run import HOSTILE, build_sample_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return build_sample_run(tmp_path_factory.mktemp("show"))


def test_step_and_condition(made):
    table = show(made.root, made.name, "rollouts", step=3, where="finish_reason = 'length'")
    assert table["rollout_id"].to_pylist() == ["step-00003/p0/03", "step-00003/p1/03"]
    assert set(table["purpose"].to_pylist()) == {"train"}


def test_rows_come_in_order_and_limited(made):
    table = show(made.root, made.name, "rewards", where="reward = 1", limit=3)
    # Step 1: prompt 0 is right at 0 (1 is unscored), prompt 1 at 2; then step 2.
    assert table["rollout_id"].to_pylist() == ["step-00001/p0/00", "step-00001/p1/02", "step-00002/p0/00"]
    assert table["at_step"].to_pylist() == [1, 1, 2]
    assert show(made.root, made.name, "rewards", limit=None).num_rows == 32


def test_schema_survives_a_condition(made):
    table = show(made.root, made.name, "rollouts", where="len(completion_token_ids) = 4 -- comment")
    assert table.drop_columns(["at_step"]).schema.equals(RECORDS["rollouts"].schema)
    # 4 of 8, 4, 6, 7 training completions are right.
    assert show(made.root, made.name, "rollouts", where="len(completion_token_ids) = 4", limit=None).num_rows == 21


@pytest.mark.parametrize(
    "where",
    [
        "rollout_id IN (SELECT content FROM read_text('/etc/hostname'))",
        "1 = 1) UNION SELECT 1 FROM read_csv('/etc/passwd') WHERE (1 = 1",
        "EXISTS (SELECT * FROM made)",
        "1 = 1); COPY t TO 'out.csv'; SELECT (1",
        "1 = 1); SET enable_external_access = true; SELECT (1",
    ],
)
def test_condition_reads_and_writes_nothing_else(made, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="--where must be a"):
        show(made.root, made.name, "rollouts", where=where)
    assert list(tmp_path.iterdir()) == []


def test_wrong_column_names_the_columns(made):
    with pytest.raises(SettingsError, match=r"finish_reasn.*the columns are rollout_id, .*finish_reason"):
        show(made.root, made.name, "rollouts", where="finish_reasn = 'length'")


def test_wrong_record_step_and_missing_table(made, tmp_path):
    with pytest.raises(SettingsError, match="did you mean rollouts"):
        show(made.root, made.name, "rollout")
    with pytest.raises(SettingsError, match=r"\(1..4\), got 9"):
        show(made.root, made.name, "rollouts", step=9)
    empty = build_sample_run(tmp_path, steps=0)
    with pytest.raises(SettingsError, match="has no rollouts table yet"):
        show(empty.root, empty.name, "rollouts")


def test_evaluation_rows_and_prompts_of_a_step(made):
    greedy = show(made.root, made.name, "evaluation-rollouts", step=2, where="round = 1")
    assert greedy["prompt_id"].to_pylist() == ["p2", "p3"]
    assert show(made.root, made.name, "prompts").num_rows == 4
    assert show(made.root, made.name, "prompts", step=2)["prompt_id"].to_pylist() == ["p0", "p1"]
    assert show(made.root, made.name, "quarantine")["source_row"].to_pylist() == [90, 91]


def test_jsonl_is_complete(made):
    (line,) = jsonl_lines(show(made.root, made.name, "rewards", step=1, where="rollout_id = 'step-00001/p0/01'"))
    row = json.loads(line)
    assert row.keys() == {*RECORDS["rewards"].schema.names, "at_step"}
    assert row["components"] == {"exact_match": None}
    assert (row["reward"], row["reason"]) == (None, "timeout")
    rejected = [json.loads(line) for line in jsonl_lines(show(made.root, made.name, "quarantine"))]
    assert rejected[1]["raw"] == "\\xff{"  # bytes that are no text are shown as escapes


@pytest.mark.parametrize("record", sorted(TABLES.keys() - {"examples", "token_scores"}))  # the run has none
def test_every_record_prints(made, record):
    stream = io.StringIO()
    table = show(made.root, made.name, record, limit=2)
    print_rows(table, record, Console(file=stream))
    assert stream.getvalue().splitlines()[0].split("\t") == SHOWN[record]


def test_terminal_shows_escapes_of_hostile_text_as_code_points(made):
    stream = io.StringIO()
    table = show(made.root, made.name, "rollouts", where="contains(completion_text, 'script')", limit=1)
    assert table["completion_text"].to_pylist() == [HOSTILE]
    print_rows(table, "rollouts", Console(file=stream, force_terminal=True, color_system=None, width=200))
    assert "\\u001b[31mred" in stream.getvalue()
    assert "\x1b[31mred" not in stream.getvalue()
