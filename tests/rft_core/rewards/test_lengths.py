"""Rewards by length and repetition, against the handed cases of other systems."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from rft_core.errors import SettingsError
from rft_core.rewards import lengths, repetition
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import LengthSettings, RewardFunction

ALL = [
    json.loads(line) for line in (Path(__file__).parents[2] / "cases" / "numeric_cases.jsonl").read_text().splitlines()
]
CASES = [case for case in ALL if isinstance(case["expected"], float | int) and case["inputs"]]


def row_of(size: int, masked: int = 0, **earlier: float | None) -> RewardRow:
    """A completion of so many tokens, of which the last `masked` are not the policy's."""
    ids = pa.array([[9, 9], list(range(size))], pa.large_list(pa.int32()))
    masks = pa.array([[True, True], [True] * (size - masked) + [False] * masked], pa.large_list(pa.bool_()))
    row = RewardRow("r", "p", [], "", None, {}, "stop", tokens=(ids, masks, 1))
    row.earlier = earlier
    return row


def cases(prefix: str) -> list[dict]:
    found = [case for case in CASES if case["id"].startswith(prefix)]
    assert found
    return found


@pytest.mark.parametrize("case", cases("soft_overlong"), ids=lambda case: case["id"])
def test_soft_overlong(case):
    given = case["inputs"]
    length = {"max_tokens": given["max_completion_len"], "buffer": given["soft_punish_cache"]}
    scorer = lengths.build_soft_overlong(RewardFunction(name="soft_overlong", length=length), None)
    scored = scorer.score([row_of(given["length"] + 7, masked=7)])[0]
    assert scored.value == pytest.approx(case["expected"], abs=case["tolerance"])


def test_soft_overlong_over_many_lengths():
    case = next(case for case in ALL if case["id"] == "overlong_orlhf")
    settings = LengthSettings(max_tokens=100, buffer=20)
    found = [lengths.soft_overlong(length, settings) for length in case["inputs"]["lengths"]]
    assert found == pytest.approx(case["expected"], abs=case["tolerance"])


@pytest.mark.parametrize("case", cases("cosine"), ids=lambda case: case["id"])
def test_length_cosine(case):
    given = case["inputs"]
    correct = (given.get("max_value_correct", 1.0), given.get("min_value_correct", 0.5))
    length = {"max_tokens": given["max_len"], "correct": correct}
    settings = RewardFunction(name="length_cosine", of="accuracy", length=length)
    scorer = lengths.build_length_cosine(settings, None)
    assert scorer.needs_earlier
    scored = scorer.score([row_of(given["length"], accuracy=float(given["is_correct"]))])[0]
    assert scored.value == pytest.approx(case["expected"], abs=case["tolerance"])


def test_what_has_no_length_or_no_truth_is_unscored():
    settings = RewardFunction(name="length_cosine", of="accuracy")
    without = RewardRow("r", "p", [], "text", None, {}, "stop")
    without.earlier = {"accuracy": 1.0}
    scores = lengths.build_length_cosine(settings, None).score([without, row_of(3, accuracy=None)])
    assert [scored.value for scored in scores] == [None, None]
    assert "no tokens" in scores[0].reason and "accuracy has no score" in scores[1].reason
    assert lengths.build_soft_overlong(RewardFunction(name="soft_overlong"), None).score([without])[0].value is None


def test_a_buffer_longer_than_all_is_refused():
    settings = RewardFunction(name="soft_overlong", length={"max_tokens": 10, "buffer": 11})
    with pytest.raises(SettingsError, match=r"length.buffer of soft_overlong must be at most length.max_tokens \(10\)"):
        lengths.build_soft_overlong(settings, None)


@pytest.mark.parametrize("case", cases("repetition"), ids=lambda case: case["id"])
def test_repetition(case):
    given = case["inputs"]
    found = repetition.repetition(given["completion_ids"], given["ngram_size"], given["max_penalty"])
    assert found == pytest.approx(case["expected"], abs=case["tolerance"])


def test_repetition_of_words_and_tokens():
    words = RewardFunction(name="repetition", repetition={"ngram": 2, "unit": "words"})
    row = RewardRow("r", "p", [], "No no NO no\nyes", None, {}, "stop")  # 4 pairs, 2 of them distinct
    assert repetition.build(words, None).score([row])[0].value == -0.5
    tokens = RewardFunction(name="repetition")
    assert repetition.build(tokens, None).score([row])[0].value is None
    assert repetition.build(tokens, None).score([row_of(5)])[0].value == 0.0
