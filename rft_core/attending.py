"""How a module attends to a micro-batch: by a mask, or by the segments of a packed one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rft_core.batching import MicroBatch
from rft_core.kernels.packed_attention import packed_attention

PACKED = "rft_packed"  # a name in transformers' registry; a model that knows no registry keeps its own way and differs


@contextmanager
def attending(module: Any, batch: MicroBatch, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    """What to call the module with. A packed batch switches its attention for so long: one thread at a time."""
    inputs = {
        "input_ids": batch.input_ids_SL.to(device),
        "position_ids": batch.position_ids_SL.to(device),
        "use_cache": False,
    }
    if batch.attention_plan is None:
        yield inputs | {"attention_mask": batch.attention_mask(dtype, device)}
        return
    config = module.config
    kept = config._attn_implementation
    _register()
    config._attn_implementation = PACKED
    try:
        yield inputs | {"attention_mask": None, "attention_plan": batch.attention_plan.to(device)}
    finally:
        config._attn_implementation = kept


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if PACKED not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, with queries [1, H, N, D]. A window is for the caller to respect."""
    if attention_plan is None or attention_mask is not None or s_aux is not None or query.shape[0] != 1:
        raise ValueError("packed attention needs one sequence, its plan, no mask and no sinks")
    made = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_plan,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        float(softcap or 0.0),
    )
    return made[None], None
