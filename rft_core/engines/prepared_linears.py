"""Linear layers of a bfloat16 model on a CPU, with weights in the layout that its matrix products want.

`F.linear` brings a weight into that layout at each call, which for a few rows costs more than the product. Prepared
weights are a second copy of them. Float32 weights, other devices and builds of torch without oneDNN keep their own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# A model whose linear weights take more bytes keeps them as they are: its copy might not fit beside it.
MOST_BYTES = 4 << 30


class PreparedLinears:
    """Weights are prepared at first use and again when they have changed, which torch counts in `_version`; whoever
    changes them behind its back (through another tensor of the same memory) makes a new engine."""

    def __init__(self) -> None:
        self._prepared: dict[nn.Linear, tuple[tuple[int, int], Tensor]] = {}

    @contextmanager
    def used_by(self, module: nn.Module) -> Iterator[None]:
        """Within it, the module's linear layers compute with prepared weights. Needs gradients to be off."""
        linears = linears_to_prepare(module)
        self._prepared = {linear: found for linear, found in self._prepared.items() if linear in linears}
        try:
            for linear in linears:
                linear.forward = partial(_linear, self._weight(linear), linear.bias)
            yield
        finally:
            for linear in linears:
                vars(linear).pop("forward", None)

    def _weight(self, linear: nn.Linear) -> Tensor:
        weight = linear.weight.detach()
        state = (weight.data_ptr(), linear.weight._version)
        if linear not in self._prepared or self._prepared[linear][0] != state:
            self._prepared[linear] = state, torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return self._prepared[linear][1]


def linears_to_prepare(module: nn.Module) -> set[nn.Linear]:
    """Plain layers only: a subclass, or one whose forward was replaced, computes something else."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return set()
    found = {
        linear
        for linear in module.modules()
        if type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and linear.weight.dtype == torch.bfloat16
        and linear.weight.device.type == "cpu"
    }
    return found if sum(linear.weight.nbytes for linear in found) <= MOST_BYTES else set()


def _linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Any:
    return torch.ops.mkldnn._linear_pointwise(inputs.contiguous(), weight, bias, "none", [], "")
