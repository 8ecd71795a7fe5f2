"""Who is preferred to whom, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rft_core.advantages import Credits
from rft_core.pairing import CHOSEN, REJECTED, best_against_worst, labels

NAN = float("nan")


def credits(rewards, groups=None, counted=None) -> Credits:
    count = len(rewards)
    groups = [0] * count if groups is None else groups
    return Credits(
        np.array(rewards, np.float64), np.array(groups), np.ones(count, bool) if counted is None else np.array(counted)
    )


def told(roles) -> str:
    """c chosen, j rejected, - neither."""
    return "".join({CHOSEN: "c", REJECTED: "j", None: "-"}[role] for role in roles.role_N)


@pytest.mark.parametrize(
    ("rewards", "groups", "roles", "pairs", "ties"),
    [
        ([1.0, 0.0], [0, 0], "cj", [0, 0], 0),  # a given pair
        ([0.5, 2.0, 1.0, -1.0], [0] * 4, "-c-j", [-1, 0, -1, 0], 0),
        ([1.0, 1.0, 0.0, 0.0], [0] * 4, "c-j-", [0, -1, 0, -1], 0),  # of equals the earlier
        ([0.0, 1.0, 0.0, 1.0], [0] * 4, "jc--", [0, 0, -1, -1], 0),
        ([1.0, 1.0], [0, 0], "--", [-1, -1], 1),
        ([1.0], [0], "-", [-1], 1),
        ([1.0, 3.0, 0.0, 3.0, 7.0], [4, 2, 4, 2, 9], "c-j--", [0, -1, 0, -1, -1], 2),  # ties make no pair
        ([1.0, 2.0, 0.0, 5.0], [1, 0, 1, 0], "cjjc", [1, 0, 1, 0], 0),
        ([], [], "", [], 0),
    ],
)
def test_best_against_worst(rewards, groups, roles, pairs, ties):
    found = best_against_worst(credits(rewards, groups))
    assert (told(found), found.pair_N.tolist(), found.num_ties) == (roles, pairs, ties)
    assert found.sign_N.tolist() == [{"c": 1.0, "j": -1.0, "-": 0.0}[role] for role in roles]


def test_rows_that_are_not_counted_are_in_no_pair():
    found = best_against_worst(credits([9.0, 1.0, 0.0, NAN], counted=[False, True, True, False]))
    assert told(found) == "-cj-"
    assert told(best_against_worst(credits([9.0, 1.0], counted=[False, True]))) == "--"


def test_labels_are_true_from_a_half_on():
    found = labels(credits([1.0, 0.0, 0.5, 0.49, -3.0, NAN], range(6), [True] * 5 + [False]))
    assert told(found) == "cjcjj-"
    assert found.pair_N.tolist() == [-1] * 6 and found.num_ties == 0
    assert found.sign_N.tolist() == [1.0, -1.0, 1.0, -1.0, -1.0, 0.0]
