"""Gates, conditions, centre, scale, clip and steps in the grader."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from data_contracts.schemas import RECORDS
from rft_core.errors import RewardFunctionError, SettingsError
from rft_core.rewards import build_grader
from rft_core.rewards.conditions import matching
from rft_core.rewards.settings import RewardFunction, RewardSettings, StepSettings
from rft_core.rewards.steps import build_splitter, token_ends
from rft_core.rewards.user_process import UserCode
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

FORMAT = {"name": "answer_format", "label": "format", "tags": ["answer"], "weight": 0.2}
NUMERIC = {"name": "numeric_answer", "label": "accuracy"}


def scored(functions: list[dict], texts: list[str], prompts: pa.Table | None = None, **settings) -> list[dict]:
    """Rows of rewards for completions of the prompts, one each; the first prompt's by default."""
    prompts = prompts if prompts is not None else prompts_table({"prompt_id": "a", "answer": "4"})
    ids = prompts["prompt_id"].to_pylist()
    rollouts = rollouts_table(
        *({"prompt_id": ids[i % len(ids)], "index": i, "text": text} for i, text in enumerate(texts))
    )
    grader = build_grader(RewardSettings(functions=functions, **settings))
    table = grader.score(rollouts, prompts)
    assert table.schema.equals(RECORDS["rewards"].schema, check_metadata=True)
    return table.to_pylist()


def test_a_closed_gate_adds_nothing_and_calls_nobody(tmp_path):
    seen = tmp_path / "seen"
    (tmp_path / "mine.py").write_text(
        f"import pathlib\ndef reward(rows):\n"
        f"    pathlib.Path({str(seen)!r}).write_text(''.join(row.completion_text for row in rows))\n"
        "    return [float(row.earlier['format']) + 1 for row in rows]\n"
    )
    gated = {"name": "custom", "path": f"{tmp_path}/mine.py:reward", "only_if": "format > 0", "weight": 3.0}
    rows = scored([FORMAT, gated], ["<answer>4</answer>", "4"])
    assert [row["reward"] for row in rows] == [0.2 + 3 * 2, 0.0]
    assert seen.read_text() == "<answer>4</answer>"
    assert rows[1]["components"] == [("format", 0.0), ("custom", None)]
    assert rows[1]["component_status"][1] == ("custom", "gated: not format > 0")
    rows = scored([FORMAT, gated], ["4"], missing="unscored")
    assert rows[0]["reward"] == 0.0  # a closed gate is a verdict; nothing is missing


def test_a_gate_without_a_score_leaves_the_row_unscored():
    prompts = prompts_table({"prompt_id": "a", "answer": "no number"})
    rows = scored([NUMERIC, {**FORMAT, "only_if": "accuracy >= 1"}], ["<answer>4</answer>"], prompts)
    assert rows[0]["reward"] is None
    assert rows[0]["reason"].endswith("format: the gate accuracy >= 1 has no score to go by")


def test_a_measure_makes_no_row_scored_that_the_others_could_not_score():
    prompts = prompts_table({"prompt_id": "a", "answer": "four"})
    functions = [NUMERIC, {"name": "exact_match", "weight": 0}]
    rows = scored(functions, ["four"], prompts)
    assert rows[0]["reward"] is None and rows[0]["reason"].startswith("accuracy: answer: 'four' is no number")
    assert rows[0]["components"] == [("accuracy", None), ("exact_match", 1.0)]
    assert (
        scored([{"name": "exact_match", "weight": 0}], ["four"], prompts)[0]["reward"] == 0.0
    )  # nothing else is there


