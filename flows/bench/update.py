"""How fast an update is: forward and backward of a step's rows, and the optimizer's step, against plain trainers' way.

The peer is the transformers module as trainers call it: float32 weights under bfloat16 autocast, fused attention, rows
padded to the longest, logits of the completion's positions only, torch's log_softmax; then clip_grad_norm_ and AdamW.
Ours is what the update stage calls. Both alternate in one process; figures are medians. Tokens are random, which costs
the same as text.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flows.bench.process import run_measured

MODEL = "smollm2-135m"
ROUNDS = 3
PROMPT_TOKENS = 44
PEER_ROWS = 8  # of a padded micro-batch of the ragged case, which would not fit into memory at once


@dataclass(frozen=True)
class Case:
    """`spread` is that of the logarithm of completion lengths around the median, which the longest exceeds 8 times."""

    name: str
    prompts: int
    group_size: int
    completion_tokens: int  # of each row, or the longest
    spread: float = 0.0


CASES = (
    Case("64 rows x 16 tokens, 8 prompts", 8, 8, 16),
    Case("32 rows x 64 tokens, 4 prompts", 4, 8, 64),
    Case("32 rows of ragged lengths, median 32 of 256 tokens, 4 prompts", 4, 8, 256, 1.0),
)


def run(root: Path) -> list[dict[str, Any]]:
    """Rows of `rft bench`. The model is fetched where it is not there."""
    from flows.models import fetch_model

    folder = fetch_model(MODEL, root, say=lambda text: print(text, file=sys.stderr))
    code = "import sys; from flows.bench.update import report; report(sys.argv[1])"
    measured, _ = run_measured([sys.executable, "-c", code, str(folder)])
    return list(measured["rows"])


def row(name: str, metric: str, ours: float, peer: float | None, unit: str) -> dict[str, Any]:
    ratio = None if peer is None else round(peer / ours, 2)
    shown = None if peer is None else round(peer, 4)
    return {"name": name, "metric": metric, "ours": round(ours, 4), "peer": shown, "ratio": ratio, "unit": unit}


def medians(functions: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each, called in turn; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def train_rows_of(case: Case, vocabulary: int) -> list[Any]:
    """Rows of random tokens; prompts of 40 to 48 tokens."""
    import numpy as np

    from rft_core.batching import TrainRow

    generator = np.random.default_rng(case.completion_tokens)
    rows: list[Any] = []
    for group in range(case.prompts):
        prompt = generator.integers(3, vocabulary, PROMPT_TOKENS + generator.integers(-4, 5))
        for number in range(case.group_size):
            length = case.completion_tokens
            if case.spread:
                length = int(length / 8 * np.exp(generator.normal(0, case.spread)))
            length = min(max(length, 1), case.completion_tokens)
            if case.spread and not rows:
                length = case.completion_tokens
            ids = generator.integers(3, vocabulary, length)
            rows.append(TrainRow(f"{group}/{number}", str(group), prompt, ids, ids > 0))
    return rows


class Peer:
    """The transformers module, trained as plain trainers do."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.module.eval()
        self.adamw = torch.optim.AdamW(self.module.parameters(), lr=1e-6, weight_decay=0.0)

    def forward_and_backward(self, rows: list[Any], rows_at_once: int) -> None:
        import torch

        self.adamw.zero_grad()
        widest = max(len(row.prompt_token_ids) for row in rows)
        longest = max(len(row.completion_token_ids) for row in rows)
        for start in range(0, len(rows), rows_at_once):
            part = rows[start : start + rows_at_once]
            ids = torch.zeros(len(part), widest + longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for index, row in enumerate(part):
                left, end = widest - len(row.prompt_token_ids), widest + len(row.completion_token_ids)
                ids[index, left:widest] = torch.from_numpy(row.prompt_token_ids)
                ids[index, widest:end] = torch.from_numpy(row.completion_token_ids)
                mask[index, left:end] = 1
            with torch.autocast("cpu", torch.bfloat16):
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                made = self.module(ids, attention_mask=mask, position_ids=positions, logits_to_keep=longest + 1)
            log_p = torch.log_softmax(made.logits[:, :-1].float(), -1)
            chosen = log_p.gather(-1, ids[:, widest:, None])[..., 0]
            (chosen * mask[:, widest:]).sum().div(-len(rows)).backward()

    def step(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.adamw.step()


class Ours:
    """The policy and the optimizer of the update stage."""

    def __init__(self, folder: str, is_compiled: bool = False) -> None:
        from rft_core.config import ModelSettings, TrainingSettings
        from rft_core.optimizer import Optimizer
        from rft_core.policy import Policy

        settings = ModelSettings(path=folder, device="cpu", dtype="bfloat16")
        self.training = TrainingSettings(learning_rate=1e-6)
        self.policy = Policy.load(settings, Path(folder), seed=0)
        self.is_compiled = is_compiled
        with self.policy.training(is_compiled, False):  # compiles
            pass
        self.optimizer = Optimizer.over(self.policy)

    def forward_and_backward(self, rows: list[Any], token_budget: int) -> None:
        self.optimizer.discard_gradients()
        with self.policy.training(self.is_compiled, False):
            for batch in self.policy.micro_batches(rows, token_budget):
                logprobs_T, _ = self.policy.token_logprobs(batch, 1.0)
                logprobs_T.sum().div(-len(rows)).backward()

    def step(self) -> None:
        self.optimizer.step(self.training, 1e-6, self.optimizer.grad_norm())


def report(folder: str) -> None:
    """What the child process does."""
    from rft_core.config import TrainingSettings
    from rft_core.hardware import keep_freed_memory

    keep_freed_memory()
    budget = TrainingSettings().micro_batch_tokens
    peer, ours = Peer(folder), Ours(folder)
    began = time.perf_counter()
    compiled = Ours(folder, is_compiled=True)
    rows = [row("compiling the layers", "time", time.perf_counter() - began, None, "s")]
    for case in CASES:
        of_case = train_rows_of(case, peer.module.config.vocab_size)
        at_once = PEER_ROWS if case.spread else len(of_case)
        made = medians(
            {
                "peer": partial(peer.forward_and_backward, of_case, at_once),
                "ours": partial(ours.forward_and_backward, of_case, budget),
                "compiled": partial(compiled.forward_and_backward, of_case, budget),
            }
        )
        rows += [
            row(case.name, "forward + backward", made["ours"], made["peer"], "s"),
            row(case.name, "forward + backward, compiled", made["compiled"], made["peer"], "s"),
        ]
    ours.forward_and_backward(of_case, budget)
    stepped = medians({"peer": peer.step, "ours": ours.step})
    rows.append(row("optimizer", "gradient norm, clipping and AdamW", stepped["ours"], stepped["peer"], "s"))
    print(json.dumps({"rows": rows}))
