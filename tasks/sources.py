"""Sources of data, opened, and the blocks that become of them. No Prefect: `rft validate` needs no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from data_contracts.formats import read_chunks, source_digest, source_notes
from data_contracts.refs import TableRef, digest_of
from data_contracts.store import Store, TableWriter
from data_contracts.validation import Report, check_table, merged, refuse_failed, validate
from rft_core.data.dataset import Block, Dataset
from rft_core.data.row_pipeline import RowSettings, timed
from rft_core.data.row_workers import Part, jobs_of, process
from rft_core.data.settings import DataSettings, source_label
from rft_core.errors import RowsRejected

Progress = Callable[[int, int, str], None]


def dataset_record(data: DataSettings) -> str:
    """The record of the data set: prompts, or examples of whatever kind."""
    return "prompts" if data.record == "prompts" else "examples"


def source_parts(data: DataSettings) -> list[Part]:
    """The sources of a data set, opened: a missing file is an error at once, rows are read when asked for."""
    parts = [
        Part(
            read_chunks(part.source, part.parameters, part.size, data.seed),
            part.name,
            part.fields,
        )
        for part in data.parts
    ]
    if data.heldout_source is not None:
        chunks = read_chunks(data.heldout_source, {}, None, data.seed)
        parts.append(Part(chunks, source_label(data.heldout_source), data.fields, is_heldout=True))
    return parts


def dataset_digest(data: DataSettings) -> str:
    """Identity of the sources by content; of a single one, its own digest."""
    digests = [source_digest(part.source, part.parameters, part.size, data.seed) for part in data.parts]
    if data.heldout_source is not None:
        digests.append(source_digest(data.heldout_source, {}, None, data.seed))
    return digests[0] if len(digests) == 1 else digest_of(digests)


def build_dataset(
    store: Store,
    keys: dict[str, str],
    provenance: dict[str, dict[str, Any]],
    settings: RowSettings,
    progress: Progress | None = None,
    heldout: pa.Table | None = None,
) -> tuple[dict[str, TableRef], Dataset]:
    """Commit the data set and its quarantine, under `keys` by record, block by block. Rows that ask one of the prompts
    `heldout`, of another data set, are dropped.

    Raises RowsRejected when too many rows are bad; the quarantine is committed even so, and the message says where.
    """
    record = dataset_record(settings.data)
    writers = {name: store.writer(name, key, provenance[name]) for name, key in keys.items()}
    dataset = Dataset(settings.data)
    if heldout is not None:
        dataset.keep_clear_of(heldout)
    validations: list[Report] = []
    try:
        for index, block in enumerate(blocks_of(dataset, settings, progress)):
            with timed(dataset.seconds, "Great Expectations"):
                validations.append(validate(block.table, record))
            with timed(dataset.seconds, "write"):
                _commit_block(writers, index, {record: block.table, "quarantine": block.quarantine})
    except RowsRejected as rejected:
        _commit_block({"quarantine": writers["quarantine"]}, len(validations), {"quarantine": rejected.quarantine})
        ref = writers["quarantine"].close()
        where = f"\nAll rejected rows: {store.locate(ref)}" if ref.rows else ""
        raise RowsRejected(f"{rejected}{where}", rejected.quarantine, rejected.counts) from rejected
    validation = merged(validations)
    refuse_failed(validation)
    provenance[record] |= {"counts": dataset.summary(), "notes": dataset.notes, "validation": validation.to_json()}
    return {name: writer.close() for name, writer in writers.items()}, dataset


def blocks_of(dataset: Dataset, settings: RowSettings, progress: Progress | None = None) -> Iterator[Block]:
    """All blocks of a data set, in order. Raises RowsRejected when too many rows are bad."""
    data = settings.data
    for part in data.parts:
        dataset.notes += source_notes(part.source, part.parameters, part.size, data.seed)
    jobs = jobs_of(source_parts(data), data.record, dataset.notes)
    expected = sum(part.size or 0 for part in data.parts)
    for processed, job in process(jobs, settings, data.workers):
        yield from dataset.add(processed, job.is_heldout)
        if progress is not None:
            progress(dataset.counts["rows"], expected, f"{dataset.counts['used']} used")
    yield from dataset.close()


def _commit_block(writers: dict[str, TableWriter], index: int, tables: dict[str, pa.Table]) -> None:
    for record, table in tables.items():
        check_table(table, record)
        if index not in writers[record].committed:
            writers[record].commit(index, table)
