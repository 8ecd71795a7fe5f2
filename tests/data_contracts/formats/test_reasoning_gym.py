"""Procedural sources: rows that their verifiers accept, the same every time."""

from __future__ import annotations

import json

import pytest

from data_contracts.errors import SettingsError
from data_contracts.formats import read_source, source_digest
from data_contracts.schemas import from_plain

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_generated_rows_carry_what_their_verifier_needs():
    from reasoning_gym import create_dataset

    rows = list(read_source("reasoning_gym:chain_sum", ONE_DIGIT, 3, 5))
    entries = list(create_dataset("chain_sum", size=3, seed=5, **ONE_DIGIT))
    assert [row.source for row in rows] == ["reasoning_gym:chain_sum"] * 3
    assert [row.row for row in rows] == [1, 2, 3]
    for row, entry in zip(rows, entries, strict=True):
        assert json.loads(row.raw) == row.value
        assert row.value["prompt"] == entry["question"]
        assert row.value["answer"] == entry["answer"]
        assert from_plain(row.value["entry"]) == entry  # tuples of `difficulty` too
        verifier = create_dataset(row.value["source_dataset"], **row.value["parameters"])
        assert verifier.score_answer(entry["answer"], from_plain(row.value["entry"])) == 1.0


def test_rows_do_not_depend_on_the_hash_seed():
    # ransom_note walks a set of letters: under another PYTHONHASHSEED its rows differ within one process.
    first, second = ([row.raw for row in read_source("reasoning_gym:ransom_note", {}, 5, 1)] for _ in range(2))
    assert first == second and len(set(first)) == 5


def test_composite_rows_name_the_generator_that_made_them():
    parts = [{"name": "chain_sum", "config": ONE_DIGIT}, {"name": "leg_counting", "weight": 2}]
    rows = list(read_source("reasoning_gym:composite", {"datasets": parts}, 8, 1))
    found = {row.value["source_dataset"]: row.value["parameters"] for row in rows}
    assert found == {"chain_sum": ONE_DIGIT, "leg_counting": {}}


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("chain_sun", {}, "near: chain_sum"),
        ("chain_sum", {"max_term": 2}, "must be among min_terms, max_terms.*found 'max_term'; near: max_terms"),
        ("chain_sum", {"size": 2}, "set data.size instead"),
        ("chain_sum", {"seed": 2}, "set data.seed instead"),
        ("chain_sum", {"max_terms": 1}, "max_terms must be >= min_terms"),
        ("composite", {"datasets": [{"nam": "chain_sum"}]}, "name, weight, config"),
    ],
)
def test_wrong_generators_and_parameters_are_named(name, parameters, words):
    with pytest.raises(SettingsError, match=words):
        read_source(f"reasoning_gym:{name}", parameters, 5, 1)
    with pytest.raises(SettingsError, match=words):
        source_digest(f"reasoning_gym:{name}", parameters, 5, 1)


def test_generator_digest_follows_everything_that_decides_the_rows():
    base = source_digest("reasoning_gym:chain_sum", ONE_DIGIT, 10, 1)
    assert base == source_digest("reasoning_gym:chain_sum", dict(reversed(ONE_DIGIT.items())), 10, 1)
    others = {
        source_digest("reasoning_gym:chain_sum", {}, 10, 1),
        source_digest("reasoning_gym:chain_sum", ONE_DIGIT, 11, 1),
        source_digest("reasoning_gym:chain_sum", ONE_DIGIT, 10, 2),
        source_digest("reasoning_gym:leg_counting", {}, 10, 1),
    }
    assert len(others | {base}) == 5
    # size null is 500
    assert source_digest("reasoning_gym:chain_sum", {}, None, 1) == source_digest("reasoning_gym:chain_sum", {}, 500, 1)
