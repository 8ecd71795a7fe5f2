"""The process that users' reward functions run in: `python user_worker.py REQUESTS REPLIES SYS_PATH`.

It divides in two before it imports anything. One half answers requests, and whatever a user's code may do to a process
it does to that one. The other, its guard, does nothing but watch: when the first half ends, when we say so (SIGTERM) or
are gone (the pipe of requests closes), it kills all that is left of it, also what left its process group, collects it,
and ends in the same way as the first half did.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

GRACE_SECONDS = 1.5  # for exit handlers, once no more requests come
KILL_SECONDS = 3.0  # for the kernel to end what was killed
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
OOM_SCORE = "500"  # where memory runs out this process goes before the one that trains


def main() -> None:
    requests, replies, path = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become the guard's children
    guard = os.getpid()
    worker = os.fork()
    if worker:
        os.close(replies)
        _guard(worker, requests)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = path
    from rft_core.rewards.user_calls import answer_requests

    answer_requests(requests, replies)


def _prctl(option: int, value: int) -> None:
    """Nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _guard(worker: int, requests: int) -> None:
    """Never returns."""
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    asked_to_end: list[int] = []
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    poller = select.poll()
    poller.register(wakes, select.POLLIN)
    poller.register(requests, 0)  # its closing is told in any case
    deadline = float("inf")
    while (status := _collect(worker)) is None and not asked_to_end and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(None if left == float("inf") else left * 1000):
            if descriptor == wakes:
                os.read(wakes, 4096)
            else:
                poller.unregister(requests)
                deadline = time.monotonic() + GRACE_SECONDS
    _end_all(worker)
    _end_like(status)


def _collect(worker: int) -> int | None:
    """The worker's exit status when it has ended, negative for a signal; collects adopted orphans too."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _end_all(worker: int) -> None:
    """Kill and collect every process below us. Those whose parent dies become our children, to be killed in turn."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # no Linux: killing the group has to do
        return []


def _end_like(status: int | None) -> None:
    if status is not None and status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status or 0)


if __name__ == "__main__":
    main()
