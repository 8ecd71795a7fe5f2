"""The data stage: raw sources -> prompts or examples, and quarantine."""

from __future__ import annotations

import time
from typing import Any

import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.ledger import EXPERTS
from data_contracts.refs import TableRef, content_key
from rft_core.data.cleaning import cleaning_identity
from rft_core.data.row_pipeline import RowSettings
from rft_core.data.settings import source_label
from tasks.context import RunContext, opened
from tasks.rollouts import heldout_prompts
from tasks.semantics import SEMANTICS
from tasks.sources import build_dataset, dataset_record
from tasks.stage import Slot, commit, report, reuse, stage_task

# They decide which prompt comes next and how much it counts, not what the data set holds.
ORDER_SETTINGS = ("order", "difficulty_field", "target_pass_rate", "stats_decay", "per_step", "source_weights")


@stage_task("data")
def validate_data(run: str, slot: Slot, prompts: TableRef | None = None) -> State[TableRef]:
    """Read, clean, render and tokenise the sources; what is rejected goes to quarantine with its reason.

    The slot of the experts is their section's, whose rows must not be of the held-out ones of `prompts`.
    """
    context = opened(run)
    began = time.monotonic()
    data = context.data_of(slot.round)
    record = dataset_record(data)
    settings = {name: value for name, value in data.content().items() if name not in ORDER_SETTINGS}
    settings["mixture"] = [{**part, "weight": None} for part in settings["mixture"]]
    keys = {
        name: content_key(
            name,
            inputs=[prompts] if prompts is not None else [],
            settings=settings,
            identity=_identity(context, slot),
            seed=data.seed,
            semantics=SEMANTICS["data"],
        )
        for name in (record, "quarantine")
    }
    refs = reuse(context, slot, keys)
    reused = refs is not None
    if refs is None:
        refs = _build(context, slot, keys, settings, prompts)
    commit(context, slot, refs, began=began, reused=reused)
    splits = context.store.read(refs[record], ["split"])
    heldout = pc.sum(pc.equal(splits["split"], "heldout")).as_py() or 0
    summary = {
        f"train {record}": splits.num_rows - heldout,
        f"held-out {record}": heldout,
        "quarantined rows": refs["quarantine"].rows,
    }
    return report(context, slot, summary, refs[record], reused)


def _identity(context: RunContext, slot: Slot) -> dict[str, Any]:
    """What decides the rows beside the settings. Names of sources too: rows carry them, ids are built from them."""
    data = context.data_of(slot.round)
    identity = {
        "source": context.identity[_source_identity(slot)],
        "name": [source_label(part.source) for part in data.parts],
        "tokenizer": context.identity["tokenizer"],
        "cleaning": cleaning_identity(data, None),
    }
    if data.record == "prompts":
        identity["answers"] = context.grader.answers_digest
    return identity


def _source_identity(slot: Slot) -> str:
    """Under which name the run's identity holds the digest of the sources."""
    return "experts" if slot.round == EXPERTS else "source"


def _build(
    context: RunContext, slot: Slot, keys: dict[str, str], settings: dict[str, Any], prompts: TableRef | None
) -> dict[str, TableRef]:
    recipe, data = context.recipe, context.data_of(slot.round)
    inputs = [prompts] if prompts is not None else []
    more = {"source_identity": _source_identity(slot)}
    provenance = {name: {**context.source_provenance(inputs, settings), **more} for name in keys}
    row_settings = RowSettings(data, recipe.reward, context.model_folder, recipe.model.chat_template)
    heldout = heldout_prompts(context.store, prompts, None) if prompts is not None else None
    refs, dataset = build_dataset(context.store, keys, provenance, row_settings, context.progress(slot.name), heldout)
    context.validated.add(dataset_record(data))
    for note in dataset.notes:
        context.watcher.noted(note)
    return refs
