"""The handed numbers of tests/cases/numeric_cases.jsonl that concern credit, losses and token logprobs, by id.

Every id of the file is in exactly one of MET, OTHER_CONVENTION and LATER; the last two say why.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rft_core import (
    numeric_cases_credit,
    numeric_cases_critic,
    numeric_cases_distillation,
    numeric_cases_gates,
    numeric_cases_losses,
    numeric_cases_preference,
)
from tests.rft_core.numeric_cases_left_out import LATER, OTHER_CONVENTION

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "cases" / "numeric_cases.jsonl").read_text().splitlines())
}

MET = {
    name: met
    for part in (
        numeric_cases_credit,
        numeric_cases_critic,
        numeric_cases_losses,
        numeric_cases_gates,
        numeric_cases_preference,
        numeric_cases_distillation,
    )
    for name, met in part.MET.items()
}


def test_every_case_is_met_or_has_a_reason():
    unmet = [name for part in (OTHER_CONVENTION, LATER) for names in part.values() for name in names.split()]
    named = [*MET, *unmet]
    assert len(named) == len(set(named))
    assert set(named) == set(CASES)


@pytest.mark.parametrize("name", MET)
def test_case(name):
    case = CASES[name]
    found, wanted = MET[name](case["inputs"]), case["expected"]
    if isinstance(found, dict):
        assert set(found) <= set(wanted)
        wanted = {part: wanted[part] for part in found}
    assert_near(found, wanted, max(case["tolerance"], 2e-6))


def assert_near(found, wanted, tolerance):
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for part in wanted:
            assert_near(found[part], wanted[part], tolerance)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_near(one, other, tolerance)
    elif isinstance(wanted, str):
        assert found == wanted
    else:
        assert found == pytest.approx(wanted, abs=tolerance, rel=tolerance)
