"""Judges many programs at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from rft_core.errors import GraderUnavailable
from rft_core.rewards.sandbox.jobs import Calls, Judgement, Script
from rft_core.rewards.sandbox.judge import Worker
from rft_core.rewards.sandbox.launch import Launcher
from rft_core.rewards.sandbox.process import SandboxFailed
from rft_core.rewards.sandbox.watch import Stopped


class Interrupts:
    """Lets another thread end the calls of judge_all that were given it."""

    def __init__(self) -> None:
        self._stops: list[threading.Event] = []

    def interrupt(self) -> None:
        for stop in list(self._stops):
            stop.set()

    @contextmanager
    def stopping(self) -> Iterator[threading.Event]:
        stop = threading.Event()
        self._stops.append(stop)
        try:
            yield stop
        finally:
            self._stops.remove(stop)


def judge_all(
    launcher: Launcher,
    jobs: Sequence[Script | Calls],
    *,
    is_partial: bool,
    workers: int,
    interrupts: Interrupts | None = None,
) -> list[Judgement]:
    """One judgement per job, in order. When it returns or raises, no process of it is left.

    Raises GraderUnavailable when sandboxes cannot be started, or another thread interrupts.
    """
    with (interrupts or Interrupts()).stopping() as stop:
        return _judge_all(launcher, jobs, is_partial, workers, stop) if jobs else []


def _judge_all(
    launcher: Launcher, jobs: Sequence[Script | Calls], is_partial: bool, workers: int, stop: threading.Event
) -> list[Judgement]:
    line = _Line(jobs)
    num_threads = min(workers, len(jobs))
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="sandbox") as threads:
            serving = [threads.submit(line.serve, Worker(launcher, is_partial, stop), stop) for _ in range(num_threads)]
            try:
                for served in as_completed(serving):
                    served.result()
            except BaseException:  # also a Ctrl-C: the others end their sandboxes before we go
                stop.set()
                raise
    except SandboxFailed as error:
        raise GraderUnavailable(f"programs cannot be judged: {error}") from error
    if len(line.judgements) < len(jobs):
        raise GraderUnavailable("the judging of programs was interrupted")
    return [line.judgements[index] for index in range(len(jobs))]


class _Line:
    """Jobs waiting for a worker."""

    def __init__(self, jobs: Sequence[Script | Calls]) -> None:
        self._jobs = list(enumerate(jobs))[::-1]
        self._lock = threading.Lock()
        self.judgements: dict[int, Judgement] = {}

    def serve(self, worker: Worker, stop: threading.Event) -> None:
        """A worker's thread. It starts its sandboxes itself, for they die with the thread that started them."""
        try:
            while not stop.is_set():
                with self._lock:
                    if not self._jobs:
                        return
                    index, job = self._jobs.pop()
                    has_more = bool(self._jobs)
                self.judgements[index] = worker.judge(job, has_more)
        except Stopped:
            return
        except BaseException:
            stop.set()
            raise
        finally:
            worker.close()
