"""Who is preferred to whom, from rewards: pure functions, and the table that names them. For preference objectives.

Shapes: N rollouts; a group is the set of rollouts with one number in `group_N`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rft_core.advantages import Credits

CHOSEN, REJECTED = "chosen", "rejected"
DESIRABLE_FROM = 0.5  # a reward of at least this is a label True: labels are 1 and 0


@dataclass(frozen=True)
class Roles:
    """`role_N`: chosen, rejected or None; `pair_N`: number of the pair, -1 where the row is in none."""

    role_N: np.ndarray
    pair_N: np.ndarray
    num_ties: int = 0

    @property
    def sign_N(self) -> np.ndarray:
        """float64[N]: 1 chosen, -1 rejected, 0 neither."""
        return (self.role_N == CHOSEN).astype(np.float64) - (self.role_N == REJECTED)


def best_against_worst(credits: Credits) -> Roles:
    """One pair per group: its best member against its worst, the earlier of equals. A group whose members all tie, or
    that has one member, makes no pair. A given pair (rewards 1 and 0) is the plain case.

    >>> roles = best_against_worst(Credits(np.array([0.0, 2.0, 1.0]), np.zeros(3, int), np.ones(3, bool)))
    >>> roles.role_N.tolist()
    ['rejected', 'chosen', None]
    """
    role_N = np.full(len(credits.reward_N), None, dtype=object)
    pair_N = np.full(len(credits.reward_N), -1, dtype=np.int64)
    num_pairs = num_ties = 0
    for members in credits.groups():
        rewards = credits.reward_N[members]
        best, worst = members[int(rewards.argmax())], members[int(rewards.argmin())]
        if rewards.max() == rewards.min():
            num_ties += 1
            continue
        role_N[best], role_N[worst] = CHOSEN, REJECTED
        pair_N[[best, worst]] = num_pairs
        num_pairs += 1
    return Roles(role_N, pair_N, num_ties)


def labels(credits: Credits) -> Roles:
    """Each rollout by itself: desirable (chosen) from a reward of 0.5, else undesirable (rejected)."""
    role_N = np.where(credits.reward_N >= DESIRABLE_FROM, CHOSEN, REJECTED).astype(object)
    role_N[~credits.is_counted_N] = None
    return Roles(role_N, np.full(len(role_N), -1, dtype=np.int64))


PAIRINGS = {"pairs": best_against_worst, "labels": labels}
