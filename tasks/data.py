"""The data stage: raw sources -> prompts or examples, and quarantine."""

from __future__ import annotations

import time
from typing import Any

import pyarrow.compute as pc
from prefect.client.schemas.objects import State

from data_contracts.refs import TableRef, content_key
from rft_core.data.cleaning import cleaning_identity
from rft_core.data.row_pipeline import RowSettings
from rft_core.data.settings import source_label
from tasks.context import RunContext, opened
from tasks.semantics import SEMANTICS
from tasks.sources import build_dataset, dataset_record
from tasks.stage import Slot, commit, report, reuse, stage_task

# They decide which prompt comes next, not what the data set holds.
ORDER_SETTINGS = ("order", "difficulty_field", "target_pass_rate", "stats_decay")


@stage_task("data")
def validate_data(run: str, slot: Slot) -> State[TableRef]:
    """Read, clean, render and tokenise the sources; what is rejected goes to quarantine with its reason."""
    context = opened(run)
    began = time.monotonic()
    data = context.recipe.data
    record = dataset_record(data)
    settings = {name: value for name, value in data.content().items() if name not in ORDER_SETTINGS}
    settings["mixture"] = [{**part, "weight": None} for part in settings["mixture"]]
    keys = {
        name: content_key(
            name,
            inputs=[],
            settings=settings,
            identity=_identity(context),
            seed=data.seed,
            semantics=SEMANTICS["data"],
        )
        for name in (record, "quarantine")
    }
    refs = reuse(context, slot, keys)
    reused = refs is not None
    if refs is None:
        refs = _build(context, slot, keys, settings)
    commit(context, slot, refs, began=began, reused=reused)
    splits = context.store.read(refs[record], ["split"])
    heldout = pc.sum(pc.equal(splits["split"], "heldout")).as_py() or 0
    summary = {
        f"train {record}": splits.num_rows - heldout,
        f"held-out {record}": heldout,
        "quarantined rows": refs["quarantine"].rows,
    }
    return report(context, slot, summary, refs[record], reused)


def _identity(context: RunContext) -> dict[str, Any]:
    """What decides the rows beside the settings. Names of sources too: rows carry them, ids are built from them."""
    data = context.recipe.data
    identity = {
        "source": context.identity["source"],
        "name": [source_label(part.source) for part in data.parts],
        "tokenizer": context.identity["tokenizer"],
        "cleaning": cleaning_identity(data, None),
    }
    if data.record == "prompts":
        identity["answers"] = context.grader.answers_digest
    return identity


def _build(context: RunContext, slot: Slot, keys: dict[str, str], settings: dict[str, Any]) -> dict[str, TableRef]:
    recipe = context.recipe
    provenance = {name: context.source_provenance([], settings) for name in keys}
    row_settings = RowSettings(recipe.data, recipe.reward, context.model_folder, recipe.model.chat_template)
    refs, dataset = build_dataset(context.store, keys, provenance, row_settings, context.progress(slot.name))
    context.validated.add(dataset_record(recipe.data))
    for note in dataset.notes:
        context.watcher.noted(note)
    return refs
