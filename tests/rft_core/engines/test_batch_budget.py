"""The budget of cache positions: what a machine takes by itself, and which rows are decoded together under one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.engines import Request, Sampling, batch_budget
from rft_core.engines.batch_budget import MOST_BATCH_TOKENS, batch_token_budget, cache_bytes_per_token
from rft_core.engines.shared_prompts import Sharing
from rft_core.engines.transformers import cut
from tests.tiny import make_tiny_model

FIVE_TOKENS = Sampling(1.0, 1.0, 0, 5)


def test_bytes_of_a_position(tmp_path: Path) -> None:
    """Keys and values x 2 layers x 2 key-value heads x 32 / 4 numbers."""
    folder = make_tiny_model(tmp_path)
    assert cache_bytes_per_token(folder, "float32") == 2 * 2 * 2 * 8 * 4
    assert cache_bytes_per_token(folder, "bfloat16") == 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("memory", "budget"),
    [
        # 128 bytes a position in bfloat16, an eighth of the memory
        (128 * 8 * 1000, 512),
        (128 * 8 * 1024, 1024),
        (1, 1),
        (1 << 50, MOST_BATCH_TOKENS),
    ],
)
def test_budget_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, budget: int) -> None:
    monkeypatch.setattr(batch_budget, "total_memory_bytes", lambda device: memory)
    assert batch_token_budget(make_tiny_model(tmp_path), "cpu", "bfloat16") == budget


def test_a_config_that_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert cache_bytes_per_token(tmp_path, "float32") is None
    assert batch_token_budget(tmp_path, "cpu", "float32") == MOST_BATCH_TOKENS


@pytest.mark.parametrize(
    ("budget", "is_shared", "sizes"),
    [
        # 3 rows of a prompt of 4 tokens, 2 of one of 6, 1 of one of 10; 5 own tokens each. Shared, the rows of the
        # first take 4 + 3 * 5 = 19; with one of the second, padded to 6, 2 * 6 + 4 * 5 = 32; all: 3 * 10 + 6 * 5.
        (60, True, [6]),
        (59, True, [5, 1]),
        (32, True, [4, 2]),
        (31, True, [3, 2, 1]),  # 4 + 15 and 6 + 10 fit, 12 + 20 and 20 + 15 do not
        (14, True, [2, 1, 1, 1, 1]),
        (1, True, [1] * 6),  # a row alone is always run
        # Not shared, a row takes its prompt and 5: three of the first 27, with one of the second 4 * 11.
        (44, False, [4, 2]),
        (27, False, [3, 2, 1]),
    ],
)
def test_batches_by_hand(budget: int, is_shared: bool, sizes: list[int]) -> None:
    requests = [Request((1 + length,) * length, 0, "") for length in (4, 4, 4, 6, 6, 10)]
    sharing = Sharing() if is_shared else Sharing("no")
    batches = list(cut(requests, FIVE_TOKENS, budget, sharing))
    assert [len(batch) for _, batch in batches] == sizes
    assert [request for _, batch in batches for request in batch] == requests
    assert {shared for shared, _ in batches} == {is_shared}


def test_rows_beyond_a_window_are_batched_apart() -> None:
    requests = [Request((1 + length,) * length, 0, "") for length in (4, 4, 6, 10)]
    batches = list(cut(requests, FIVE_TOKENS, 1000, Sharing(longest=11)))
    assert [(shared, len(batch)) for shared, batch in batches] == [(True, 3), (False, 1)]
