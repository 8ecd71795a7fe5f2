"""Judges many programs at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rft_core.errors import GraderUnavailable
from rft_core.rewards.sandbox.jobs import Calls, Judgement, Script
from rft_core.rewards.sandbox.judge import Worker
from rft_core.rewards.sandbox.launch import Launcher
from rft_core.rewards.sandbox.process import SandboxFailed
from rft_core.rewards.sandbox.watch import Stopped


def judge_all(launcher: Launcher, jobs: Sequence[Script | Calls], *, is_partial: bool, workers: int) -> list[Judgement]:
    """One judgement per job, in order. When it returns or raises, no process of it is left.

    Raises GraderUnavailable when sandboxes cannot be started.
    """
    if not jobs:
        return []
    stop = threading.Event()
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
