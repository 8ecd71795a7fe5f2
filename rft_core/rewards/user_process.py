"""Users' reward functions in a process of their own, so that one which hangs, crashes or fills the memory costs its
rows and nothing else.

All functions of a grader share one process, started when the first is loaded. One that does not answer in time is
killed with all its children, one that ended is collected, and the next call starts another. See user_worker.py for how
it ends with us, however we end. Messages are JSON objects, with bytes behind them or none.
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
from pathlib import Path
from typing import Any

from rft_core import errors
from rft_core.errors import GraderUnavailable, RewardFunctionError

SEND_SECONDS = 60.0  # in which the process must take a request; it does nothing else meanwhile
LOAD_SECONDS = 600.0  # for the import of a user's file, which may read a model
END_SECONDS = 6.0  # more than the guard takes
READ_BYTES = 1 << 20
SIZES_BYTES = 16  # before each message: the lengths of its two parts

Request = dict[str, Any]
Reply = dict[str, Any]


class CallLost(Exception):
    """No answer: the call met its limit, or its process ended. Says which, to follow the function's name."""


class UserTraceback(Exception):
    """Where in a user's code an error was raised, as text from the other process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class UserCode:
    """The functions of one grader and the process that they are in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: list[Request] = []
        self._identities: list[dict[str, Any]] = []
        self._loaded: set[int] = set()  # by the present process
        self._is_closed = False
        self._processes: list[_Process] = []  # none or one
        self._finalizer = weakref.finalize(self, _end_all, self._processes)

    def load(self, path: str, folder: Path | None, depends_on: list[str]) -> tuple[int, dict[str, Any]]:
        """(number of the function, identity of its code, see plugin.py).

        Raises SettingsError, RewardFunctionError, GraderUnavailable when no process can be started.
        """
        load = {"path": path, "folder": str(folder) if folder is not None else None, "depends_on": depends_on}
        with self._lock:
            number = len(self._loads)
            try:
                identity = self._ask(_request_to_load(number, load), b"", LOAD_SECONDS)["identity"]
            except CallLost as lost:
                raise RewardFunctionError(f"reward code {path} must be importable, but it {lost}") from lost
            self._loads.append(load)
            self._identities.append(identity)
            self._loaded.add(number)
            return number, identity

    def ask(self, number: int, request: Request, rest: memoryview | bytes, seconds: float) -> Reply:
        """What a function's process says within `seconds`.

        Raises CallLost, GraderUnavailable when no process can be started, and what the function's code raises, by the
        names of our exceptions; RewardFunctionError when its code has changed since it was loaded first.
        """
        with self._lock:
            self._revive()
            if number not in self._loaded:
                found = self._ask(_request_to_load(number, self._loads[number]), b"", LOAD_SECONDS)["identity"]
                if found != self._identities[number]:
                    raise RewardFunctionError(
                        f"reward code {self._loads[number]['path']} must stay as it was when the run began: it, or "
                        "what it imports from beside it, has changed; start the command again"
                    )
                self._loaded.add(number)
            return self._ask({**request, "function": number}, rest, seconds)

    def close(self) -> None:
        """End the process for good; a call at work in another thread is lost."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                _end_all(self._processes)
            finally:
                self._lock.release()
        else:
            for process in list(self._processes):
                process.kill()

    @property
    def process_id(self) -> int | None:
        """Of the guard; the functions are in its child."""
        return self._processes[0].popen.pid if self._processes else None

    def _ask(self, request: Request, rest: memoryview | bytes, seconds: float) -> Reply:
        self._revive()
        try:
            if not self._processes:
                if self._is_closed:
                    raise GraderUnavailable("the process of users' reward functions was closed")
                self._processes.append(_Process())
            reply = self._processes[0].exchange(request, rest, seconds)
        except BaseException:  # also a Ctrl-C: an answer that comes later must not be taken for the next one's
            self._drop()
            raise
        if "raised" in reply:
            raise _raised(reply) from UserTraceback(reply["traceback"])
        return reply

    def _revive(self) -> None:
        """Forget a process that ended between calls."""
        if self._processes and self._processes[0].popen.poll() is not None:
            self._drop()

    def _drop(self) -> None:
        self._loaded.clear()
        for process in self._processes:
            process.kill()
        _end_all(self._processes)


class _Process:
    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        os.set_blocking(self._requests, False)
        worker = str(Path(__file__).with_name("user_worker.py"))
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", worker, str(requests), str(replies), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what functions print must not end up among our results
                pass_fds=(requests, replies),
                env=_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
            )
        except OSError as error:
            self._close()
            raise GraderUnavailable(f"the process of users' reward functions must start: {error}") from error
        finally:
            os.close(requests)
            os.close(replies)

    def exchange(self, request: Request, rest: memoryview | bytes, seconds: float) -> Reply:
        """Raises CallLost."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            parts = packed(request, rest)
            deadline = time.monotonic() + SEND_SECONDS
            while parts:
                if self._requests in self._ready(selector, deadline, "did not take its rows in time"):
                    sent = os.write(self._requests, parts[0])
                    parts = [parts[0][sent:], *parts[1:]] if sent < len(parts[0]) else parts[1:]
            selector.unregister(self._requests)
            deadline = time.monotonic() + seconds
            received = bytearray()
            while len(received) < SIZES_BYTES or len(received) < SIZES_BYTES + sum(sizes_of(received)):
                self._ready(selector, deadline, f"did not end within {seconds:g} s")
                part = os.read(self._replies, READ_BYTES)
                if not part:
                    raise CallLost(self._end_of_process())
                received += part
        size, _ = sizes_of(received)
        reply: Reply = json.loads(received[SIZES_BYTES : SIZES_BYTES + size])
        return reply

    def _ready(self, selector: selectors.BaseSelector, deadline: float, complaint: str) -> set[Any]:
        ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
        if not ready:
            raise CallLost(complaint)
        if self._requests in selector.get_map() and self._replies in ready:  # it says nothing before it was asked
            raise CallLost(self._end_of_process())
        return ready

    def _end_of_process(self) -> str:
        """Its output is closed, so the guard is about to end as the functions' process did."""
        try:
            status = self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the channel that its scores go through"
        if status >= 0:
            return f"ended its process with exit status {status}"
        why = " (memory ran out, or someone killed it)" if status == -signal.SIGKILL else ""
        return f"ended its process by {signal.Signals(-status).name}{why}"

    def kill(self) -> None:
        """The guard kills all that it watches."""
        self.popen.terminate()

    def end(self) -> None:
        """A process that is at rest ends by itself when no more requests come; the guard ends one that does not."""
        self._close()
        try:
            self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _close(self) -> None:
        for descriptor in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._requests = self._replies = -1


