"""Holds a program at work to its limits, those that the kernel counts for each process only."""

from __future__ import annotations

import threading
import time

from rft_core.rewards.sandbox.limits import Limits
from rft_core.rewards.sandbox.process import Sandbox

# No program is given more clock time than this many times its limit, however busy the machine.
MAX_PATIENCE = 10


class Stopped(Exception):
    """The pool is being closed."""


class Watch:
    """From now on. Time in which the program, or its tests, was ready to run and no core was free does not count: on a
    busy machine an honest program must not become a slow one."""

    def __init__(self, program: Sandbox, checker: Sandbox | None, limits: Limits, stop: threading.Event) -> None:
        self._program = program
        self._sandboxes = [sandbox for sandbox in (program, checker) if sandbox is not None]
        self._limits = limits
        self._stop = stop
        usages = [sandbox.usage() for sandbox in self._sandboxes]
        self._cpu_before = usages[0].cpu_seconds
        self._waited_before = sum(usage.waited_seconds for usage in usages)
        self._waited = 0.0
        self._began = time.monotonic()

    def exceeded(self) -> str | None:
        """Which limit the program exceeds. Raises Stopped."""
        if self._stop.is_set():
            raise Stopped
        usages = [sandbox.usage() for sandbox in self._sandboxes]
        limits, usage = self._limits, usages[0]
        if usage.resident_bytes > limits.memory_bytes and self._program.memory_bytes() > limits.memory_bytes:
            return memory_reason(limits)
        waited = sum(each.waited_seconds for each in usages) - self._waited_before
        self._waited = max(self._waited, waited)  # a process that ends takes its share with it
        elapsed = time.monotonic() - self._began
        if usage.cpu_seconds - self._cpu_before > limits.cpu_seconds:
            reason = cpu_reason(limits)
        elif max(elapsed - self._waited, elapsed / MAX_PATIENCE) > limits.wall_seconds:
            reason = f"timeout: not done within {limits.wall_seconds:g} s"
        else:
            return None
        return f"{reason}; {processes_reason(limits)}" if usage.threads >= limits.processes else reason


def cpu_reason(limits: Limits) -> str:
    return f"timeout: more than {limits.cpu_seconds:g} s of processor time"


def memory_reason(limits: Limits) -> str:
    return f"limit: more than {limits.memory_bytes >> 20} MiB of memory"


def processes_reason(limits: Limits) -> str:
    return f"limit: more than {limits.processes} processes and threads"


def files_reason(limits: Limits) -> str:
    return f"limit: more than {limits.file_bytes >> 20} MiB of files"


def with_limit(reason: str, limits: Limits) -> str:
    """A program's failure, with the limit that an error in it speaks of."""
    for words, limit in LIMITS_MET.items():
        if words in reason:
            return f"{limit(limits)} ({reason})"
    return reason


LIMITS_MET = {
    "MemoryError": memory_reason,
    "[Errno 11] Resource temporarily unavailable": processes_reason,
    "can't start new thread": processes_reason,
    "[Errno 27] File too large": files_reason,
    "[Errno 28] No space left on device": files_reason,
}
