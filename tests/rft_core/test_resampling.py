"""Which groups carry signal, and what credit makes of the others."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_contracts.schemas import REWARDS
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.errors import SettingsError
from rft_core.resampling import groups_with_signal


def rewards(*groups: tuple[str, list[float | None]], shaped: float = 0.0) -> pa.Table:
    """Rows whose component `right` is as given; the reward has a penalty of its own for each row."""
    rows = [
        {
            "rollout_id": f"{group}/{index:02d}",
            "group_id": group,
            "reward": None if score is None else score - shaped * index,
            "components": [("right", score)],
            "component_status": [("right", "scored" if score is not None else "lost")],
            "status": "unscored" if score is None else "scored",
            "reason": "lost" if score is None else None,
            "grader_digest": "x",
        }
        for group, scores in groups
        for index, score in enumerate(scores)
    ]
    return pa.Table.from_pylist(rows, schema=REWARDS.schema)


GROUPS = (("all", [1.0, 1.0]), ("b", [0.0, 1.0]), ("none", [0.0, 0.0]), ("lone", [None, 1.0]), ("a", [1.0, 0.0, None]))


def kept(table: pa.Table, **settings: object) -> list[str]:
    return groups_with_signal(table, AlgorithmSettings(name="dapo", **settings))


def test_groups_that_spread_are_kept_in_order_of_appearance():
    assert kept(rewards(*GROUPS)) == ["b", "a"]
    assert kept(rewards()) == []


def test_a_named_component_is_looked_at_before_shaping():
    """A penalty makes the rewards of every group spread; what is right does not."""
    assert kept(rewards(*GROUPS, shaped=0.1)) == ["all", "b", "none", "a"]
    assert kept(rewards(*GROUPS, shaped=0.1), filter_on="right") == ["b", "a"]


def test_small_groups_have_no_signal():
    assert kept(rewards(*GROUPS), min_group_size=3) == []


def test_an_unknown_component_is_named():
    with pytest.raises(SettingsError, match=r"filter_on must be one of \['right'\], got 'wrong'"):
        kept(rewards(*GROUPS), filter_on="wrong")


def test_rounding_is_no_spread():
    assert kept(rewards(("a", [0.3, 0.1 + 0.2]))) == []
