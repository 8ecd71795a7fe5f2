"""`rft bench`: named benchmarks. Each prints a table and gives rows {name, metric, ours, peer, ratio, unit}."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.bench import data, generate, kernels, rewards, update, vllm

BENCHMARKS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "data": data.run,
    "generate": generate.run,
    "rewards": rewards.run,
    "update": update.run,
    "kernels": kernels.run,
    "vllm": vllm.run,
}
