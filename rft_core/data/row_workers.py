"""Chunks of sources -> processed chunks, in order; in worker processes when there is much to do.

What comes out does not depend on the number of workers. A worker ends when the process that started it is gone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from rft_core.data.fields import Recognised, recognise
from rft_core.data.orphans import end_with_parent
from rft_core.data.row_pipeline import Chunk, Processed, RowPipeline, RowSettings
from rft_core.data.settings import FieldName, RecordName

RECOGNISED_ROWS = 1000  # rows of a file that are looked at to learn what its fields are
ALONE_ROWS = 20_000  # processed before workers are started: their start costs seconds
AHEAD = 8  # chunks per worker that wait for their turn: as long as a block is validated, workers go on


@dataclass(frozen=True)
class Part:
    """A source of the data set: its chunks, its label, and what the recipe says about its fields."""

    chunks: Iterable[Chunk]
    dataset: str
    fields: dict[FieldName, str] = field(default_factory=dict)
    is_heldout: bool = False


@dataclass(frozen=True)
class Job:
    """A chunk with all that its processing needs."""

    chunk: Chunk
    recognised: Recognised
    dataset: str
    is_heldout: bool


def jobs_of(parts: Iterable[Part], record: RecordName, notes: list[str]) -> Iterator[Job]:
    """Every chunk, with the fields of its file recognised from the file's first rows, held-out sources first.

    `notes` gets a line on what was recognised, once for each file that differs from the one before.
    """
    for part in sorted(parts, key=lambda part: not part.is_heldout):
        stream = deque[Chunk]()
        told: tuple[str, ...] | None = None
        source, recognised = None, None
        chunks = iter(part.chunks)
        while stream or (chunk := next(chunks, None)) is not None:
            if not stream:
                assert chunk is not None, "the loop's condition"
                stream.append(chunk)
            if recognised is None or stream[0].source != source:
                source = stream[0].source
                recognised = recognise(_first_values(stream, chunks), record, part.fields)
                if recognised.notes != told:
                    notes += [f"{source}: {note}" for note in recognised.notes]
                    told = recognised.notes
            yield Job(stream.popleft(), recognised, part.dataset, part.is_heldout)


def _first_values(stream: deque[Chunk], chunks: Iterator[Chunk]) -> list[dict[str, object]]:
    """The values of the first rows of the source that comes next; chunks that had to be read stay in `stream`."""
    source = stream[0].source
    values: list[dict[str, object]] = []
    position = 0
    while len(values) < RECOGNISED_ROWS:
        if position == len(stream):
            following = next(chunks, None)
            if following is None:
                break
            stream.append(following)
        if stream[position].source != source:
            break
        for row in stream[position].rows():
            value = row.value if row.value is not None else row.mended
            if value is not None:
                values.append(value)
            if len(values) == RECOGNISED_ROWS:
                break
        position += 1
    return values


def process(jobs: Iterable[Job], settings: RowSettings, workers: int | None) -> Iterator[tuple[Processed, Job]]:
    """Results in the order of the jobs. A large source goes to worker processes after its first rows."""
    stream = iter(jobs)
    pipeline = RowPipeline(settings)
    num_rows = 0
    for job in stream:
        done = pipeline.process(job.chunk, job.recognised, job.dataset)
        yield done, job
        num_rows += done.num_rows
        if num_rows >= ALONE_ROWS:
            break
    num_workers = workers or len(os.sched_getaffinity(0))
    if num_workers > 1:
        yield from _in_workers(stream, settings, num_workers)
    else:
        yield from ((pipeline.process(job.chunk, job.recognised, job.dataset), job) for job in stream)


def _in_workers(jobs: Iterator[Job], settings: RowSettings, num_workers: int) -> Iterator[tuple[Processed, Job]]:
    first = next(jobs, None)
    if first is None:
        return
    pending: deque[tuple[Future[Processed], Job]] = deque()
    with ProcessPoolExecutor(num_workers, get_context("spawn"), end_with_parent) as pool:
        try:
            job: Job | None = first
            while job is not None or pending:
                while job is not None and len(pending) < num_workers * (1 + AHEAD):
                    pending.append((pool.submit(_work, job, settings), job))
                    job = next(jobs, None)
                future, done = pending.popleft()
                yield future.result(), done
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_own: list[RowPipeline] = []  # of a worker: the pipeline that it works with


def _work(job: Job, settings: RowSettings) -> Processed:
    """In a worker. Its pipeline is made with the first job, when its watch over the parent has begun."""
    if not _own:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
        _own.append(RowPipeline(settings))
    return _own[0].process(job.chunk, job.recognised, job.dataset)
