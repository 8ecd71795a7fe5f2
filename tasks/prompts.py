"""The choice of each step's prompts, and the statistics that some orders go by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.ledger import EXPERTS
from data_contracts.refs import TableRef, content_key
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.data.prompt_order import USES_STATS, Measured, light_columns, select_prompts, with_difficulty
from rft_core.data.prompt_stats import update_stats
from rft_core.data.settings import DataSettings, ExpertSettings
from rft_core.seeds import derive, permutation
from tasks.context import RunContext, opened
from tasks.progress import Summary
from tasks.semantics import SEMANTICS
from tasks.sources import dataset_record
from tasks.stage import Slot, commit, only, report, reuse, stage_task, write

STATS_THROUGH = "stats_through"  # the ledger's note: the last step that an entry's statistics hold
# Settings of data that an order reads besides its name.
SETTINGS_OF_ORDER: dict[str, tuple[str, ...]] = {
    "shuffled": (),
    "sequential": (),
    "difficulty": ("difficulty_field",),
    "easy_to_hard": ("stats_decay",),
    "targeted": ("stats_decay", "target_pass_rate"),
}


@dataclass(frozen=True)
class FinishedStep:
    """A step whose rollouts are scored."""

    step: int
    prompts: TableRef
    rollouts: TableRef
    rewards: TableRef

    @property
    def refs(self) -> list[TableRef]:
        return [self.prompts, self.rollouts, self.rewards]


@dataclass(frozen=True)
class History:
    """What the choice for a step may know. `stats` is the statistics that the step before left, `finished` the steps to
    be added to them, `under_way` the prompts of the steps after those."""

    stats: TableRef | None
    finished: tuple[FinishedStep, ...]
    under_way: tuple[TableRef, ...]
    through: int

    @property
    def refs(self) -> list[TableRef]:
        return [
            *([self.stats] if self.stats is not None else []),
            *(ref for step in self.finished for ref in step.refs),
            *self.under_way,
        ]


def history_of(context: RunContext, step: int) -> History | None:
    """From the ledger: rewards up to step - 1 - rollout.ahead, whatever else is there, so that the schedule is static.
    Null for an order that needs none."""
    recipe = context.recipe
    if recipe.data.order not in USES_STATS:
        return None

    def table(number: int, stage: str, round_: int) -> TableRef:
        entry = context.ledger.get(context.phase, number, stage, round_)
        assert entry is not None, f"the flow makes {stage} of step {number} before it asks for prompts of step {step}"
        return only(entry.refs, stage)

    def rounds(number: int) -> list[int]:
        """The rounds of prompts that a step took; those of experts measure nothing."""
        entries = context.ledger.entries("prompts", context.phase)
        return [entry.round for entry in entries if entry.step == number and entry.round != EXPERTS]

    before = context.ledger.get(context.phase, step - 1, "prompts")
    covered = before.notes.get(STATS_THROUGH, 0) if before is not None else 0
    # A branch may have raised `ahead`: what its statistics hold already they keep.
    through = max(covered, step - 1 - recipe.rollout.ahead)
    return History(
        stats=before.refs.get("prompt_stats") if before is not None else None,
        finished=tuple(
            FinishedStep(number, *(table(number, stage, round_) for stage in ("prompts", "rollouts", "rewards")))
            for number in range(covered + 1, through + 1)
            for round_ in rounds(number)
        ),
        under_way=tuple(
            table(number, "prompts", round_) for number in range(through + 1, step) for round_ in rounds(number)
        ),
        through=through,
    )


@stage_task("prompts")
def choose_prompts(
    run: str, slot: Slot, dataset: TableRef, history: History | None = None, taken: list[TableRef] | None = None
) -> State[TableRef]:
    """The train prompts of one step: an explicit input of its rollouts. `taken` are those of its earlier rounds."""
    context = opened(run)
    began = time.monotonic()
    keys = _keys(context, slot, dataset, history, taken or [])
    refs = reuse(context, slot, keys)
    reused = refs is not None
    if refs is None and taken:
        refs = _fresh(context, slot, keys, dataset, taken)
    elif refs is None:
        refs = _chosen(context, slot, keys, dataset, history)
    if history is not None and history.stats is not None:
        refs = {"prompt_stats": history.stats, **refs}
    notes = {STATS_THROUGH: history.through} if history is not None else {}
    commit(context, slot, refs, began=began, reused=reused, notes=notes)
    record = dataset_record(context.data_of(slot.round))
    summary: Summary = {record: refs[record].rows}
    if "prompt_stats" in refs:
        summary["measured prompts"] = refs["prompt_stats"].rows
    return report(context, slot, summary, refs[record], reused)


def _keys(
    context: RunContext, slot: Slot, dataset: TableRef, history: History | None, taken: list[TableRef]
) -> dict[str, str]:
    common: dict[str, Any] = {"identity": {}, "seed": context.recipe.seed, "semantics": SEMANTICS["prompts"]}
    inputs = [dataset, *(history.refs if history is not None else []), *taken]
    settings = _settings(context, slot)
    if slot.round:
        settings["round"] = slot.round
    record = dataset_record(context.data_of(slot.round))
    keys = {record: content_key(record, inputs=inputs, settings=settings, **common)}
    if history is not None and history.finished:
        inputs, settings = _stats_parts(context.recipe, history)
        keys["prompt_stats"] = content_key("prompt_stats", inputs=inputs, settings=settings, **common)
    return keys


def _settings(context: RunContext, slot: Slot) -> dict[str, Any]:
    data = context.data_of(slot.round)
    settings: dict[str, Any] = {"step": slot.step, "count": _count(context, slot), "order": data.order}
    settings |= {name: getattr(data, name) for name in SETTINGS_OF_ORDER[data.order]}
    if data.order in USES_STATS:
        settings["correct_component"] = context.recipe.correct_component
    if weights := mixture_weights(data):
        settings["mixture"] = weights
    return settings


def _count(context: RunContext, slot: Slot) -> int:
    data = context.data_of(slot.round)
    return data.per_step if isinstance(data, ExpertSettings) else context.recipe.rollout.prompts_per_step


def _stats_parts(recipe: Recipe, history: History) -> tuple[list[TableRef], dict[str, Any]]:
    """Inputs and settings of the statistics."""
    before = [history.stats] if history.stats is not None else []
    settings = {
        "correct_component": recipe.correct_component,
        "stats_decay": recipe.data.stats_decay,
        "steps": [finished.step for finished in history.finished],
    }
    return [*before, *(ref for finished in history.finished for ref in finished.refs)], settings


def mixture_weights(data: DataSettings) -> dict[str, float]:
    """Weight of each part of a mixture by its name in the column `dataset`; empty where there is one source."""
    return {part.name: part.weight for part in data.mixture} if len(data.mixture) > 1 else {}


def _chosen(
    context: RunContext, slot: Slot, keys: dict[str, str], dataset: TableRef, history: History | None
) -> dict[str, TableRef]:
    recipe, store = context.recipe, context.store
    refs: dict[str, TableRef] = {}
    inputs, measured = [dataset], None
    if history is not None:
        stats = _stats(context, history)
        if "prompt_stats" in keys:
            parts = _stats_parts(recipe, history)
            refs["prompt_stats"] = write(context, "prompt_stats", keys["prompt_stats"], stats, *parts)
        inputs += history.refs
        measured = Measured(stats, [store.read(ref, ["prompt_id"]) for ref in history.under_way])
    data = context.data_of(slot.round)
    field = data.difficulty_field if data.order == "difficulty" else None
    rows = select_prompts(
        _light_table(store, dataset, tuple(light_columns(data)), field),
        slot.step,
        _count(context, slot),
        data,
        mixture_weights(data),
        # Another order than the prompts', also where a file has an expert answer to each of them.
        derive(recipe.seed, "experts") if slot.round == EXPERTS else recipe.seed,
        measured,
    )
    prompts = store.take(dataset, rows)
    record = dataset_record(data)
    refs[record] = write(context, record, keys[record], prompts, inputs, _settings(context, slot))
    return refs


def _fresh(
    context: RunContext, slot: Slot, keys: dict[str, str], dataset: TableRef, taken: list[TableRef]
) -> dict[str, TableRef]:
    """Train prompts that no earlier round of the step took, by lot; fewer where the data set has no more."""
    recipe, store = context.recipe, context.store
    used = pa.chunked_array([column for ref in taken for column in store.read(ref, ["prompt_id"])["prompt_id"].chunks])
    table = store.read(dataset, ["prompt_id", "split"])
    is_free = pc.and_(pc.equal(table["split"], "train"), pc.invert(pc.is_in(table["prompt_id"], value_set=used)))
    free = pc.indices_nonzero(is_free).to_numpy().astype(np.int64)
    order = permutation(derive(recipe.seed, "resample", slot.step, slot.round), len(free))
    rows = free[order[: recipe.rollout.prompts_per_step]]
    settings = {**_settings(context, slot), "round": slot.round}
    written = write(context, "prompts", keys["prompts"], store.take(dataset, rows), [dataset, *taken], settings)
    return {"prompts": written}


@lru_cache(maxsize=2)
def _light_table(store: Store, dataset: TableRef, columns: tuple[str, ...], difficulty_field: str | None) -> pa.Table:
    """Kept from step to step: at a million prompts reading difficulties takes seconds. Examples are prompts here."""
    stored = ["example_id" if name == "prompt_id" and dataset.record == "examples" else name for name in columns]
    table = store.read(dataset, stored).rename_columns(list(columns))
    return with_difficulty(table, difficulty_field) if difficulty_field is not None else table


def _stats(context: RunContext, history: History) -> pa.Table | None:
    """The statistics with the finished steps; null where there is neither."""
    recipe, store = context.recipe, context.store
    stats = store.read(history.stats) if history.stats is not None else None
    for finished in history.finished:
        stats = update_stats(
            stats,
            store.read(finished.prompts, ["prompt_id"]),
            store.read(finished.rollouts, ["rollout_id", "prompt_id", "sampling"]),
            store.read(finished.rewards, ["rollout_id", "components", "component_status"]),
            recipe.correct_component,
            recipe.data.stats_decay,
            finished.step,
        )
    return stats
