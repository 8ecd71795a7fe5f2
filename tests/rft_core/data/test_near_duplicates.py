"""Near duplicates against exact similarities of shingles, worked out without signatures."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rft_core.data import near_duplicates as module
from rft_core.data.near_duplicates import NearDuplicates, bands_of, signature

WORDS = [f"w{number}" for number in range(5000)]


def similarity(first: str, second: str) -> float:
    """Exact Jaccard similarity of runs of three words, for texts of words and spaces."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[start : start + 3]) for start in range(len(words) - 2)}

    return len(runs(first) & runs(second)) / len(runs(first) | runs(second))


def changed(text: str, count: int, rng: random.Random) -> str:
    words = text.split()
    for place in rng.sample(range(len(words)), count):
        words[place] = rng.choice(WORDS)
    return " ".join(words)


def is_near(first: str, second: str, threshold: float = 0.8) -> bool:
    index = NearDuplicates(threshold)
    assert index.seen(signature(first), 1) is None
    return index.seen(signature(second), 2) is not None


def test_signatures_estimate_the_similarity_of_shingles():
    rng = random.Random(1)
    errors = []
    for _ in range(300):
        first = " ".join(rng.choices(WORDS, k=60))
        second = changed(first, rng.randint(0, 12), rng)
        errors.append((signature(first) == signature(second)).mean() - similarity(first, second))
    # The standard deviation of one estimate is at most 0.044, of the mean of 300 at most 0.0026.
    assert abs(np.mean(errors)) < 0.01 and np.std(errors) < 0.05


def test_signatures_are_the_same_everywhere():
    found = signature("What is 3 + 4?")
    assert (found.dtype, found.shape) == (np.uint32, (128,))
    assert found[:3].tolist() == GOLDEN


GOLDEN = [97667865, 1380674538, 1091162072]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("What is the capital of France?", "what is  the CAPITAL\nof France?", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3 + 4?", "What is 3 + 5?", False),
        ("yes", "yes", True),
        ("yes", "no", False),
        ("one two", "two one", False),
        ("农民在市场上卖掉一半苹果后还剩多少个呢", "农民在市场上卖掉一半苹果后还剩多少个呢？", True),
        ("农民在市场上卖掉一半苹果后还剩多少个呢", "火车中午离开车站，两小时后到达目的地", False),
        ("\ud800", "\ud800", True),
        ("", "", True),
    ],
)
def test_what_counts_as_the_same(first, second, is_same):
    assert is_near(first, second) == is_same


def test_pairs_above_the_threshold_are_found_and_pairs_below_are_not():
    rng = random.Random(2)
    found = {"above": [], "below": []}
    while min(map(len, found.values())) < 150:
        first = " ".join(rng.choices(WORDS, k=60))
        second = changed(first, rng.randint(0, 8), rng)
        exact = similarity(first, second)
        side = "above" if exact > 0.87 else "below" if exact < 0.73 else None
        if side:
            found[side].append(is_near(first, second))
    # Two standard deviations of the estimate from the threshold on either side.
    assert np.mean(found["above"]) > 0.95 and np.mean(found["below"]) < 0.05


def test_the_first_row_kept_wins_and_a_dropped_row_attracts_nothing():
    rng = random.Random(3)
    text = " ".join(rng.choices(WORDS, k=100))
    drifting = [text]
    while similarity(text, drifting[-1]) > 0.5:
        drifting.append(changed(drifting[-1], 1, rng))
    index = NearDuplicates(0.8)
    kept = [row for row, version in enumerate(drifting) if index.seen(signature(version), row) is None]
    assert kept[0] == 0 and 1 not in kept and len(kept) > 1
    assert index.seen(signature(text), 999) == 0
    assert index.seen(signature(drifting[kept[1]]), 999) == kept[1]


def test_exact_copies_alone_at_threshold_one():
    rng = random.Random(4)
    text = " ".join(rng.choices(WORDS, k=60))
    assert is_near(text, text, 1.0) and not is_near(text, changed(text, 2, rng), 1.0)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.8, 0.9, 0.99, 1.0])
def test_bands_fit_and_catch_the_pairs_at_the_threshold(threshold):
    bands, places = bands_of(threshold)
    assert bands * places <= module.NUM_HASHES
    assert 1 - (1 - threshold**places) ** bands >= module.RECALL


def test_many_rows_grow_the_index():
    rng = random.Random(5)
    texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(3000)]
    index = NearDuplicates(0.8)
    assert all(index.seen(signature(text), row) is None for row, text in enumerate(texts))
    assert [index.seen(signature(text), 9999) for text in texts[::100]] == list(range(0, 3000, 100))


def test_a_full_bucket_bounds_the_search(monkeypatch):
    monkeypatch.setattr(module, "MAX_CANDIDATES", 2)
    rng = random.Random(6)
    head = " ".join(rng.choices(WORDS, k=30))
    texts = [f"{head} {' '.join(rng.choices(WORDS, k=20))}" for _ in range(50)]
    index = NearDuplicates(0.8)
    for row, text in enumerate(texts):
        index.seen(signature(text), row)
    # Each has bands of its own beside those of the template, so its copy is found all the same.
    assert [index.seen(signature(text), 99) for text in texts] == list(range(50))
