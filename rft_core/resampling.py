"""Dynamic sampling: which groups carry signal, and so whether a step needs fresh prompts (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rft_core.advantages import has_no_signal
from rft_core.errors import SettingsError

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings


def groups_with_signal(rewards: pa.Table, settings: AlgorithmSettings) -> list[str]:
    """Ids of the groups whose scores spread, in order of appearance: scores of the component `filter_on`, else rewards
    before any shaping. A group with fewer than `min_group_size` scores has none.

    Raises SettingsError for a component that no row has.
    """
    scores: dict[str, list[float]] = {}
    is_known = settings.filter_on is None or not rewards.num_rows
    for row in rewards.select(["group_id", "reward", "components"]).to_pylist():
        components = dict(row["components"] or [])
        is_known = is_known or settings.filter_on in components
        score = row["reward"] if settings.filter_on is None else components.get(settings.filter_on)
        group = scores.setdefault(row["group_id"], [])
        if score is not None:
            group.append(score)
    if not is_known:
        names = sorted({name for row in rewards["components"].to_pylist() for name, _ in row or []})
        raise SettingsError(f"algorithm.filter_on must be one of {names}, got {settings.filter_on!r}")
    return [
        group
        for group, found in scores.items()
        if len(found) >= settings.min_group_size and not has_no_signal(np.array(found), settings.spread_floor)
    ]
