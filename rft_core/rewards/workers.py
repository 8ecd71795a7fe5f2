"""Child processes that do work which may never end, or kill its process.

A pool starts `python -m MODULE` as often as it needs workers. A worker reads jobs as JSON lines and writes a JSON line
for each. It has an empty environment, a memory limit and, for each job, an alarm that the kernel delivers even while
Python is busy in one operation; a dead worker is replaced. It ends when its input closes, hence with us, however we
end, or by the alarm. It is no sandbox: it sees the host's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_core.errors import GraderUnavailable

START_LIMIT_SECONDS = 60.0  # for a worker's imports
GRACE_SECONDS = 2.0  # after a job's limit, for the alarm to end it; then we do
BATCH_JOBS = 64
BATCH_BYTES = 60_000  # less than a pipe holds, so that writing never waits for a busy worker
READ_BYTES = 1 << 16

Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimedOut:
    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """`status` as in subprocess: negative for a signal."""

    status: int


Reply = dict[str, Any] | TimedOut | Died


class WorkerPool:
    """`module` calls `serve`. At most `count` workers, started when there is work, stay for later calls."""

    def __init__(
        self, module: str, count: int, job_seconds: float, memory_bytes: int, prepare_seconds: float = 0.0
    ) -> None:
        """`prepare_seconds` are added to a job's until its work calls `start_clock`."""
        self.job_seconds = job_seconds
        self._prepare_seconds = prepare_seconds
        self._module = module
        self._count = count
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._is_interrupted = False
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def run(self, jobs: Sequence[Job]) -> list[Reply]:
        """One reply per job, in order. Each job has the pool's seconds from the moment its work begins.

        Raises GraderUnavailable when a worker can't start, or does not take its work.
        """
        with self._lock:
            self._is_interrupted = False
            patience = self._prepare_seconds + self.job_seconds + GRACE_SECONDS
            return _Round(self._workers, self._start, jobs, self._count, self.job_seconds, patience).run()

    def close(self) -> None:
        """End the workers and collect them. The next call starts others."""
        with self._lock:
            _end_all(self._workers)

    def interrupt(self) -> None:
        """From another thread: end the workers. A call at work raises GraderUnavailable."""
        self._is_interrupted = True
        for worker in list(self._workers):
            worker.process.kill()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def _start(self) -> _Worker:
        if self._is_interrupted:
            raise GraderUnavailable(f"{self._module} was interrupted")
        root = str(Path(__file__).resolve().parents[2])
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([root, *inherited]),
        }
        limits = (self.job_seconds, self._prepare_seconds, self._memory_bytes)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
        return _Worker(process, self._module)


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    module: str
    is_ready: bool = False
    batch: deque[int] = field(default_factory=deque)  # indices of jobs that it has been sent and not answered
    deadline: float = field(default_factory=lambda: time.monotonic() + START_LIMIT_SECONDS)
    received: bytearray = field(default_factory=bytearray)

    def end(self) -> int:
        self.process.kill()
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # lines that it never read
                pipe.close()
        return status

    def lines(self) -> list[bytes] | None:
        """What it has written since; null at its end."""
        assert self.process.stdout is not None
        part = os.read(self.process.stdout.fileno(), READ_BYTES)
        if not part:
            return None
        self.received += part
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        return [bytes(line) for line in lines]

    def send(self, lines: list[bytes]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen when we read
            self.process.stdin.write(b"".join(lines))
            self.process.stdin.flush()


class _Round:
    """One call: jobs go out in batches, replies come back one by one."""

    def __init__(
        self,
        workers: list[_Worker],
        start: Callable[[], _Worker],
        jobs: Sequence[Job],
        count: int,
        job_seconds: float,
        patience: float,
    ) -> None:
        self._workers = workers
        self._start = start
        self._lines = [json.dumps(job).encode() + b"\n" for job in jobs]
        self._waiting = deque(range(len(jobs)))
        self._replies: dict[int, Reply] = {}
        self._count = count
        self._job_seconds = job_seconds
        self._patience = patience

    def run(self) -> list[Reply]:
        try:
            with selectors.DefaultSelector() as selector:
                self._selector = selector
                for worker in list(self._workers):
                    if worker.process.poll() is not None:
                        self._drop(worker)
                    else:
                        self._watch(worker)
                while len(self._replies) < len(self._lines):
                    self._turn()
        except BaseException:  # workers that still have jobs would answer the next call with them
            _end_all(self._workers)
            raise
        return [self._replies[index] for index in range(len(self._lines))]

    def _turn(self) -> None:
        while self._waiting and len(self._workers) < min(self._count, self._num_wanted()):
            worker = self._start()
            self._workers.append(worker)
            self._watch(worker)
        for worker in self._workers:
            if worker.is_ready and not worker.batch and self._waiting:
                self._give(worker)
        busy = [worker for worker in self._workers if worker.batch or not worker.is_ready]
        left = min(worker.deadline for worker in busy) - time.monotonic()
        for key, _ in self._selector.select(max(left, 0)):
            self._hear(key.data)
        for worker in [worker for worker in busy if worker in self._workers]:
            if time.monotonic() > worker.deadline:
                self._lose(worker, is_late=True)

    def _num_wanted(self) -> int:
        """Workers that have or may get a batch."""
        return sum(bool(worker.batch) for worker in self._workers) + len(self._waiting)

    def _watch(self, worker: _Worker) -> None:
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _give(self, worker: _Worker) -> None:
        """A share of what waits, so that the last batches are small and the workers end together."""
        share = max(1, min(BATCH_JOBS, len(self._waiting) // (2 * self._count)))
        lines: list[bytes] = []
        size = 0
        while self._waiting and len(lines) < share:
            line = self._lines[self._waiting[0]]
            size += len(line)
            if lines and size > BATCH_BYTES:
                break
            lines.append(line)
            worker.batch.append(self._waiting.popleft())
        worker.deadline = time.monotonic() + self._patience
        worker.send(lines)

    def _hear(self, worker: _Worker) -> None:
        lines = worker.lines()
        if lines is None:
            self._lose(worker, is_late=False)
            return
        for line in lines:
            try:
                reply = json.loads(line)
            except ValueError:
                reply = None
            if not isinstance(reply, dict) or (worker.is_ready and not worker.batch):
                self._lose(worker, is_late=False)  # it wrote what is no reply
                return
            worker.deadline = time.monotonic() + self._patience
            if worker.is_ready:
                self._replies[worker.batch.popleft()] = reply
            elif reply.get("failed"):
                raise GraderUnavailable(f"{worker.module} must start: {reply['failed']}")
            else:
                worker.is_ready = True

    def _lose(self, worker: _Worker, is_late: bool) -> None:
        status = self._drop(worker, is_late)
        if not worker.is_ready:
            found = "did not within " + f"{START_LIMIT_SECONDS:g} s" if is_late else f"ended with status {status}"
            raise GraderUnavailable(f"{worker.module} must start, its process {found}")
        if worker.batch:
            is_stuck = is_late or status == -signal.SIGALRM
            self._replies[worker.batch.popleft()] = TimedOut(self._job_seconds) if is_stuck else Died(status)
            self._waiting.extendleft(reversed(worker.batch))

    def _drop(self, worker: _Worker, is_late: bool = False) -> int:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        if not is_late:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its output is closed: it is about to end
                worker.process.wait(timeout=GRACE_SECONDS)
        return worker.end()


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def serve(prepare: Callable[[], Callable[[Job], Job]]) -> None:
    """The child: `prepare` imports what the work needs and gives the function that does a job."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the work prints must not look like a reply
    job_seconds, prepare_seconds, memory_bytes = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default ends the process; a handler would wait for Python
    try:
        import resource

        work = prepare()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError) as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=replies)
        return
    print(json.dumps({"failed": None}), file=replies)
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, prepare_seconds + job_seconds)
        reply = json.dumps(work(job))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies)


def start_clock() -> None:
    """In the child: the job's seconds begin now."""
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
