"""Reason codes: what the README says of them, and what policies they allow."""

import re

import pytest

from data_contracts.reasons import ACTIONS, EXPECTED_LOSSES, REASONS
from tests.house.sources import REPOSITORY

ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (\w+) \| ([\w, ]+) \|$", re.MULTILINE)


def test_the_readme_lists_every_reason_with_its_policies():
    rows = {code: rest for code, *rest in ROW.findall((REPOSITORY / "data_contracts/README.md").read_text())}
    expected = {
        code: [
            reason.meaning + (f"; repair: {reason.mend}" if reason.mend else ""),
            reason.policy,
            ", ".join(reason.allowed),
        ]
        for code, reason in REASONS.items()
    }
    assert rows == expected


@pytest.mark.parametrize("code", REASONS)
def test_a_default_is_among_what_is_allowed(code):
    reason = REASONS[code]
    assert reason.policy in reason.allowed
    assert set(reason.allowed) <= ACTIONS.keys()
    assert re.fullmatch(r"[a-z][a-z0-9_]*", code)


def test_expected_losses_are_reasons():
    assert REASONS.keys() >= EXPECTED_LOSSES
