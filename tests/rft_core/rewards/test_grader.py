"""From rollouts to rewards: sums, statuses, counts, identity (cases rw-07 and gr-07)."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest

from data_contracts.schemas import RECORDS
from rft_core.errors import ContractError, GraderUnavailable, RewardFunctionError
from rft_core.rewards import REWARDS, UnreadableAnswer, build_grader, unscored_reasons
from rft_core.rewards.combine import combine
from rft_core.rewards.rows import Scored
from rft_core.rewards.settings import RewardFunction, RewardSettings
from tests.rft_core.rewards.tables import prompts_table, rollouts_table


def grader_of(*functions: dict, folder: Path | None = None, **settings):
    return build_grader(RewardSettings(functions=list(functions), **settings), folder)


NUMERIC = {"name": "numeric_answer", "label": "accuracy"}
TAGGED = {"name": "answer_format", "label": "format", "pattern": r".*\\boxed\{.*\}.*", "weight": 0.2}


def custom(folder: Path, body: str, **settings) -> dict:
    (folder / "mine.py").write_text(f"def reward(rows):\n    {body}\n")
    return {"name": "custom", "path": "mine.py:reward", **settings}


def test_table_of_functions_matches_the_settings():
    assert set(REWARDS) == set(get_args(RewardFunction.model_fields["name"].annotation))


def test_weighted_sum_and_schema():
    prompts = prompts_table({"prompt_id": "a", "answer": "42"}, {"prompt_id": "b", "answer": "7"})
    rollouts = rollouts_table(
        {"prompt_id": "b", "index": 0, "text": r"\boxed{7}"},
        {"prompt_id": "a", "index": 0, "text": "42"},
        {"prompt_id": "a", "index": 1, "text": ""},
    )
    grader = grader_of(NUMERIC, TAGGED)
    table = grader.score(rollouts, prompts)
    assert table.schema.equals(RECORDS["rewards"].schema, check_metadata=True)
    assert table.column("rollout_id").to_pylist() == rollouts.column("rollout_id").to_pylist()
    assert table.column("group_id").to_pylist() == rollouts.column("group_id").to_pylist()
    assert table.column("reward").to_pylist() == [1.2, 1.0, 0.0]  # 1 x 1 + 0.2 x 1; 1; nothing
    assert table.column("status").to_pylist() == ["scored"] * 3
    assert table.column("reason").to_pylist() == [None] * 3
    assert table.column("components").to_pylist()[0] == [("accuracy", 1.0), ("format", 1.0)]
    assert table.column("component_status").to_pylist()[2] == [
        ("accuracy", "scored: completion: no number"),
        ("format", "scored"),
    ]
    assert set(table.column("grader_digest").to_pylist()) == {grader.digest}


# Case rw-07: neither the format point nor a number comes from the prompt.
def test_only_the_completion_is_scored(tmp_path):
    question = r"Put the final answer within \boxed{}. What is 12+30? (Hint: not \boxed{41})"
    prompts = prompts_table({"prompt_id": "a", "answer": "42", "question": question})
    rollouts = rollouts_table({"prompt_id": "a", "question": question, "text": "I think it is forty-something."})
    body = "assert rows[0].messages[0]['content'].startswith('Put'); return [float(len(rows[0].completion_text))]"
    table = grader_of(NUMERIC, TAGGED, custom(tmp_path, body), folder=tmp_path).score(rollouts, prompts)
    assert table.column("components").to_pylist()[0] == [("accuracy", 0.0), ("format", 0.0), ("custom", 30.0)]


# Case gr-07: sums over those present; requiring all is a setting.
GR_07 = [
    ("a", (1.0, 1.0, None), 1.2, None),
    ("b", (None, 1.0, 0.5), 0.45, None),  # 0.2 x 1 + 0.5 x 0.5
    ("c", (0.0, 0.0, 0.0), 0.0, 0.0),
    ("d", (None, None, None), None, None),
]


@pytest.mark.parametrize(("row", "values", "present", "all_required"), GR_07)
def test_missing_components(row, values, present, all_required):
    functions = [
        RewardFunction(name="numeric_answer", label="accuracy", weight=1.0),
        RewardFunction(name="exact_match", label="format", weight=0.2),
        RewardFunction(name="custom", label="judge", path="x.y", weight=0.5),
    ]
    scored = [[Scored(value, None if value is not None else "down")] for value in values]
    (reward,), (reason,) = combine(functions, scored, "sum_present")
    assert reward == (None if present is None else pytest.approx(present, abs=1e-12))
    assert (reason is None) == (present is not None)
    (reward,), (reason,) = combine(functions, scored, "unscored")
    assert reward == all_required
    if row == "a":
        assert reason == "judge: down"
    if row == "d":
        assert reason == "accuracy: down; format: down; judge: down"


def test_failed_rollouts_are_unscored_and_unseen(tmp_path):
    prompts = prompts_table({"prompt_id": "a", "answer": "1"})
    rollouts = rollouts_table(
        {"prompt_id": "a", "index": 0, "text": "1", "status": "error", "error_reason": "engine died"},
        {"prompt_id": "a", "index": 1, "text": "1", "status": "truncated"},
        {"prompt_id": "a", "index": 2, "text": "1"},
    )
    body = "return [float(len(rows))] * len(rows)"
    grader = grader_of(custom(tmp_path, body), NUMERIC, folder=tmp_path, max_unscored_fraction=0)
    table = grader.score(rollouts, prompts)
    assert table.column("reward").to_pylist() == [None, 3.0, 3.0]  # the function saw two rows, and 1 for the number
    assert table.column("status").to_pylist() == ["unscored", "scored", "scored"]
    assert table.column("reason").to_pylist() == ["rollout_error: engine died", None, None]
    assert table.column("component_status").to_pylist()[0][0] == ("custom", "rollout_error: engine died")
    assert table.column("components").to_pylist()[0] == [("custom", None), ("accuracy", None)]


def test_last_segment_is_scored_once():
    prompts = prompts_table({"prompt_id": "a", "answer": "2"}, {"prompt_id": "b", "answer": "2"})
    rollouts = rollouts_table(
        {"prompt_id": "b", "segment": 1, "text": "2"},
        {"prompt_id": "a", "segment": 0, "text": "2"},
        {"prompt_id": "b", "segment": 0, "text": "1"},
        {"prompt_id": "a", "segment": 1, "text": "3"},
    )
    table = grader_of(NUMERIC).score(rollouts, prompts)
    assert table.column("rollout_id").to_pylist() == ["step-00001/b/00", "step-00001/a/00"]
    assert table.column("reward").to_pylist() == [1.0, 0.0]


def test_metrics_become_components(tmp_path):
    prompts = prompts_table({"prompt_id": "a"})
    rollouts = rollouts_table(*({"prompt_id": "a", "index": i, "text": str(i)} for i in range(2)))
    function = custom(tmp_path, "return [{'score': 0.5, 'z': 1, 'b': None}, 1]", label="mine", weight=2)
    table = grader_of(function, folder=tmp_path).score(rollouts, prompts)
    assert table.column("components").to_pylist() == [
        [("mine", 0.5), ("mine/b", None), ("mine/z", 1.0)],
        [("mine", 1.0)],
    ]
    assert table.column("component_status").to_pylist() == [[("mine", "scored")]] * 2
    assert table.column("reward").to_pylist() == [1.0, 2.0]


def test_a_function_cannot_change_what_others_see(tmp_path):
    prompts = prompts_table({"prompt_id": "a", "metadata": {"level": [1]}})
    rollouts = rollouts_table({"prompt_id": "a", "index": 0}, {"prompt_id": "a", "index": 1})
    body = "r = [sum(row.metadata['level']) for row in rows if not row.metadata['level'].append(1)]; return r"
    (tmp_path / "mine.py").write_text(f"def reward(rows):\n    {body}\n")
    functions = [{"name": "custom", "path": "mine.py:reward", "label": label} for label in ("one", "two")]
    table = grader_of(*functions, folder=tmp_path).score(rollouts, prompts)
    assert table.column("components").to_pylist() == [[("one", 2.0), ("two", 2.0)]] * 2


def test_too_many_unscored_rows():
    prompts = prompts_table({"prompt_id": "a", "answer": "1"}, {"prompt_id": "b"}, {"prompt_id": "c", "answer": "x"})
    rollouts = rollouts_table(
        *({"prompt_id": p, "index": i, "text": "1"} for p in "abc" for i in range(2)),
        {"prompt_id": "a", "index": 2, "status": "error", "error_reason": "x"},
    )
    table = grader_of(NUMERIC).score(rollouts, prompts)
    assert table.column("status").to_pylist() == ["scored"] * 2 + ["unscored"] * 5
    assert table.column("reason").to_pylist()[4] == "accuracy: answer: 'x' is no number"
    reasons = unscored_reasons(table)  # without the rollout that failed
    assert reasons == {"accuracy: the prompt has no answer": 2, "accuracy: answer: 'x' is no number": 2}
    with pytest.raises(
        GraderUnavailable, match=r"50% of rollouts .* 4 of 6 are: 2 x accuracy: the prompt has no answer; 2 x"
    ):
        grader_of(NUMERIC, max_unscored_fraction=0.5).refuse_unscored(reasons, 6)
    grader_of(NUMERIC, max_unscored_fraction=0.67).refuse_unscored(reasons, 6)
    grader_of(NUMERIC, max_unscored_fraction=0).refuse_unscored(reasons - reasons, 0)


def test_unreadable_answers_without_completions():
    prompts = prompts_table({"prompt_id": "a", "answer": "1"}, {"prompt_id": "b"}, {"prompt_id": "c", "answer": "x"})
    assert grader_of(NUMERIC, {"name": "exact_match"}).unreadable_answers(prompts) == [
        UnreadableAnswer("b", "accuracy", "the prompt has no answer"),
        UnreadableAnswer("c", "accuracy", "answer: 'x' is no number"),
        UnreadableAnswer("b", "exact_match", "the prompt has no answer"),
    ]


def test_tables_that_do_not_belong_together():
    rollouts = rollouts_table({"prompt_id": "b", "text": "1"})
    with pytest.raises(ContractError, match="prompt 'b' of rollout 'step-00001/b/00'"):
        grader_of(NUMERIC).score(rollouts, prompts_table({"prompt_id": "a", "answer": "1"}))
    with pytest.raises(ContractError, match="'b' twice"):
        grader_of(NUMERIC).score(rollouts, prompts_table(*[{"prompt_id": "b", "answer": "1"}] * 2))


def test_no_rollouts_call_no_function(tmp_path):
    function = custom(tmp_path, "raise ValueError('called')")
    prompts = prompts_table({"prompt_id": "a"})
    table = grader_of(function, folder=tmp_path).score(rollouts_table(), prompts)
    assert (table.num_rows, table.schema) == (0, RECORDS["rewards"].schema)
    failed = rollouts_table({"prompt_id": "a", "status": "error", "error_reason": "x"})
    assert grader_of(function, folder=tmp_path).score(failed, prompts).column("reward").to_pylist() == [None]


@pytest.mark.parametrize("weight", [1e10, 1.0])  # beyond float64; its square would be
def test_sum_beyond_floats(tmp_path, weight):
    function = custom(tmp_path, "return [1e308]", weight=weight)
    with pytest.raises(RewardFunctionError, match=r"weighted sum of rewards must be .*, row step-00001/a/00"):
        grader_of(function, folder=tmp_path).score(
            rollouts_table({"prompt_id": "a"}), prompts_table({"prompt_id": "a"})
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "2 rows from probe/a/00, got 1 values"),
        ("return [row.metadata['missing'] for row in rows]", "KeyError: 'missing' at row probe/a/00"),
        ("return [float(row.completion_text) for row in rows]", "at row probe/b/01"),  # an empty completion
        ("return [float('inf')] * 2", "row probe/a/00"),
    ],
)
def test_probe_finds_mistakes(tmp_path, body, message):
    prompts = prompts_table({"prompt_id": "a", "answer": "1"}, {"prompt_id": "b", "answer": "2"})
    with pytest.raises(RewardFunctionError, match=message):
        grader_of(custom(tmp_path, body), folder=tmp_path).probe(prompts)


def test_probe_passes_and_takes_one_prompt(tmp_path):
    body = "assert [row.completion_text for row in rows] == ['1', '']; return [None, 1]"
    function = custom(tmp_path, body)
    grader = grader_of(function, NUMERIC, folder=tmp_path, max_unscored_fraction=0)
    grader.probe(prompts_table({"prompt_id": "a", "answer": "1"}))
    grader.probe(prompts_table())


def test_digest_is_of_content():
    digest = grader_of(NUMERIC).digest
    assert grader_of(NUMERIC).digest == digest
    assert grader_of({**NUMERIC, "tolerance": 0.1}).digest != digest
    assert grader_of({**NUMERIC, "weight": 2}).digest != digest
    assert grader_of(NUMERIC, missing="unscored").digest != digest


def test_digest_follows_the_users_code(tmp_path):
    function = custom(tmp_path, "return [1.0] * len(rows)")
    first = grader_of(function, folder=tmp_path).digest
    moved = tmp_path / "moved"
    moved.mkdir()
    assert grader_of(custom(moved, "return [1.0] * len(rows)"), folder=moved).digest == first
    assert grader_of(custom(tmp_path, "return [0.5] * len(rows)"), folder=tmp_path).digest != first


def test_progress_and_order_of_rows():
    prompts = prompts_table({"prompt_id": "a", "answer": "3"})
    rollouts = rollouts_table(*({"prompt_id": "a", "index": i, "text": str(i)} for i in range(6)))
    seen = []
    grader = grader_of(NUMERIC, TAGGED)
    table = grader.score(rollouts, prompts, lambda done, total, note: seen.append((done, total, note)))
    assert seen == [(1, 2, "accuracy"), (2, 2, "format")]
    order = pa.array([5, 3, 1, 0, 2, 4])
    assert grader.score(rollouts.take(order), prompts).equals(table.take(order))