def test_functions_apply_where_their_condition_holds():
    prompts = prompts_table(
        {"prompt_id": "m", "answer": "4", "metadata": {"kind": "maths", "level": 2}},
        {"prompt_id": "t", "answer": "four", "metadata": {"kind": "text"}},
        {"prompt_id": "o", "answer": "4", "metadata": {}},
    )
    functions = [
        {**NUMERIC, "when": "kind = 'maths'"},
        {"name": "exact_match", "when": "kind = 'text' and source = 'test'"},
    ]
    for missing in ("sum_present", "unscored"):
        rows = scored(functions, ["4", "four", "4"], prompts, missing=missing)
        assert [row["reward"] for row in rows] == [1.0, 1.0, None]
        assert rows[2]["reason"] == "no reward function applies to this row"
        assert rows[0]["component_status"][1] == (
            "exact_match",
            "not applicable: not kind = 'text' and source = 'test'",
        )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("level > 1", [True, False, False]),
        ("level is null", [False, False, True]),
        ("nowhere = 1", [False, False, False]),
        ("nowhere = 'x' or level >= 2", [True, False, False]),
        ("dataset in ('test', 'x')", [True, True, True]),
        ("json_extract_string(metadata, '$.tags[0]') = 'b'", [False, True, False]),
    ],
)
def test_conditions_see_columns_and_metadata(condition, expected):
    prompts = prompts_table(
        {"prompt_id": "a", "metadata": {"level": 2}},
        {"prompt_id": "b", "metadata": {"level": 1, "tags": ["b"]}},
        {"prompt_id": "c"},
    )
    assert matching(condition, prompts, "when").tolist() == expected


@pytest.mark.parametrize("condition", ["kind =", "1; drop table t", "read_text('/etc/passwd') = ''"])
def test_what_is_no_condition_is_refused_before_anything_runs(condition):
    with pytest.raises(SettingsError, match="when of accuracy must be"):
        build_grader(RewardSettings(functions=[{**NUMERIC, "when": condition}]))


def test_a_number_is_compared_before_any_row_is_seen():
    build_grader(RewardSettings(functions=[{**NUMERIC, "when": "level >= 3"}]))


def test_an_empty_completion_has_no_steps():
    from rft_core.rewards.rows import RewardRow

    assert RewardRow("r", "p", [], "", None, {}, "stop").steps == []
    assert RewardRow("r", "p", [], "a\nb", None, {}, "stop", step_ends=(1, 3)).steps == ["a", "\nb"]


def test_answers_are_read_where_a_function_applies():
    prompts = prompts_table(
        {"prompt_id": "m", "answer": "?", "metadata": {"kind": "maths"}}, {"prompt_id": "t", "answer": "?"}
    )
    grader = build_grader(RewardSettings(functions=[{**NUMERIC, "when": "kind = 'maths'"}]))
    assert grader.has_conditions and grader.answer_readers == []
    assert [bad.prompt_id for bad in grader.unreadable_answers(prompts)] == ["m"]


def test_centre_scale_and_clip_come_before_the_weight(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    return [float(row.completion_text) for row in rows]\n")
    function = {"name": "custom", "path": f"{tmp_path}/mine.py:reward", "center": 10, "scale": 0.5, "clip": [-1, 2]}
    rows = scored([{**function, "weight": 10}], ["10", "13", "99", "0"])
    assert [row["reward"] for row in rows] == [0.0, 15.0, 20.0, -10.0]
    assert [dict(row["components"])["custom"] for row in rows] == [10.0, 13.0, 99.0, 0.0]  # as they were given


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{**NUMERIC, "only_if": "format > 0"}, FORMAT], "only_if of accuracy must name an earlier component"),
        ([{**NUMERIC, "only_if": "format"}], "only_if must be COMPONENT > NUMBER"),
        ([{**NUMERIC, "clip": [1, 0]}], r"clip must be \[lowest, highest\]"),
        ([{**NUMERIC, "code": {"raw": True}}], "section code goes with name: code"),
        ([NUMERIC, {"name": "length_cosine"}], "`of` names the component"),
        ([{"name": "self_verification", "of": "accuracy"}], "of of self_verification must name an earlier"),
        ([{"name": "answer_format", "tags": ["a"], "pattern": "a"}], "needs one of pattern, tags and json_schema"),
    ],
)
def test_settings_that_do_not_fit(functions, message):
    with pytest.raises(ValidationError, match=message):
        RewardSettings(functions=functions)


