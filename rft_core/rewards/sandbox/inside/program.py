"""The process that holds a program: it loads it once and answers calls, or runs it once for each stdin."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from .confine import add_exit_functions, clear_folder, enter, kill_rest, set_limits, silence
from .peer import Peer
from .values import Memo, decode
from .wire import Closed, pack, receive, send

MAX_PRINTED_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 300


def main() -> None:
    """Wait for a program, in an interpreter that is ready for it."""
    channel = enter()
    add_exit_functions()
    send(channel, pack(["ready"]))
    try:
        job = receive(channel)
    except Closed:
        return
    silence()
    MODES[job["mode"]](channel, job)


class Printed(io.RawIOBase):
    """Keeps the first of what is printed."""

    def __init__(self) -> None:
        self.kept = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.kept += bytes(data)[: MAX_PRINTED_BYTES - len(self.kept)]
        return len(data)


class Program(Peer):
    """The program's end: its globals by name, its objects by handle."""

    def __init__(self, fd: int, module: ModuleType) -> None:
        super().__init__(fd)
        self.module = module
        self._raw = Printed()
        self._stdout = io.TextIOWrapper(io.BufferedWriter(self._raw), "utf-8", "backslashreplace", write_through=True)
        sys.stdout = self._stdout
        self._stdin, self._input = sys.stdin, builtins.input

    def run(self, op: str, args: list, kwargs: dict):
        names = vars(self.module)
        if op == "names":
            return [name for name in names if not name.startswith("__")]
        if op == "global":
            if args[0] not in names:
                raise AttributeError(f"the program defines no {args[0]}")
            return names[args[0]]
        if op == "setglobal":
            return names.update({args[0]: args[1]})
        if op == "delglobal":
            return names.pop(args[0], None)
        return super().run(op, args, kwargs)

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(name)

    def prepare(self, extras: list, memo: Memo) -> None:
        sys.stdin, builtins.input = self._stdin, self._input
        if extras and extras[0] == "stdin":
            sys.stdin = io.TextIOWrapper(io.BytesIO(extras[1].encode()), "utf-8")
        elif extras:
            builtins.input = decode(extras[1], memo, self._decode_other)

    def printed(self) -> str:
        try:
            self._stdout.flush()
        except ValueError:  # the program closed it
            return ""
        text, self._raw.kept = self._raw.kept.decode(errors="replace"), bytearray()
        return text


def serve_calls(channel: int, job: dict) -> None:
    """Load the program as a module; say whether that worked; then answer until the other end closes."""
    module = _module("solution", job)
    sys.stdin, sys.stderr = _text(0, "r", "surrogateescape"), _text(2, "w", "backslashreplace")
    program = Program(channel, module)
    set_limits(job["limits"])
    program.answer(lambda: module.__loader__.exec_module(module))
    try:
        while True:
            program.serve(receive(channel))
    finally:
        os._exit(0)  # no wait for threads, no last words


def run_cases(channel: int, job: dict) -> None:
    """Run the program as a script, each time in a child with that stdin, and say how it ended and what it printed."""
    module = _module("__main__", job)
    while True:
        try:
            stdin = receive(channel)
        except Closed:
            os._exit(0)
        streams = [_anonymous(stdin.encode(errors="surrogateescape")), _anonymous(b""), _anonymous(b"")]
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(channel)
            for fd, stream in enumerate(streams):
                os.dup2(stream, fd)
            os.closerange(3, max(streams) + 1)
            _start(module, job)
            raise SystemExit  # and end as an interpreter does: exit functions, threads, buffers
        _, status, used = os.wait4(child, 0)
        kill_rest()
        output, errors = (_read(stream, job["output_bytes"] + 1) for stream in streams[1:])
        for stream in streams:
            os.close(stream)
        ended = {
            "exit_code": os.waitstatus_to_exitcode(status),
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "is_overlong": len(output) > job["output_bytes"],
            "stdout": output[: job["output_bytes"]].decode(errors="replace"),
            "error": (errors.decode(errors="replace").strip().splitlines() or [""])[-1][:MAX_ERROR_CHARACTERS],
        }
        clear_folder(keep=job["file"])
        send(channel, pack(ended))


def _module(name: str, job: dict) -> ModuleType:
    with open(job["file"], "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(job["program"])
    path = os.path.abspath(job["file"])
    module = ModuleType(name)
    module.__file__, module.__loader__ = path, SourceFileLoader(name, path)
    sys.modules[name] = module
    sys.argv = [path]
    return module


def _start(module: ModuleType, job: dict) -> None:
    set_limits(job["limits"])
    if job["command"]:
        command = [part.replace("{file}", os.path.abspath(job["file"])) for part in job["command"]]
        os.execvp(command[0], command)
    sys.stdin = sys.__stdin__ = _text(0, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _text(1, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _text(2, "w", "backslashreplace")
    module.__loader__.exec_module(module)


def _text(fd: int, mode: str, errors: str):
    return open(fd, mode, encoding="utf-8", errors=errors, closefd=False)


def _anonymous(data: bytes) -> int:
    """A descriptor of a file without a name, at its start."""
    name = ".stream"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(name)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read(fd: int, count: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    while count and (part := os.read(fd, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


MODES = {"calls": serve_calls, "cases": run_cases}
