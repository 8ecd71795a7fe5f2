"""Texts that are nearly the same: MinHash signatures of word shingles, and an index of them by bands.

Locality-sensitive hashing, as in Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3.

Two texts are near duplicates when their signatures agree in at least `threshold` of their places, which estimates the
Jaccard similarity of their shingles to within 0.04. Symbols count as words: 3 + 4 and 3 - 4 are not the same.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from typing import Any

import numpy as np

NUM_HASHES = 128
SEED = 1
SHINGLE_WORDS = 3
RECALL = 0.95  # share of the pairs right at the threshold that meet in a band
# Texts from one template meet in bands without being near duplicates; with a bound the cost stays linear in rows.
MAX_CANDIDATES = 64

# Scripts that put no spaces between words go by the character: Thai, Lao, Myanmar, Khmer, Kana, Han.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def signature(text: str) -> np.ndarray:
    """uint32[NUM_HASHES] of the text's shingles: runs of three words, whatever their case; a shorter text is one."""
    words = _WORD.findall(text.casefold())
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    shingles = {" ".join(words[start : start + SHINGLE_WORDS]) for start in starts}
    minhash = _empty().copy()
    minhash.update_batch([shingle.encode(errors="surrogatepass") for shingle in sorted(shingles)])
    return minhash.hashvalues


@cache
def _empty() -> Any:
    # The permutations mix their input first, so a quick hash serves them.
    from datasketch import MinHash  # loads scipy, and most data sets do not ask for it

    return MinHash(num_perm=NUM_HASHES, seed=SEED, hashfunc=zlib.crc32)


def bands_of(threshold: float) -> tuple[int, int]:
    """(bands, places in each): the longest bands in one of which RECALL of the pairs at the threshold agree.

    >>> bands_of(0.8), bands_of(1.0)
    ((18, 7), (2, 64))
    """
    for places in range(NUM_HASHES // 2, 0, -1):
        bands = NUM_HASHES // places
        if 1 - (1 - threshold**places) ** bands >= RECALL:
            return bands, places
    return NUM_HASHES, 1


class NearDuplicates:
    """An index of the rows kept so far. Holds about 2.5 KB a row; the index of `datasketch` holds 6 and takes ten times
    as long."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.bands, self.places = bands_of(threshold)
        multipliers = np.random.Generator(np.random.Philox(key=SEED)).integers(
            2**64, size=(self.bands, self.places), dtype=np.uint64
        )
        self._multipliers = multipliers | np.uint64(1)
        self._newest: dict[int, int] = {}  # the last row kept in each bucket
        self._older = np.empty((1024, self.bands), np.int32)  # by kept row and band: the one before it in its bucket
        self._signatures = np.empty((1024, NUM_HASHES), np.uint32)
        self._rows: list[int] = []

    def seen(self, signature: np.ndarray, row: int) -> int | None:
        """The first row kept that this one nearly equals; null when there is none, and it is kept itself."""
        parts = signature[: self.bands * self.places].reshape(self.bands, self.places)
        buckets = (parts * self._multipliers).sum(axis=1, dtype=np.uint64).tolist()
        candidates = self._candidates(buckets)
        agreeing = (self._signatures[candidates] == signature).mean(axis=1)
        near = candidates[agreeing >= self.threshold]
        if len(near):
            return self._rows[int(near.min())]
        self._keep(signature, row, buckets)
        return None

    def _candidates(self, buckets: list[int]) -> np.ndarray:
        found = set()
        for band, bucket in enumerate(buckets):
            kept = self._newest.get(bucket, -1)
            for _ in range(MAX_CANDIDATES):
                if kept < 0:
                    break
                found.add(kept)
                kept = int(self._older[kept, band])
        return np.fromiter(found, np.int64, len(found))

    def _keep(self, signature: np.ndarray, row: int, buckets: list[int]) -> None:
        kept = len(self._rows)
        if kept == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
            self._older = np.concatenate([self._older, np.empty_like(self._older)])
        self._signatures[kept] = signature
        self._older[kept] = [self._newest.get(bucket, -1) for bucket in buckets]
        self._newest.update(dict.fromkeys(buckets, kept))
        self._rows.append(row)
