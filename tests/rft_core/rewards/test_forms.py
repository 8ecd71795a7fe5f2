"""answer_format by tags and JSON schema, extraction, language, self_verification."""

from __future__ import annotations

import pytest

from rft_core.errors import SettingsError
from rft_core.rewards import answer_format, exact_match, language, numeric_answer, self_verification
from rft_core.rewards.extract import NotThere, extract, json_object
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction


def row_of(text: str, answer: str | None = None, **earlier: float | None) -> RewardRow:
    row = RewardRow("r", "p", [], text, answer, {}, "stop")
    row.earlier = earlier
    return row


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("<think>a</think>\n<answer>4</answer>\n", 1.0, None),
        ("<think>a</think>", 0.0, "<answer> occurs 0 times"),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0, "<answer> occurs 2 times"),
        ("<answer>4</answer><think>a</think>", 0.0, "<think> must follow at once, in the order think, answer"),
        ("<think>a<answer>4</answer></think>", 0.0, "<answer> must follow at once, in the order think, answer"),
        ("<think>a</think> so <answer>4</answer>", 0.0, "<answer> must follow at once, in the order think, answer"),
        ("<think> </think><answer>4</answer>", 0.0, "<think> is empty"),
        ("<think>a</think><answer>4</answer>.", 0.0, "text after the last tag"),
    ],
)
def test_tags(text, value, reason):
    settings = RewardFunction(name="answer_format", tags=["think", "answer"])
    assert answer_format.build(settings, None).score([row_of(text)]) == [Scored(value, reason)]


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ('{"answer": 4}', 1.0, None),
        ('```json\n{"answer": 4}\n```\n', 1.0, None),
        ('Sure: {"answer": 4}', 0.0, "no JSON"),
        ('{"answer": 4} {"answer": 5}', 0.0, "no JSON"),
        ('{"answer": 4, "answer": 5}', 0.0, "a key is repeated"),
        ('{"answer": NaN}', 0.0, "NaN is no JSON"),
        ('{"answer": "4"}', 0.0, "answer: '4' is not of type 'integer'"),
        ('{"answer": 4, "why": "x"}', 0.0, "'why' was unexpected"),
        ("[4]", 0.0, "JSON, but no object: list"),
        ('{"a":' * 5000 + "1" + "}" * 5000, 0.0, "JSON more than 100 deep"),
        ('{"answer": ' + "9" * 5000 + "}", 0.0, "no JSON"),
    ],
)
def test_json(text, value, reason):
    settings = RewardFunction(name="answer_format", json_schema=SCHEMA)
    scored = answer_format.build(settings, None).score([row_of(text)])[0]
    assert scored.value == value
    assert scored.reason is None if reason is None else reason in scored.reason


def test_a_schema_that_is_none_and_one_that_would_fetch():
    wrong = RewardFunction(name="answer_format", json_schema={"type": "nothing"})
    with pytest.raises(SettingsError, match="answer_format: json_schema must be a JSON schema"):
        answer_format.build(wrong, None)
    remote = RewardFunction(name="answer_format", json_schema={"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(SettingsError, match="json_schema must hold all that it refers to"):
        answer_format.build(remote, None)


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("a <answer> 1 </answer> <answer>2</answer>", "tag.answer", "2"),
        ('{"result": {"value": [1, 2]}}', "json.result.value", "[1, 2]"),
        ('{"answer": "4 "}', "json.answer", "4 "),
        ("all", None, "all"),
    ],
)
def test_extract(text, place, found):
    assert extract(text, place) == found


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("<answer>1", "tag.answer", "no <answer>"),
        ("1</answer><answer>", "tag.answer", "no <answer>"),
        ('{"a": 1}', "json.answer", "has no field 'answer'"),
        ('{"a": 1}', "json.a.b", "has no field 'a.b'"),
    ],
)
def test_what_is_not_there(text, place, message):
    with pytest.raises(NotThere, match=message):
        extract(text, place)


def test_brackets_in_texts_are_no_depth():
    assert json_object('{"a": "' + "[" * 500 + '"}') == {"a": "[" * 500}


def test_answers_are_looked_for_where_the_recipe_says():
    exact = exact_match.build(RewardFunction(name="exact_match", answer_in="tag.answer"), None)
    assert exact.score([row_of("so <answer> b </answer> c", "b")])[0] == Scored(1.0)
    assert exact.score([row_of("b", "b")])[0] == Scored(0.0, "no <answer>...</answer>")
    number = numeric_answer.build(RewardFunction(name="numeric_answer", answer_in="json.answer"), None)
    values = [number.score([row_of(text, "4")])[0].value for text in ('{"answer": 4}', '{"answer": "4"}', "4", "{}")]
    assert values == [1.0, 1.0, 0.0, 0.0]


ENGLISH = "The quick brown fox jumps over the lazy dog and runs away into the forest."
GERMAN = "Der schnelle braune Fuchs springt ueber den faulen Hund und laeuft in den Wald."
CHINESE = "这是一个关于数学推理的问题，我们需要一步一步地解决它。"


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        (ENGLISH, 1.0, 1.0),
        (CHINESE, 0.0, 0.0),
        (f"{ENGLISH}\n{GERMAN}", 0.4, 0.6),
        (f"{ENGLISH}\n```\n{GERMAN}\n```", 1.0, 1.0),  # code is no language
        ("42", 1.0, 1.0),
    ],
)
def test_language(text, low, high):
    scorer = language.build(RewardFunction(name="language", language="en"), None)
    scored = scorer.score([row_of(text)])[0]
    assert low <= scored.value <= high


def test_an_unknown_language_is_refused():
    with pytest.raises(SettingsError, match=r"language of language must be among .* en, .*, got 'english'"):
        language.build(RewardFunction(name="language", language="english"), None)


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("4 <confidence>0.8</confidence>", 1.0, -0.04),
        ("4 <confidence>80%</confidence>", 0.0, -0.64),
        ("4 <confidence>1</confidence>", 1.0, 0.0),
        ("4", 1.0, -1.0),
        ("4 <confidence>very</confidence>", 1.0, -1.0),
        ("4 <confidence>1.5</confidence>", 1.0, -1.0),
        ("4 <confidence>nan</confidence>", 1.0, -1.0),
        ("4 <confidence>0.8</confidence>", None, None),
    ],
)
def test_confidence(text, truth, value):
    scorer = self_verification.build(RewardFunction(name="self_verification", of="accuracy"), None)
    scored = scorer.score([row_of(text, accuracy=truth)])[0]
    assert scored.value == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("<check>Correct.</check>", 1.0, 1.0),
        ("<check>correct</check>", 0.0, 0.0),
        ("<check>No</check>", 0.0, 1.0),
        ("<check>maybe</check>", 1.0, 0.0),
        ("correct", 1.0, 0.0),
    ],
)
def test_verdict(text, truth, value):
    settings = RewardFunction(name="self_verification", of="a", verification={"kind": "verdict", "tag": "check"})
    assert self_verification.build(settings, None).score([row_of(text, a=truth)])[0].value == value
