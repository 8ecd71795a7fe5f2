"""How many positions of cache the embedded engine decodes at once, where a recipe leaves that to the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_core.hardware import total_memory_bytes

MOST_BATCH_TOKENS = 1 << 17  # more rows than that share the weights' way through memory well enough
MEMORY_SHARE = 1 / 8  # the rest is for weights, optimizer state and what else runs here
BYTES = {"float32": 4, "bfloat16": 2}


def batch_token_budget(model_folder: Path, device: str, dtype: str) -> int:
    """A power of two. It depends on the memory that the machine has, not on what is free: runs are to be repeated."""
    per_token = cache_bytes_per_token(model_folder, dtype)
    if per_token is None:
        return MOST_BATCH_TOKENS
    fitting = int(total_memory_bytes(device) * MEMORY_SHARE / per_token)
    return min(MOST_BATCH_TOKENS, 1 << max(0, fitting.bit_length() - 1))


def cache_bytes_per_token(model_folder: Path, dtype: str) -> int | None:
    """Keys and values of all layers; None for a config that does not say (the load refuses what cannot be read)."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return 2 * config.num_hidden_layers * key_value_heads * head_size * BYTES[dtype]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
