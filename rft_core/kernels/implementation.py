"""Which implementation of a kernel runs: Triton on a CUDA device where it is installed, torch elsewhere."""

from importlib.util import find_spec
from typing import Literal

import torch

Implementation = Literal["torch", "triton"]

forced: Implementation | None = None  # for tests: Triton's interpreter runs on a CPU


def implementation(device: torch.device) -> Implementation:
    if forced is not None:
        return forced
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