def packed(message: Request | Reply, rest: memoryview | bytes = b"") -> list[memoryview]:
    """A message's parts that are not empty, to be written one after the other."""
    head = json.dumps(message).encode()
    sizes = len(head).to_bytes(8, "big") + len(rest).to_bytes(8, "big")
    return [memoryview(sizes + head), *([memoryview(rest)] if len(rest) else [])]


def sizes_of(start: bytes | bytearray) -> tuple[int, int]:
    """The lengths of a message's parts, from its first SIZES_BYTES."""
    return int.from_bytes(start[:8], "big"), int.from_bytes(start[8:SIZES_BYTES], "big")


def _request_to_load(number: int, load: Request) -> Request:
    return {"do": "load", "function": number, **load}


def _environment() -> dict[str, str]:
    """Ours. Where torch is loaded its number of threads goes with it, as if the function ran here."""
    torch = sys.modules.get("torch")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())} if torch is not None else {}
    return {**os.environ, **threads}


def _raised(reply: Reply) -> Exception:
    """The exception that the other process raised, as the nearest of ours."""
    for name in reply["raised"]:
        if name in errors.__all__ and issubclass(kind := getattr(errors, name), errors.RftError):
            with contextlib.suppress(TypeError):  # one that takes more than its message
                return kind(reply["message"])
    return RewardFunctionError(f"{reply['raised'][0]}: {reply['message']}")


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
