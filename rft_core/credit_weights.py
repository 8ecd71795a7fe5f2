"""How often a row counts: the weights of record `advantages`. A row is never copied.

Shapes: N rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rft_core.joined import Joined
from rft_core.seeds import derive


def row_weights(
    joined: Joined, filling: Sequence[str], wanted: int | None, expert_weights: Mapping[str, float] | None, seed: int
) -> np.ndarray:
    """float64[N]: of own rows how often their group counts where the groups `filling` are to be as many as `wanted`, of
    given ones the weight of their example's source; else 1."""
    given, own = expert_weights or {}, copies_to_fill(filling, wanted, seed)
    rows = zip(joined.is_expert_N, joined.prompt_ids, joined.group_ids, strict=True)
    return np.array(
        [given.get(prompt, 1.0) if is_given else own.get(group, 1) for is_given, prompt, group in rows], float
    )


def copies_to_fill(groups: Sequence[str], wanted: int | None, seed: int) -> dict[str, int]:
    """How often each group counts so that together they are `wanted`: whole groups, as evenly as can be, by lot what is
    left over (POLARIS, https://hkunlp.github.io/blog/2025/Polaris, copies groups with signal over those without).

    >>> sorted(copies_to_fill(["a", "b", "c"], 8, seed=0).values())
    [2, 3, 3]
    """
    if not groups:
        return {}
    each, left = divmod(max(wanted or 0, len(groups)), len(groups))
    lucky = sorted(groups, key=lambda group: derive(seed, "fill", group))[:left]
    return {group: each + (group in lucky) for group in groups}
