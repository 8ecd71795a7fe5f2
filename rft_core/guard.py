"""A process that watches another: when that one ends, when we say so, or when we are gone, all that is left of it is
killed, also what left its process group.

As a program: `python guard.py PIPE GRACE_SECONDS COMMAND...` runs the command, guarded. The parent holds the other end
of PIPE; when it closes, by a normal end or by SIGKILL, the command is asked to end (SIGTERM) and has GRACE_SECONDS.
Nothing but the standard library is imported, so it runs as a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

KILL_SECONDS = 3.0  # for the kernel to end what was killed
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    pipe, grace_seconds, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(pipe, False)

    def ask_to_end(worker: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGTERM)

    fork_guarded(pipe, grace_seconds, ask_to_end=ask_to_end)
    os.execvp(command[0], command)


def fork_guarded(
    pipe: int,
    grace_seconds: float,
    *,
    ask_to_end: Callable[[int], None] | None = None,
    not_for_guard: tuple[int, ...] = (),
) -> None:
    """Divide this process in two. The child returns, in a process group of its own; the parent watches, and never does.

    When the pipe closes, the child's own end is waited for, `grace_seconds` at most. The parent closes the descriptors
    `not_for_guard`, so that their other ends see when the child is gone.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become the guard's children
    guard = os.getpid()
    worker = os.fork()
    if worker:
        for descriptor in not_for_guard:
            os.close(descriptor)
        _guard(worker, pipe, grace_seconds, ask_to_end)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    os.setpgid(0, 0)


def prctl(option: int, value: int) -> None:
    """Nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _guard(worker: int, pipe: int, grace_seconds: float, ask_to_end: Callable[[int], None] | None) -> NoReturn:
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    asked_to_end: list[int] = []
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    poller = select.poll()
    poller.register(wakes, select.POLLIN)
    poller.register(pipe, 0)  # its closing is told in any case
    deadline = float("inf")
    while (status := _collect(worker)) is None and not asked_to_end and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(None if left == float("inf") else left * 1000):
            if descriptor == wakes:
                os.read(wakes, 4096)
            else:
                poller.unregister(pipe)
                deadline = time.monotonic() + grace_seconds
                if ask_to_end is not None:
                    ask_to_end(worker)
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


def _end_like(status: int | None) -> NoReturn:
    if status is not None and status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status or 0)


if __name__ == "__main__":
    main()
