"""The budget of cache positions that a machine takes by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.engines import batch_budget
from rft_core.engines.batch_budget import MOST_BATCH_TOKENS, batch_token_budget, cache_bytes_per_token
from tests.tiny import make_tiny_model


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
