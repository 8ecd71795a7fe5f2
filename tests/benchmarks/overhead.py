"""What the pipeline costs beside its work: python -m tests.benchmarks.overhead ROOT [STEPS]

Runs the quick start for a few steps, ledger entry to ledger entry; then the bare loop of generation and update on the
same batches in the same process. Prints seconds per step and the ratio.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path

from flows.server import prefect_server
from rft_core.recipes import load_recipe

WARM_STEPS = 1


def main(root: Path, steps: int) -> None:
    recipe = load_recipe("quickstart", [f"steps={steps}", "evaluation.every=0", "training.checkpoint_every=1000"])
    name = f"overhead-{int(time.time())}"
    recipe = recipe.model_copy(update={"seed": int(time.time())})  # nothing of an earlier run may be reused
    with prefect_server(root):
        from flows.train import train

        train(recipe=recipe, run=name, root=str(root))
    pipeline = pipeline_seconds(root, name, steps)
    bare = bare_seconds(root, name, steps)
    per_step = {
        "pipeline": statistics.median(pipeline[WARM_STEPS:]),
        "bare": statistics.median(bare[WARM_STEPS:]),
    }
    ratio = sum(pipeline[WARM_STEPS:]) / sum(bare[WARM_STEPS:])
    print(json.dumps({"seconds_per_step": per_step, "pipeline": pipeline, "bare": bare, "ratio": ratio}, indent=1))


def pipeline_seconds(root: Path, name: str, steps: int) -> list[float]:
    """From one update's ledger entry to the next one's; the last step holds the final checkpoint's commit after it."""
    from data_contracts.ledger import Ledger

    ledger = Ledger(root / "runs" / name)
    start = ledger.get("main", 1, "prompts")
    updates = [ledger.get("main", step, "update") for step in range(1, steps + 1)]
    assert start is not None
    moments = [datetime.fromisoformat(entry.at) for entry in [start, *updates] if entry is not None]
    return [(after - before).total_seconds() for before, after in itertools.pairwise(moments)]


def bare_seconds(root: Path, name: str, steps: int) -> list[float]:
    """Generation and update of the same batches, with no table, ledger, task or check between them."""
    from data_contracts.ledger import Ledger
    from data_contracts.refs import PolicyRef
    from data_contracts.store import Store
    from rft_core.engines import ENGINES, Request, Sampling
    from rft_core.policy import Policy
    from rft_core.train_state import TrainState
    from rft_core.update import update_policy
    from tasks.resuming import read_recipe

    recipe = read_recipe(root / "runs" / name)
    ledger, store = Ledger(root / "runs" / name), Store(str(root))
    state = TrainState.start(Policy.load(recipe.model, Path(recipe.model.path), recipe.seed))
    rollout = recipe.rollout
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_completion_tokens)
    seconds = []
    for step in range(1, steps + 1):
        rollouts = store.read(ledger.get("main", step, "rollouts").refs["rollouts"])
        advantages = store.read(ledger.get("main", step, "advantages").refs["advantages"])
        before = PolicyRef(rollouts["policy_id"][0].as_py(), step - 1)
        requests = [
            Request(tuple(row["prompt_token_ids"]), row["seed"], row["group_id"])
            for row in rollouts.select(["prompt_token_ids", "seed", "group_id"]).to_pylist()
        ]
        size = rollout.block_groups * rollout.group_size
        began = time.monotonic()
        engine = ENGINES[rollout.engine](state.policy, rollout)
        for first in range(0, len(requests), size):
            engine.generate(requests[first : first + size], sampling)
        update_policy(
            state, rollouts, advantages, algorithm=recipe.algorithm, training=recipe.training, rollout=rollout,
            before=before, reference=None, seed=recipe.seed, total_steps=0, progress=None,
        )  # fmt: skip
        seconds.append(time.monotonic() - began)
    return seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
