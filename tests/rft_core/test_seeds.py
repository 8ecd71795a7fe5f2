import hashlib
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rft_core.seeds import derive, permutation, uniforms

SEEDS = st.integers(0, 2**63 - 1)


def test_derive_is_the_documented_hash():
    # SHA-256 of "7", "str:rollout", "int:3" joined by unit separators; its first 63 bits.
    digest = hashlib.sha256(b"7\x1fstr:rollout\x1fint:3").hexdigest()
    assert derive(7, "rollout", 3) == int(digest[:16], 16) // 2


def test_parts_do_not_run_together():
    assert len({derive(0, "a", "bc"), derive(0, "ab", "c"), derive(0, "abc"), derive(0, 1), derive(0, "1")}) == 5


@given(SEEDS, st.integers(0, 50), st.integers(0, 50))
def test_a_longer_stream_begins_with_the_shorter(seed, short, more):
    # So a completion's draws do not depend on how many tokens it may have.
    assert np.array_equal(uniforms(seed, short + more)[:short], uniforms(seed, short))


@given(SEEDS)
def test_uniforms_lie_in_the_unit_interval(seed):
    draws = uniforms(seed, 100)
    assert draws.dtype == np.float64
    assert ((draws >= 0) & (draws < 1)).all()


def test_neighbouring_seeds_are_unrelated():
    # 200 pairs of streams of 1000: correlations have a standard deviation of 0.032; none should reach six of them.
    streams = np.stack([uniforms(derive(0, "rollout", index), 1000) for index in range(201)])
    correlations = [np.corrcoef(a, b)[0, 1] for a, b in pairwise(streams)]
    assert np.abs(correlations).max() < 0.2
    assert abs(streams.mean() - 0.5) < 0.01


@given(SEEDS, st.integers(0, 60))
def test_permutation_holds_every_index_once(seed, count):
    assert sorted(permutation(seed, count)) == list(range(count))


def test_seeds_give_different_orders():
    assert not np.array_equal(permutation(1, 50), permutation(2, 50))
