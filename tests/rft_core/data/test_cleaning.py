"""Cleaning operators on single rows: what they change, what they drop, and that both are counted."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest

from data_contracts.reasons import REASONS
from data_contracts.refs import SourceRow
from rft_core.data.cleaning import OPERATORS, clean, cleaning_identity, content_text, row_operators, users_code
from rft_core.data.examples import Content
from rft_core.data.faults import Rejected
from rft_core.data.settings import CleaningOperator, DataSettings
from rft_core.errors import CleaningFunctionError, SettingsError

ROW = SourceRow("rows.jsonl", 17, {}, b"")
AMONG_ROWS = {"exact_duplicates", "near_duplicates"}
DECOMPOSED, COMPOSED = "Ko\u0308ln", "K\u00f6ln"


@pytest.fixture(autouse=True)
def clean_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("rft_function_", "own_")):
            del sys.modules[name]


def settings(*operators: dict) -> DataSettings:
    return DataSettings(source="rows.jsonl", cleaning=list(operators))


def cleaned(mapped: dict, *operators: dict, folder: Path | None = None) -> dict:
    before = json.dumps(mapped)
    result = clean(row_operators(settings(*operators), folder, Counter()), mapped, ROW)
    assert json.dumps(mapped) == before, "the row that was given must stay as it is"
    return result


def rejection(mapped: dict, *operators: dict, folder: Path | None = None) -> tuple[str, str]:
    with pytest.raises(Rejected) as caught:
        cleaned(mapped, *operators, folder=folder)
    assert caught.value.reason in REASONS
    return caught.value.reason, str(caught.value)


def written(folder: Path, body: str, name: str = "own_cleaning.py") -> Path:
    (folder / name).write_text(body)
    return folder


def test_operators_are_those_of_the_settings():
    names = set(get_args(CleaningOperator.model_fields["name"].annotation))
    assert set(OPERATORS) == names - AMONG_ROWS
    assert row_operators(settings(*({"name": name} for name in AMONG_ROWS)), None, Counter()) == []


def test_unicode_reaches_every_text_and_nothing_else():
    parts = [{"type": "text", "text": DECOMPOSED}, {"type": "image", "image_url": DECOMPOSED}]
    mapped = {
        "id": DECOMPOSED,
        "prompt": DECOMPOSED,
        "messages": [
            {"role": "user", "content": DECOMPOSED, "name": DECOMPOSED},
            {"from": "gpt", "value": DECOMPOSED},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": DECOMPOSED}}]},
            DECOMPOSED,
            3,
        ],
        "steps": [DECOMPOSED, None],
        "answer": DECOMPOSED,
        "metadata": {"city": DECOMPOSED},
    }
    result = cleaned(mapped, {"name": "unicode"})
    expected = json.loads(json.dumps(mapped))
    expected["prompt"] = expected["steps"][0] = expected["answer"] = COMPOSED
    messages = expected["messages"]
    messages[0]["content"] = messages[1]["value"] = messages[2]["content"][0]["text"] = messages[4] = COMPOSED
    assert result == expected


def test_compatibility_form_is_taken_where_asked_for():
    assert cleaned({"prompt": "ﬁx x²"}, {"name": "unicode"}) == {"prompt": "ﬁx x²"}
    assert cleaned({"prompt": "ﬁx x²"}, {"name": "unicode", "form": "NFKC"}) == {"prompt": "fix x2"}


CONVERSATION = [
    {"role": "system", "content": " s "},
    {"role": "user", "content": " u "},
    {"role": "assistant", "content": " a "},
]


@pytest.mark.parametrize(
    ("on", "contents", "prompt", "completion", "chosen"),
    [
        ("both", ["s", "u", "a"], "p", "c", "x"),
        ("prompt", ["s", "u", " a "], "p", " c ", " x "),
        ("completion", [" s ", " u ", "a"], " p ", "c", "x"),
    ],
)
def test_an_operator_looks_at_the_side_it_is_asked_for(on, contents, prompt, completion, chosen):
    mapped = {"messages": CONVERSATION, "prompt": " p ", "completion": " c ", "chosen": " x "}
    result = cleaned(mapped, {"name": "strip", "on": on})
    assert [message["content"] for message in result["messages"]] == contents
    assert (result["prompt"], result["completion"], result["chosen"]) == (prompt, completion, chosen)


def test_a_prompt_of_several_turns_is_prompt_and_a_chosen_conversation_goes_by_role():
    mapped = {"prompt": CONVERSATION, "chosen": CONVERSATION}
    result = cleaned(mapped, {"name": "strip", "on": "completion"})
    assert result["prompt"] == CONVERSATION
    assert [message["content"] for message in result["chosen"]] == [" s ", " u ", "a"]


def test_a_row_that_needs_no_change_is_the_same_object():
    mapped = {"prompt": "p", "messages": CONVERSATION, "label": True, "chosen": None}
    assert cleaned(mapped, {"name": "unicode"}, {"name": "length", "max_characters": 99}) is mapped


@pytest.mark.parametrize(
    ("mapped", "operator", "reason", "detail"),
    [
        ({"prompt": "abc"}, {"min_characters": 4}, "too_short", "must have at least 4 characters, found 3"),
        ({"prompt": "abc"}, {"max_characters": 2}, "too_many_characters", "must have at most 2 characters, found 3"),
        ({"prompt": "ab", "completion": "cd"}, {"max_characters": 3}, "too_many_characters", "found 4"),
        (
            {"prompt": "ab", "completion": "cd"},
            {"min_characters": 3, "on": "completion"},
            "too_short",
            "completion must have at least 3 characters, found 2",
        ),
        ({"messages": CONVERSATION}, {"max_characters": 8}, "too_many_characters", "found 9"),
        ({"steps": ["ab", "cd"]}, {"max_characters": 3}, "too_many_characters", "found 4"),
        # A pair is as long as its longer side where it must not be too long, as its shorter where not too short.
        ({"prompt": "a", "chosen": "bb", "rejected": "cccc"}, {"max_characters": 4}, "too_many_characters", "found 5"),
        ({"prompt": "a", "chosen": "bb", "rejected": "cccc"}, {"min_characters": 4}, "too_short", "found 3"),
    ],
)
def test_length(mapped, operator, reason, detail):
    found, said = rejection(mapped, {"name": "length", **operator})
    assert found == reason and detail in said


def test_length_within_its_limits_and_rows_without_texts_stay():
    operator = {"name": "length", "min_characters": 3, "max_characters": 5}
    for mapped in ({"prompt": "abc"}, {"prompt": "abcde"}, {"label": True}, {"prompt": None}):
        assert cleaned(mapped, operator) is mapped
    pair = {"prompt": "a", "chosen": "bb", "rejected": "cccc"}
    assert cleaned(pair, operator) is pair


GERMAN = "Wie viele Äpfel hat der Bauer noch, nachdem er die Hälfte verkauft hat?"
ENGLISH = "How many apples does the farmer have left after selling half of them?"


def test_language():
    english = {"name": "language", "languages": ["en"]}
    assert cleaned({"prompt": ENGLISH}, english) == {"prompt": ENGLISH}
    reason, detail = rejection({"prompt": GERMAN}, english)
    assert reason == "wrong_language" and detail.startswith("texts must be in en, found de (confidence ")
    assert cleaned({"prompt": GERMAN}, {"name": "language", "languages": ["en", "de"]}) == {"prompt": GERMAN}
    assert rejection({"prompt": "农民在市场上卖掉一半苹果后还剩多少个？"}, english)[0] == "wrong_language"
    mapped = {"prompt": ENGLISH, "completion": GERMAN}
    assert cleaned(mapped, {**english, "on": "prompt"}) is mapped
    assert rejection(mapped, {**english, "on": "completion"})[0] == "wrong_language"


@pytest.mark.parametrize("text", ["", "Hallo Welt!", "12 + 35 = ?", "\\frac{1}{2} x^2", "1" * 500, "\ud800" * 30])
def test_a_text_with_few_letters_stays_whatever_its_language(text):
    assert cleaned({"prompt": text}, {"name": "language", "languages": ["en"]}) == {"prompt": text}


def test_an_unknown_language_is_refused_with_near_ones():
    with pytest.raises(SettingsError, match=r"ISO 639 codes that it knows, got 'eng'; near ones: .*en"):
        row_operators(settings({"name": "language", "languages": ["en", "eng"]}), None, Counter())


def test_operators_work_in_their_order_and_count_what_they_do():
    operations: Counter[str] = Counter()
    recipe = settings(
        {"name": "strip"},
        {"name": "exact_duplicates"},
        {"name": "length", "min_characters": 3},
        {"name": "strip", "on": "completion"},
    )
    operators = row_operators(recipe, None, operations)
    for text in ("  abc ", "abc", "  ab  ", "a"):
        try:
            clean(operators, {"prompt": text}, ROW)
        except Rejected:
            assert "c" not in text
    assert operations == {"1. strip changed": 2, "3. length dropped": 2}


def test_a_function_changes_and_drops_rows(tmp_path):
    written(
        tmp_path,
        "def tidy(row):\n"
        "    if 'secret' in row['prompt']:\n"
        "        return None\n"
        "    row['prompt'] = row['prompt'].upper()\n"
        "    row['metadata']['shape'] = (2, 3)\n"
        "    return row\n",
    )
    custom = {"name": "custom", "path": "own_cleaning.py:tidy"}
    result = cleaned({"prompt": "hi", "metadata": {"a": 1}}, custom, folder=tmp_path)
    assert result == {"prompt": "HI", "metadata": {"a": 1, "shape": [2, 3]}}
    assert rejection({"prompt": "secret", "metadata": {}}, custom, folder=tmp_path) == (
        "dropped_by_function",
        "cleaning function own_cleaning.py:tidy gave null",
    )
    operations: Counter[str] = Counter()
    operators = row_operators(settings(custom), tmp_path, operations)
    for prompt in ("hi", "HI", "secret"):
        try:
            clean(operators, {"prompt": prompt, "metadata": {"shape": [2, 3]}}, ROW)
        except Rejected:
            assert prompt == "secret"
    assert operations == {"1. custom changed": 1, "1. custom dropped": 1}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("raise SystemExit('no')", "it raised SystemExit: no"),
        ("return 'text'", "it must give a dict or None, got 'text' (str)"),
        ("return [row]", "it must give a dict or None, got [{'prompt': 'hi'}] (list)"),
        ("return {**row, 'level': 3}", "must have fields among id, prompt,"),
        ("return {**row, 3: 3}", "got 3; put what is your own under metadata"),
        ("return {**row, 'answer': {1, 2}}", "must hold JSON values, found otherwise: Object of type set"),
        ("return {**row, 'answer': float('nan')}", "must hold JSON values, found otherwise: Out of range float"),
    ],
)
def test_what_a_function_does_wrong_is_said_with_function_row_and_value(tmp_path, body, said):
    written(tmp_path, f"def tidy(row):\n    {body}\n")
    with pytest.raises(CleaningFunctionError) as caught:
        cleaned({"prompt": "hi"}, {"name": "custom", "path": "own_cleaning.py:tidy"}, folder=tmp_path)
    message = str(caught.value)
    assert message.startswith("rows.jsonl row 17: cleaning function own_cleaning.py:tidy: ")
    assert said in message and message.endswith("it was given {'prompt': 'hi'}")


def test_a_function_that_can_not_be_loaded(tmp_path):
    def load(path: str) -> None:
        row_operators(settings({"name": "custom", "path": path}), tmp_path, Counter())

    with pytest.raises(SettingsError, match="cleaning path must name a file"):
        load("gone.py:tidy")
    written(tmp_path, "def tidy(row):\n    return row\n")
    with pytest.raises(SettingsError, match=r"cleaning path must name a function.* it has \['tidy'\]"):
        load("own_cleaning.py:clean")
    written(tmp_path, "1 / 0\n", "own_broken.py")
    with pytest.raises(
        CleaningFunctionError, match=r"cleaning code own_broken\.py:tidy must be importable, it raised Z"
    ):
        load("own_broken.py:tidy")


def test_what_a_function_sets_for_the_process_ends_with_the_cleaning(tmp_path, monkeypatch):
    monkeypatch.delenv("OWN_CLEANING", raising=False)
    written(
        tmp_path,
        "import os\n"
        "def tidy(row):\n"
        "    row['prompt'] += os.environ.get('OWN_CLEANING', '')\n"
        "    os.environ['OWN_CLEANING'] = '!'\n"
        "    return row\n",
    )
    recipe = settings({"name": "custom", "path": "own_cleaning.py:tidy"})
    operators = row_operators(recipe, tmp_path, Counter())
    texts = []
    for _ in range(2):
        with users_code(recipe):
            texts.append(clean(operators, {"prompt": "a"}, ROW)["prompt"])
        assert "OWN_CLEANING" not in os.environ
    assert texts == ["a", "a!"]
    assert isinstance(users_code(settings({"name": "strip"})), nullcontext)


def test_the_code_of_functions_is_their_identity(tmp_path):
    recipe = settings({"name": "strip"}, {"name": "custom", "path": "own_cleaning.py:tidy"})
    written(tmp_path, "def tidy(row):\n    return row\n")
    first = cleaning_identity(recipe, tmp_path)
    assert list(first) == ["2"] and cleaning_identity(recipe, tmp_path) == first
    written(tmp_path, "def tidy(row):\n    return None\n")
    assert cleaning_identity(recipe, tmp_path) != first
    assert cleaning_identity(settings({"name": "strip"}), tmp_path) == {}


def test_the_text_of_a_content():
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    pair = Content("1", "pair", {"prompt": turns, "chosen": [{"role": "assistant", "content": "c"}],
                                 "rejected": [{"role": "assistant", "content": "r"}]})  # fmt: skip
    assert content_text(pair) == "s\nu\nc\nr"
    assert content_text(pair, "prompt") == "s\nu" and content_text(pair, "completion") == "c\nr"
    assert content_text(Content("1", "stepwise", {"prompt": turns, "steps": ["a", "b"]})) == "s\nu\na\nb"
    assert content_text(Content("1", "demonstration", {"text": "plain"})) == "plain"