def test_a_section_enters_the_identity_of_its_own_function_alone():
    assert "code" not in RewardFunction(name="exact_match").content()
    assert RewardFunction(name="code").content()["code"]["credit"] == "all"


TEXT = "First, add.\n\nThen\nmultiply.\n\n  \nDone: 4\n"


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"split": "lines"}, ["First, add.", "Then", "multiply.", "Done: 4"]),
        ({"split": "paragraphs"}, ["First, add.", "Then\nmultiply.", "Done: 4"]),
        ({"split": "tags"}, [TEXT.strip()]),
    ],
)
def test_steps(settings, steps):
    split, _ = build_splitter(StepSettings(**settings), None, UserCode())
    ends = split(TEXT)
    starts = (0, *ends[:-1])
    assert [TEXT[start:end].strip() for start, end in zip(starts, ends, strict=True)] == steps
    assert split("") == () and split(" \n ") == ()


@pytest.mark.parametrize(
    ("text", "lines", "paragraphs"),
    [
        ("a  \n\nb", [1, 6], [1, 6]),  # white space at the end of a step is not its own
        ("a\r\n\r\nb\r\nc\r\n", [1, 6, 9], [1, 9]),
        ("\n\n  a\nb\n\n", [5, 7], [7]),
    ],
)
def test_ends_of_steps_hold_no_white_space(text, lines, paragraphs):
    for split, expected in (("lines", lines), ("paragraphs", paragraphs)):
        assert list(build_splitter(StepSettings(split=split), None, UserCode())[0](text)) == expected


def test_long_white_space_is_split_in_linear_time():
    text = (" " * 300_000 + "\n") * 3 + "a"
    began = time.monotonic()
    for split in ("lines", "paragraphs", "tags"):
        assert build_splitter(StepSettings(split=split), None, UserCode())[0](text) == (len(text),)
    assert time.monotonic() - began < 2


def test_steps_by_tags():
    split, _ = build_splitter(StepSettings(split="tags"), None, UserCode())
    text = "<step>one</step>\n<step>two</step>\nso 4 "
    assert [text[:end] for end in split(text)] == [text[:16], text[:33], text.rstrip()]


def test_steps_by_a_function(tmp_path):
    (tmp_path / "mine.py").write_text("def split(text):\n    return text.split(';') if text != 'bad' else ['no']\n")
    split, identity = build_splitter(StepSettings(split="custom", path="mine.py:split"), tmp_path, UserCode())
    assert split("a; bc;;d") == (1, 5, 8) and "semantics" in identity
    with pytest.raises(RewardFunctionError, match="must give parts of the completion in order, 'no' is none"):
        split("bad")
    (tmp_path / "other.py").write_text("def split(text):\n    return text.nothing\n")
    split, _ = build_splitter(StepSettings(split="custom", path="other.py:split"), tmp_path, UserCode())
    with pytest.raises(RewardFunctionError, match=r"raised AttributeError: .* for the completion 'a; b'"):
        split("a; b")


