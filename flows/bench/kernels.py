"""How fast the kernels are, forward and backward, and how much memory they take beside what they are given.

Peers are torch's own operations: log_softmax of kept float32 logits, and fused attention of padded rows. Memory is
that of a process of its own, which computes once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flows.bench.process import run_measured
from flows.bench.update import medians, row

TOKENS, VOCABULARY, HIDDEN = 8192, 49_152, 576  # SmolLM2-135M's head
ROUNDS = 3
WAYS = ("ours", "peer")
# Groups of 8 completions: prompts, their tokens, completion tokens; heads, key heads and their dimension.
ATTENTION = {"64 x 16": (8, 44, 15), "32 x 64": (4, 44, 63)}
HEADS = (9, 3, 64)


def run(_root: Path) -> list[dict[str, Any]]:
    """Rows of `rft bench`."""
    name = f"linear_logprob, {TOKENS:,} tokens x {VOCABULARY:,}"
    code = "import sys; from flows.bench.kernels import report; report(*sys.argv[1:])"
    peak = {way: run_measured([sys.executable, "-c", code, way])[0]["bytes"] / 2**30 for way in WAYS}
    times, _ = run_measured([sys.executable, "-c", code, "times"])
    logits = TOKENS * VOCABULARY * 4 / 2**30
    return [
        row(name, "extra memory", peak["ours"], peak["peer"], "GiB"),
        row(name, "extra memory, beside float32 logits", peak["ours"], logits, "GiB"),
        *(row(of, "forward + backward", found["ours"], found["peer"], "s") for of, found in times["rows"].items()),
    ]


def report(what: str) -> None:
    """What a child process does: the memory of one way, or the times of both."""
    if what != "times":
        print(json.dumps({"bytes": _extra_bytes(_head(TOKENS)[what], _head(64, 64)[what])}))
        return
    found = {f"linear_logprob, {tokens:,} tokens x {VOCABULARY:,}": _head(tokens) for tokens in (1024, TOKENS)}
    found |= {f"token_logprob, 1,024 tokens x {VOCABULARY:,}": _logits(1024)}
    found |= {f"packed_attention, {name}": _attention(*shape) for name, shape in ATTENTION.items()}
    print(json.dumps({"rows": {name: medians(ways, ROUNDS) for name, ways in found.items()}}))


def _extra_bytes(function: Callable[[], Any], smaller: Callable[[], Any]) -> int:
    """By how much the process grows at its peak, without the gradients, which both ways give. Linux keeps the peak."""
    smaller()  # what torch sets up at its first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident_bytes("VmRSS")
    function()
    gradients = 2 * HIDDEN * (TOKENS + VOCABULARY)  # bfloat16
    return max(0, _resident_bytes("VmHWM") - before - gradients)


def _resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) * 1024


def _head(tokens: int, vocabulary: int = VOCABULARY) -> dict[str, Callable[[], Any]]:
    import torch

    from rft_core.kernels.linear_logprob import linear_logprob, linear_logprob_reference

    hidden_TD = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = (0.05 * torch.randn(vocabulary, HIDDEN)).bfloat16().requires_grad_()
    targets_T = torch.arange(tokens) % vocabulary

    def both_ways(function: Callable[..., Any]) -> Any:
        return torch.autograd.grad(function(hidden_TD, weight_VD, targets_T)[0].sum(), (hidden_TD, weight_VD))

    return {"ours": partial(both_ways, linear_logprob), "peer": partial(both_ways, linear_logprob_reference)}


def _logits(tokens: int) -> dict[str, Callable[[], Any]]:
    import torch

    from rft_core.kernels.token_logprob import token_logprob, token_logprob_reference

    logits_TV = torch.randn(tokens, VOCABULARY).bfloat16().requires_grad_()
    targets_T = torch.arange(tokens)

    def both_ways(function: Callable[..., Any]) -> Any:
        return torch.autograd.grad(function(logits_TV, targets_T)[0].sum(), logits_TV)

    return {"ours": partial(both_ways, token_logprob), "peer": partial(both_ways, token_logprob_reference)}


def _attention(groups: int, prompt: int, completion: int) -> dict[str, Callable[[], Any]]:
    """The peer attends for each row on its own, padded, as a trainer does that shares no prompts."""
    import torch

    from rft_core.kernels.packed_attention import attention_plan, packed_attention

    heads, key_heads, dim = HEADS
    segments: list[tuple[int, int | None]] = []
    for _ in range(groups):
        shared = len(segments)
        segments += [(prompt, None), *[(completion, shared)] * 8]
    num_tokens = sum(length for length, _ in segments)

    def inputs(*shape: int) -> list[Any]:
        counts = (heads, key_heads, key_heads)
        made = [torch.randn(*(count if size == 0 else size for size in shape)) for count in counts]
        return [tensor.bfloat16().requires_grad_() for tensor in made]

    plan, packed = attention_plan(segments), inputs(num_tokens, 0, dim)
    padded = inputs(8 * groups, 0, prompt + completion, dim)
    attend = torch.nn.functional.scaled_dot_product_attention

    def ours() -> Any:
        query, key, value = packed
        return torch.autograd.grad(packed_attention(query, key, value, plan, dim**-0.5).sum(), packed)

    def peer() -> Any:
        return torch.autograd.grad(attend(*padded, is_causal=True, enable_gqa=True).sum(), padded)

    return {"ours": ours, "peer": peer}
