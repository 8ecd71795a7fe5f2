"""Rollouts scored block by block into the store. No Prefect: `rft rescore` needs no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.refs import TableRef, content_key
from data_contracts.store import Store
from data_contracts.validation import check_table
from rft_core.config import Recipe
from rft_core.rewards import Grader, unscored_reasons
from tasks.semantics import SEMANTICS

Progress = Callable[[int, int, str], None]


def rewards_key(recipe: Recipe, grader_digest: str, rollouts: TableRef, prompts: TableRef) -> str:
    return content_key(
        "rewards",
        inputs=[rollouts, prompts],
        settings=recipe.reward.content(),
        identity={"grader": grader_digest},
        seed=recipe.seed,
        semantics=SEMANTICS["rewards"],
    )


class BlockScorer:
    """Scores blocks of rollouts. Their prompts are looked up in `prompts`, of which no other row is read."""

    def __init__(self, store: Store, grader: Grader, prompts: TableRef, tokenizer: Any = None) -> None:
        self._store = store
        self._grader = grader
        self._prompts = prompts
        self._tokenizer = tokenizer

    @cached_property
    def _known(self) -> pa.ChunkedArray:
        return self._store.read(self._prompts, ["prompt_id"])["prompt_id"]

    def score(self, block: pa.Table, progress: Progress | None = None) -> pa.Table:
        """Raises what Grader.score does."""
        asked = pc.indices_nonzero(pc.is_in(self._known, pc.unique(block["prompt_id"])))
        prompts = self._store.take(self._prompts, asked.to_numpy())
        return self._grader.score(block, prompts, progress, self._tokenizer)


def score_blocks(
    store: Store,
    grader: Grader,
    inputs: tuple[TableRef, TableRef],
    key: str,
    provenance: dict[str, Any],
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    on_first: Callable[[pa.Table], dict[str, Any]] | None = None,
    made: Callable[[int], pa.Table | None] = lambda index: None,
) -> TableRef:
    """Commit the blocks of rewards that are not there yet, as the blocks of the rollouts are. `inputs` are (rollouts,
    prompts); what `on_first` gives for the first table scored goes into the manifest; `made` gives the rewards of a
    block that was scored before, or None.

    A block with unscored rows waits for the verdict over the whole table, so that a retry scores it again. Raises what
    Grader.score and Grader.refuse_unscored do.
    """
    rollouts, prompts = inputs
    writer = store.writer("rewards", key, provenance)
    scorer = BlockScorer(store, grader, prompts, tokenizer)
    unscored: Counter[str] = Counter()
    waiting: dict[int, pa.Table] = {}
    judged = done = 0
    for index, block in enumerate(store.read_blocks(rollouts)):
        judged += pc.count_distinct(block.filter(pc.not_equal(block["status"], "error"))["rollout_id"]).as_py()
        done += block.num_rows
        if index in writer.committed:
            continue
        rewards = made(index)
        if rewards is None:
            rewards = scorer.score(block, _of_block(progress, done, rollouts.rows))
        elif progress is not None:
            progress(done, rollouts.rows, "scored beside generation")
        check_table(rewards, "rewards")
        if on_first is not None:
            provenance |= on_first(rewards)
        if reasons := unscored_reasons(rewards):
            unscored += reasons
            waiting[index] = rewards
        else:
            writer.commit(index, rewards)
    grader.refuse_unscored(unscored, judged)
    for index, rewards in waiting.items():
        writer.commit(index, rewards)
    return writer.close()


def said_of_unknown(unknown: set[tuple[str, str]]) -> str:
    """What to tell of Grader.unknown_fields."""
    component, name = min(unknown)
    return (
        f"when of {component} names the field {name}, which none of the prompts has: name source, dataset, split, "
        "answer or a field of their metadata (rft show RUN prompts --format jsonl)"
    )


def _of_block(progress: Progress | None, done: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda function, functions, note: progress(done, total, f"{note} ({function} of {functions})")