class Words:
    """Tokens are words with the space before them; 99 is a special token, 7 half a character, 8 the other half."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces  # as the engine's texts were decoded
        text = "".join({99: "", 7: "\x07", 8: "\x08"}.get(token, f" {token}") for token in ids)
        return text.replace("\x07\x08", "é").replace("\x07", "\ufffd").replace("\x08", "\ufffd")

    def batch_decode(self, ids, **settings):
        return [self.decode(part, **settings) for part in ids]


@pytest.mark.parametrize(
    ("ids", "text", "ends", "expected"),
    [
        ([10, 20, 30, 99], " 10 20 30", [3, 6, 9], [0, 1, 2]),
        ([10, 7, 8, 30, 99], " 10é 30", [3, 4, 7], [0, 2, 3]),
        ([10, 20], " 10 20", [2, 5], [0, 1]),  # inside a token: the token that holds it
        ([10, 7, 30, 7, 8], " 10\ufffd 30é", [4, 7, 8], [1, 2, 4]),  # half a character that stays one
        ([7, 7, 8], "\ufffdé", [1, 2], [0, 2]),
        ([], "a", [1], []),
    ],
)
def test_ends_as_tokens(ids, text, ends, expected):
    assert token_ends(ends, ids, text, Words()) == expected


def test_step_scores_reach_the_table(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def reward(rows):\n"
        "    return [{'score': 1, 'steps': [len(step.strip()) for step in row.steps]} for row in rows]\n"
    )
    function = {"name": "custom", "path": f"{tmp_path}/mine.py:reward", "weight": 0.5, "clip": [0, 4]}
    grader = build_grader(RewardSettings(functions=[function, NUMERIC], steps={"split": "lines"}))
    prompts = prompts_table({"prompt_id": "a", "answer": "4"})
    rollouts = rollouts_table({"prompt_id": "a", "text": " 10\n 200000", "token_ids": [10, 99, 200000]})

    class Lines(Words):
        def decode(self, ids, **_):
            return "".join("\n" if token == 99 else f" {token}" for token in ids)

    row = grader.score(rollouts, prompts, tokenizer=Lines()).to_pylist()[0]
    assert (row["step_ends"], row["step_rewards"]) == ([0, 2], [1.0, 2.0])  # 0.5 x 2; 0.5 x 4, clipped from 6
    assert row["reward"] == 0.5
    lost = RewardSettings(functions=[function, NUMERIC], steps={"split": "lines"}, missing="unscored")
    unknown = prompts_table({"prompt_id": "a", "answer": "no number"})
    row = build_grader(lost).score(rollouts, unknown, tokenizer=Lines()).to_pylist()[0]
    assert (row["reward"], row["step_ends"], row["step_rewards"]) == (None, None, None)
    assert grader.score(rollouts, prompts).to_pylist()[0]["step_ends"] is None


def test_steps_end_in_tokens_that_the_policy_wrote(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    return [{'score': 1, 'steps': [1.0]} for row in rows]\n")
    function = {"name": "custom", "path": f"{tmp_path}/mine.py:reward"}
    grader = build_grader(RewardSettings(functions=[function], steps={"split": "lines"}))
    tokens = {"token_ids": [10, 20, 30], "mask": [False, False, True]}
    rollouts = rollouts_table({"prompt_id": "a", "text": " 30", **tokens})
    row = grader.score(rollouts, prompts_table({"prompt_id": "a"}), tokenizer=Words()).to_pylist()[0]
    assert row["step_ends"] == [2]


def test_step_scores_must_fit_the_steps(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    return [{'score': 1, 'steps': [1.0]} for row in rows]\n")
    function = {"name": "custom", "path": f"{tmp_path}/mine.py:reward"}
    grader = build_grader(RewardSettings(functions=[function], steps={"split": "lines"}))
    rollouts, prompts = rollouts_table({"prompt_id": "a", "text": "a\nb"}), prompts_table({"prompt_id": "a"})
    with pytest.raises(RewardFunctionError, match="'steps' must hold a list of 2 numbers, one per step"):
        grader.score(rollouts, prompts)


def test_conditions_and_steps_are_in_the_digest(tmp_path: Path):
    def digest(**settings) -> str:
        return build_grader(RewardSettings(functions=[{**NUMERIC, **settings.pop("function", {})}], **settings)).digest

    plain = digest()
    others = [
        digest(function={"when": "split = 'x'"}),
        digest(function={"clip": [0, 1]}),
        digest(steps={"split": "lines"}),
    ]
    assert len({plain, *others}) == 4
    assert digest(steps={"tag": "other"}) == plain  # nothing is split
    assert json.dumps(RewardSettings(functions=[NUMERIC]).content())
