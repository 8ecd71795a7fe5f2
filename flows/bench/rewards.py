"""How fast rewards are: stored rollouts scored again, maths pairs, programs in sandboxes.

The rollouts are scored in a process of their own, whose memory is sampled; there is no peer that keeps rollouts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.bench import maths, programs
from flows.bench.process import run_measured

NUM_ROLLOUTS = 1_000_000
GROUP_SIZE = 8
BLOCK_GROUPS = 1250
CUSTOM = """
def short(rows):
    return [float(len(row.completion_text) < 80) for row in rows]
"""  # a user's function, in its own process
COMPLETION = "Each box holds {number} pens, and there are three of them, so the answer is {number}."


def run(_root: Path) -> list[dict[str, Any]]:
    """Rows of `rft bench`."""
    found = [*rescoring(), *maths.measure(), *programs.measure()]
    return [
        {"name": name, "metric": metric, "ours": round(value, 3), "peer": None, "ratio": None, "unit": unit}
        for name, metric, value, unit in found
    ]


def rescoring() -> list[tuple[str, str, float, str]]:
    """Time from the stored rollouts to the committed rewards."""
    name = f"{NUM_ROLLOUTS:,} stored rollouts scored again"
    found = []
    with tempfile.TemporaryDirectory() as root:
        code = "import sys; from flows.bench.rewards import report; report(*sys.argv[1:])"
        run_measured([sys.executable, "-c", code, root, "write"])
        for function in ("exact_match", "numeric_answer", "custom"):
            seconds, peak_bytes = run_measured([sys.executable, "-c", code, root, function])
            found += [
                (f"{name}: {function}", "time", seconds["seconds"], "s"),
                (f"{name}: {function}", "speed", NUM_ROLLOUTS / seconds["seconds"], "rows/s"),
                (f"{name}: {function}", "peak memory", peak_bytes / 2**30, "GiB"),
            ]
    return found


def report(root: str, what: str) -> None:
    """What the child process does: `write` the rollouts, or score them by a function."""
    from data_contracts.refs import TableRef
    from data_contracts.store import Store
    from rft_core.rewards import build_grader
    from rft_core.rewards.settings import RewardSettings
    from tasks.scoring import score_blocks

    store, refs = Store(root), Path(root) / "refs.json"
    if what == "write":
        refs.write_text(json.dumps([ref.to_json() for ref in _write_tables(store)]))
        refs.with_name("custom.py").write_text(CUSTOM)
        print(json.dumps({}))
        return
    rollouts, prompts = (TableRef.from_json(value) for value in json.loads(refs.read_text()))
    function = {"name": what, **({"path": "custom.py:short"} if what == "custom" else {})}
    began = time.monotonic()
    grader = build_grader(RewardSettings.model_validate({"functions": [function]}), Path(root))
    scored = score_blocks(store, grader, (rollouts, prompts), f"bench-{what}", {})
    print(json.dumps({"seconds": time.monotonic() - began}))
    assert scored.rows == rollouts.rows, "no rollout is lost"


def _write_tables(store: Any) -> list[Any]:
    """Refs of rollouts and of their prompts."""
    import pyarrow as pa

    from data_contracts.schemas import RECORDS

    num_prompts = NUM_ROLLOUTS // GROUP_SIZE
    writers = {record: store.writer(record, "bench", {}) for record in ("rollouts", "prompts")}
    for index, start in enumerate(range(0, num_prompts, BLOCK_GROUPS)):
        numbers = range(start, min(start + BLOCK_GROUPS, num_prompts))
        for record, rows in (("prompts", _prompts(numbers)), ("rollouts", _rollouts(numbers))):
            writers[record].commit(index, pa.Table.from_pylist(list(rows), RECORDS[record].schema))
    return [writers[record].close() for record in ("rollouts", "prompts")]


def _prompts(numbers: range) -> Iterator[dict[str, Any]]:
    for number in numbers:
        text = f"How many pens do {number} boxes hold?"
        yield {
            "prompt_id": f"p{number}",
            "messages": json.dumps([{"content": text, "role": "user"}]),
            "prompt_text": text,
            "prompt_token_ids": list(range(16)),
            "answer": str(number),
            "metadata": "{}",
            "source": "bench",
            "source_row": number + 1,
            "dataset": "bench",
            "split": "train",
        }


def _rollouts(numbers: range) -> Iterator[dict[str, Any]]:
    for number in numbers:
        for index in range(GROUP_SIZE):
            text = COMPLETION.format(number=number + index % 2)
            yield {
                "rollout_id": f"step-00001/p{number}/{index:02d}",
                "segment": 0,
                "prompt_id": f"p{number}",
                "group_id": f"step-00001/p{number}",
                "rollout_index": index,
                "step": 1,
                "round": 0,
                "purpose": "train",
                "origin": "policy",
                "policy_id": "bench",
                "policy_version": 0,
                "prompt_token_ids": list(range(16)),
                "completion_token_ids": list(range(24)),
                "completion_mask": [True] * 24,
                "behaviour_logprobs": [-0.5] * 24,
                "messages": json.dumps([{"content": text, "role": "assistant"}]),
                "turns": [],
                "completion_text": text,
                "finish_reason": "stop",
                "status": "completed",
                "sampling": "{}",
                "seed": index,
            }
