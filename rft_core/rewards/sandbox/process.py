"""One sandbox: a process to talk to, what it uses, and its end, after which nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rft_core.rewards.sandbox.inside import FOLDER_PREFIX
from rft_core.rewards.sandbox.inside.wire import MAX_MESSAGE_BYTES, BadMessage, pack, unpack
from rft_core.rewards.sandbox.launch import Launcher
from rft_core.rewards.sandbox.seccomp import filter_program

START_SECONDS = 60.0  # on a machine that is busy with something else
END_SECONDS = 10.0


class SandboxFailed(Exception):
    """A sandbox could not be started or ended."""


class ChannelClosed(Exception):
    """The process closed its end of the channel, or wrote what cannot be read."""


@dataclass(frozen=True)
class Usage:
    """Of all processes of a sandbox that live now, and the processor time of those that ended."""

    cpu_seconds: float
    waited_seconds: float  # that threads were ready to run and no core was free, summed over threads
    resident_bytes: int
    threads: int


@dataclass(frozen=True)
class Ended:
    """`exit_code` is null when the process was still alive and had to be killed; 128 + n for signal n."""

    exit_code: int | None
    cpu_seconds: float


class Sandbox:
    """Starts at once, without waiting: `wait_ready` does. The thread that starts it must live until `end`."""

    def __init__(self, launcher: Launcher, role: str) -> None:
        self._ended: Ended | None = None
        self._received = bytearray()
        self._first_pid: int | None = None  # the first process of its namespace
        self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX) if launcher.bubblewrap is None else None
        self.channel, theirs = socket.socketpair()
        self._info, info = os.pipe()
        self._errors, errors = os.pipe()
        filtered = _filter_file() if launcher.bubblewrap else None
        passed = [fd for fd in (theirs.fileno(), info, filtered) if fd is not None]
        try:
            self._process = subprocess.Popen(
                launcher.command(role, theirs.fileno(), info, filtered),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=passed,
                env=launcher.environment(self._folder or "/tmp"),
                cwd=self._folder or "/",
                start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
            )
        except OSError as error:
            self._release()
            raise SandboxFailed(f"{launcher.bubblewrap or 'python'} cannot be started: {error}") from error
        finally:
            theirs.close()
            for fd in (info, errors, filtered):
                if fd is not None:
                    os.close(fd)

    def wait_ready(self) -> None:
        """Raises SandboxFailed with what bubblewrap said."""
        deadline = time.monotonic() + START_SECONDS
        try:
            while (message := self.receive(0.5)) is None:
                if time.monotonic() > deadline:
                    raise SandboxFailed(f"a sandbox did not start within {START_SECONDS:g} s")
        except ChannelClosed:
            raise SandboxFailed(f"a sandbox did not start: {self._complaint()}") from None
        if message != ["ready"]:
            raise SandboxFailed(f"a sandbox began with {message!r:.100}")

    def send(self, message: Any, seconds: float, descriptor: int | None = None) -> None:
        """Raises ChannelClosed, also when it is not taken in time."""
        try:
            self.channel.settimeout(seconds)
            if descriptor is not None:
                socket.send_fds(self.channel, [b"F"], [descriptor])
            self.channel.sendall(pack(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, seconds: float) -> Any:
        """The next message, or null when none arrived in time. Raises ChannelClosed."""
        deadline = time.monotonic() + seconds
        while True:
            length = int.from_bytes(self._received[:4], "big")
            if len(self._received) >= 4 and length > MAX_MESSAGE_BYTES:
                raise ChannelClosed("an overlong message")
            if len(self._received) >= 4 + length and self._received:
                body = bytes(self._received[4 : 4 + length])
                del self._received[: 4 + length]
                try:
                    return unpack(body)
                except BadMessage as error:
                    raise ChannelClosed(str(error)) from error
            poller = select.poll()
            poller.register(self.channel, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            try:
                part = self.channel.recv(1 << 18)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("end of messages")
            self._received += part

    def hand_over(self) -> int:
        """The descriptor of our end of the channel, for another process to use from now on."""
        self.channel.setblocking(True)
        return self.channel.fileno()

    def usage(self) -> Usage:
        cpu_ticks = waited_nanoseconds = resident_pages = num_threads = 0
        for pid, threads in self._processes():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                cpu_ticks += sum(map(int, fields[11:15]))  # its own, and of the children that it waited for
                resident_pages += int(fields[21])
                num_threads += len(threads)
                for thread in threads:
                    waited_nanoseconds += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
        cpu_seconds = cpu_ticks / os.sysconf("SC_CLK_TCK")
        resident_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
        return Usage(cpu_seconds, waited_nanoseconds / 1e9, resident_bytes, num_threads)

    def memory_bytes(self) -> int:
        """Resident memory with shared pages counted once. Slower than `usage`, which counts them for each process."""
        kibibytes = 0
        for pid, _ in self._processes():
            with contextlib.suppress(OSError, StopIteration):
                lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
                kibibytes += int(next(line for line in lines if line.startswith(b"Pss:")).split()[1])
        return kibibytes << 10

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """The first process and all below it, parents first, with their threads."""
        waiting = [self._first() or self._process.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                threads = os.listdir(f"/proc/{pid}/task")
                for thread in threads:
                    waiting += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
                yield pid, threads

    def end(self, wait_seconds: float = 0.0) -> Ended:
        """Kill all its processes and collect them; first wait a moment for it to end by itself. May be called again."""
        if self._ended is None:
            exit_code, cpu_seconds = self._collect(wait_seconds)
            if cpu_seconds is None:
                self._kill()
                _, cpu_seconds = self._collect(END_SECONDS)
            if cpu_seconds is None:
                raise SandboxFailed(f"the processes of a sandbox do not end (process {self._process.pid})")
            self._ended = Ended(exit_code, cpu_seconds)
            self._release()
        return self._ended

    def _kill(self) -> None:
        if self._folder is not None:
            for pid, _ in list(self._processes()):
                _kill(os.kill, pid)
            return
        first = self._first(seconds=2.0)
        if first is not None:  # killing it kills its whole namespace; bubblewrap then ends by itself
            _kill(os.kill, first)
            if self._is_over(END_SECONDS / 2):
                return
        _kill(os.killpg, self._process.pid)

    def _is_over(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause = 0.0005
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _collect(self, seconds: float) -> tuple[int | None, float | None]:
        """(exit code, processor seconds) once it has ended, else nulls."""
        if not self._is_over(seconds):
            return None, None
        _, status, used = os.wait4(self._process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # collected here, for the usage; Popen must not wait again
        return code if code >= 0 else 128 - code, used.ru_utime + used.ru_stime

    def _first(self, seconds: float = 0.0) -> int | None:
        """The first process inside, from what bubblewrap writes; null without a namespace, and before there is one."""
        if self._first_pid is None and self._folder is None:
            ready, _, _ = select.select([self._info], [], [], seconds)
            text = os.read(self._info, 1 << 12) if ready else b""
            with contextlib.suppress(ValueError, KeyError):
                self._first_pid = json.loads(text)["child-pid"]
        return self._first_pid

    def _complaint(self) -> str:
        with contextlib.suppress(SandboxFailed):
            self._is_over(1.0)
        ready, _, _ = select.select([self._errors], [], [], 0)
        lines = os.read(self._errors, 1 << 16).decode(errors="replace").strip().splitlines() if ready else []
        return lines[-1] if lines else "it gave no reason"

    def _release(self) -> None:
        self.channel.close()
        os.close(self._info)
        os.close(self._errors)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _filter_file() -> int | None:
    program = filter_program()
    if program is None:
        return None
    fd = os.memfd_create("seccomp")
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _kill(how: Any, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        how(number, signal.SIGKILL)
