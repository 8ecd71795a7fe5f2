"""Seeds derived from what they are for, so that no draw depends on order, batch or process."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(run_seed: int, *parts: str | int) -> int:
    """A 63-bit seed of (run seed, parts). Equal parts give equal seeds on every machine.

    >>> derive(0, "rollout", 1, "gsm-00731", 3) == derive(0, "rollout", 1, "gsm-00731", 3)
    True
    >>> derive(0, "rollout", 1) == derive(0, "rollout", 2)
    False
    """
    text = "\x1f".join([str(run_seed), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def uniforms(seed: int, count: int) -> np.ndarray:
    """float64[count] in [0, 1): one uniform per position of a row. A longer stream begins with the shorter one."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def permutation(seed: int, count: int) -> np.ndarray:
    """int64[count]: a random order of range(count)."""
    return np.random.Generator(np.random.Philox(key=seed)).permutation(count)
