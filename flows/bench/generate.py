"""How fast completions are drawn: the embedded engine against plain `generate` of transformers.

Same weights in bfloat16, prompts, group size, lengths and threads, one process, in turns; the figures are medians. Each
shape runs twice: without stop tokens, so that all rows are of full length, and with the model's own. The peer gets all
rows at once or half of them, whichever it does faster.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = "smollm2-135m"
GROUP_SIZE = 8
SHAPES = ((4, 64), (8, 16))  # prompts, tokens per completion
REPEATS = 5
NUM_BINS = 4  # of the histograms of lengths
Draw = Callable[[int], list[int]]  # seed -> the lengths of all completions


@dataclass(frozen=True)
class Case:
    """What both sides are asked for. Without stop tokens no completion ends by itself."""

    prompts: list[tuple[int, ...]]
    num_tokens: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    @property
    def name(self) -> str:
        ends = "own ends" if self.stop_token_ids else "full length"
        return f"{len(self.prompts) * GROUP_SIZE} completions of {self.num_tokens} tokens, {ends}"


@dataclass
class Timed:
    seconds: list[float]
    lengths: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens per second, the median over repeats."""
        return statistics.median(sum(lengths) / s for lengths, s in zip(self.lengths, self.seconds, strict=True))


def run(root: Path) -> list[dict[str, Any]]:
    """Rows of `rft bench`. Raises SettingsError when the model was not fetched."""
    from rft_core.config import ModelSettings
    from rft_core.engines.transformers import find_stop_token_ids
    from rft_core.model_folder import resolve_model_path
    from rft_core.model_reading import read_module
    from rft_core.policy import Policy

    folder = resolve_model_path(MODEL, root)
    policy = Policy.load(ModelSettings(path=MODEL, device="cpu", dtype="bfloat16"), folder, 0, trainable=False)
    peer = read_module(folder, policy.dtype, "sdpa").eval()
    ends = tuple(sorted(find_stop_token_ids(policy)))
    found = []
    for num_prompts, num_tokens in SHAPES:
        prompts = make_prompts(policy.tokenizer, num_prompts)
        for stop_token_ids in ((), ends):
            case = Case(prompts, num_tokens, stop_token_ids, ends[0])
            found += compare(case, our_draw(policy, case), peer_draws(peer, case))
    return found


def make_prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Sums of two to four terms, so that lengths differ."""
    made = []
    for number in range(count):
        terms = " + ".join(str(7 * number + term) for term in range(2 + number % 3))
        message = {"role": "user", "content": f"What is {terms}? Reply with only the number."}
        made.append(tuple(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)))
    return made


def our_draw(policy: Any, case: Case) -> Draw:
    """The engine as the rollouts stage makes it, for a policy that knows these stop tokens only."""
    from rft_core.config import RolloutSettings
    from rft_core.engines import ENGINES, Request, Sampling

    holder = SimpleNamespace(module=policy.module, device=policy.device, tokenizer=SimpleNamespace(eos_token_id=None))
    sampling = Sampling(1.0, 1.0, 0, case.num_tokens)

    def draw(seed: int) -> list[int]:
        policy.module.config.eos_token_id = None
        policy.module.generation_config.eos_token_id = list(case.stop_token_ids)
        requests = [
            Request(prompt, 1000 * seed + GROUP_SIZE * group + index, str(group))
            for group, prompt in enumerate(case.prompts)
            for index in range(GROUP_SIZE)
        ]
        completions = ENGINES["transformers"](holder, RolloutSettings()).generate(requests, sampling)
        return [len(completion.token_ids) for completion in completions]

    return draw


def peer_draws(module: Any, case: Case) -> list[Draw]:
    """`generate` on all rows at once, and on halves."""
    num_rows = len(case.prompts) * GROUP_SIZE
    return [_peer_draw(module, case, num_rows), _peer_draw(module, case, num_rows // 2)]


def _peer_draw(module: Any, case: Case, rows_at_once: int) -> Draw:
    import torch
    from transformers import GenerationConfig

    rows = [prompt for prompt in case.prompts for _ in range(GROUP_SIZE)]
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=case.num_tokens,
        eos_token_id=list(case.stop_token_ids) or None,
        pad_token_id=case.pad_token_id,
    )

    def draw(seed: int) -> list[int]:
        torch.manual_seed(seed)
        module.generation_config = settings
        lengths = []
        for start in range(0, len(rows), rows_at_once):
            part = rows[start : start + rows_at_once]
            longest = max(map(len, part))
            ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
            made = module.generate(input_ids=ids, attention_mask=mask)[:, longest:]
            lengths += [_length(row, case.stop_token_ids) for row in made.tolist()]
        return lengths

    return draw


def _length(token_ids: list[int], stop_token_ids: tuple[int, ...]) -> int:
    """Tokens up to the first end, which counts."""
    return next((i for i, token in enumerate(token_ids, 1) if token in stop_token_ids), len(token_ids))


def compare(case: Case, ours: Draw, peers: list[Draw]) -> list[dict[str, Any]]:
    """Warm-up of everybody, which also chooses the peer's batch; then in turns."""
    timed(ours, 0)
    for peer in peers:
        timed(peer, 0)
    peer = min(peers, key=lambda one: timed(one, 1)[0])
    sides = {"ours": (ours, Timed([], [])), "peer": (peer, Timed([], []))}
    for repeat in range(REPEATS):
        for draw, record in sides.values():
            seconds, lengths = timed(draw, 2 + repeat)
            record.seconds.append(seconds)
            record.lengths.append(lengths)
    return _rows(case, *(record for _, record in sides.values()))


def timed(draw: Draw, seed: int) -> tuple[float, list[int]]:
    began = time.perf_counter()
    lengths = draw(seed)
    return time.perf_counter() - began, lengths


def _rows(case: Case, ours: Timed, peer: Timed) -> list[dict[str, Any]]:
    seconds = [statistics.median(side.seconds) for side in (ours, peer)]
    found = [
        _row(case, "speed", ours.speed, peer.speed, ours.speed / peer.speed, "tokens/s"),
        _row(case, "time", seconds[0], seconds[1], seconds[0] / seconds[1], "s"),
    ]
    width = -(-case.num_tokens // NUM_BINS)
    counts = [Counter((length - 1) // width for lengths in side.lengths for length in lengths) for side in (ours, peer)]
    for index in range(-(-case.num_tokens // width)):
        bounds = f"lengths {index * width + 1}-{min((index + 1) * width, case.num_tokens)}"
        found.append(_row(case, bounds, counts[0][index], counts[1][index], None, "completions"))
    return found


def _row(case: Case, metric: str, ours: float, peer: float, ratio: float | None, unit: str) -> dict[str, Any]:
    rounded = None if ratio is None else round(ratio, 3)
    return {
        "name": case.name,
        "metric": metric,
        "ours": round(ours, 3),
        "peer": round(peer, 3),
        "ratio": rounded,
        "unit": unit,
    }
