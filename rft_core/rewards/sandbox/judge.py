"""Judges one program: in a sandbox of its own, by tests that lie outside it."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from rft_core.rewards.sandbox.jobs import Calls, Judgement, Script
from rft_core.rewards.sandbox.launch import Launcher
from rft_core.rewards.sandbox.outputs import difference
from rft_core.rewards.sandbox.process import ChannelClosed, Ended, Sandbox, SandboxFailed
from rft_core.rewards.sandbox.watch import Watch, cpu_reason, with_limit

TICK_SECONDS = 0.05
GRACE_SECONDS = 3.0  # for the tests to conclude once their program is gone
MAX_ATTEMPTS = 3


class CheckerFailed(Exception):
    """The tests' process ended without a verdict."""


@dataclass(frozen=True)
class Reply:
    """How a script ended, by the process that ran it. A program may have taken that over: it can make it say nothing
    that its own output could not."""

    exit_code: int = 0
    cpu_seconds: float = 0.0
    is_overlong: bool = False
    stdout: str = ""
    error: str = ""

    @classmethod
    def read(cls, message: Any) -> Reply:
        """Raises ChannelClosed for what is no such reply."""
        kinds = {"exit_code": int, "cpu_seconds": float, "is_overlong": bool, "stdout": str, "error": str}
        if not isinstance(message, dict) or {name: type(value) for name, value in message.items()} != kinds:
            raise ChannelClosed("a reply of another shape")
        return cls(**message)


class Worker:
    """One program after another, each in a fresh sandbox that was started while the one before was at work.

    The tests' process is kept from program to program: it never holds anything of one.
    """

    def __init__(self, launcher: Launcher, is_partial: bool, stop: threading.Event) -> None:
        self._launcher = launcher
        self._is_partial = is_partial
        self._stop = stop
        self._spare: Sandbox | None = None
        self._checker: Sandbox | None = None

    def judge(self, job: Script | Calls, has_more: bool) -> Judgement:
        """Tries again in fresh sandboxes when one fails. Raises SandboxFailed when none can be started, Stopped."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            program = self._take(has_more)
            try:
                program.wait_ready()
                if isinstance(job, Script):
                    return self._judge_script(program, job)
                return self._judge_calls(program, job)
            except (SandboxFailed, CheckerFailed) as error:
                self._drop_checker()
                failure = error
                if attempt == MAX_ATTEMPTS and isinstance(error, SandboxFailed):
                    raise
            finally:
                program.end()
        return Judgement(0, None, f"{failure}, {MAX_ATTEMPTS} times over")

    def close(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None
        self._drop_checker()

    def _take(self, has_more: bool) -> Sandbox:
        program, self._spare = self._spare or Sandbox(self._launcher, "program"), None
        if has_more:
            self._spare = Sandbox(self._launcher, "program")
        return program

    def _drop_checker(self) -> None:
        checker, self._checker = self._checker, None
        if checker is not None:
            checker.end()

    # Programs that are run once for each stdin.

    def _judge_script(self, program: Sandbox, job: Script) -> Judgement:
        counts = self._launcher.bubblewrap is not None
        limits = self._launcher.limits.to_json(counts_processes=counts, is_reserving=job.command is not None)
        order = {"mode": "cases", "program": job.program, "file": job.file, "limits": limits}
        order |= {"command": list(job.command or ()), "output_bytes": self._launcher.limits.output_bytes}
        passed, reason = 0, None
        try:
            program.send(order, self._launcher.limits.wall_seconds)
            for number, (stdin, expected) in enumerate(job.cases, start=1):
                reply, over = self._run_case(program, stdin)
                failure = over or self._failure(reply) or difference(reply.stdout, expected, job.tolerance)
                if failure is None:
                    passed += 1
                    continue
                reason = reason or f"case {number}: {failure}"
                if over or not self._is_partial:
                    break
        except ChannelClosed:
            reason = reason or self._death(program.end(1.0))
        return Judgement(passed, job.num_tests, reason)

    def _run_case(self, program: Sandbox, stdin: str) -> tuple[Reply, str | None]:
        watch = self._watch(program)
        program.send(stdin, self._launcher.limits.wall_seconds)
        while (reply := program.receive(TICK_SECONDS)) is None:
            over = watch.exceeded()
            if over is not None:
                return Reply(), over
        return Reply.read(reply), None

    def _failure(self, reply: Reply) -> str | None:
        limits, code = self._launcher.limits, reply.exit_code
        if code == -signal.SIGXCPU or reply.cpu_seconds > limits.cpu_seconds:
            return cpu_reason(limits)
        if reply.is_overlong or code == -signal.SIGXFSZ:
            return f"limit: more than {limits.output_bytes} bytes of output"
        if code < 0:
            return f"the program died of {_signal_name(-code)}"
        return with_limit(f"the program ended with exit code {code}: {reply.error}", limits) if code else None

    # Programs whose functions are called.

    def _judge_calls(self, program: Sandbox, job: Calls) -> Judgement:
        limits, counts = self._launcher.limits, self._launcher.bubblewrap is not None
        checker = self._ready_checker()
        watch = self._watch(program, checker)
        order = {"mode": "calls", "program": job.program, "file": "solution.py"}
        try:
            program.send({**order, "limits": limits.to_json(counts_processes=counts)}, limits.wall_seconds)
        except ChannelClosed as error:
            raise SandboxFailed(f"a program was not taken: {error}") from error
        tests = {**job.tests, "is_partial": self._is_partial}
        tests["limits"] = limits.for_checker().to_json(counts_processes=counts)
        verdict, over, ends = None, None, 0.0
        try:
            checker.send(tests, limits.wall_seconds, program.hand_over())
            while not _is_end(message := checker.receive(TICK_SECONDS)):
                verdict = message or verdict
                if over is not None and time.monotonic() > ends:
                    self._drop_checker()
                    return Judgement(0, job.num_tests, over)
                if over is None and verdict is None:
                    over = watch.exceeded()
                    if over is not None:
                        program.end()
                        ends = time.monotonic() + GRACE_SECONDS
        except ChannelClosed as error:
            raise CheckerFailed(f"the tests' process ended: {error}") from error
        return self._concluded(program, _read_verdict(verdict), over)

    def _ready_checker(self) -> Sandbox:
        if self._checker is None:
            self._checker = Sandbox(self._launcher, "checker")
            self._checker.wait_ready()
        return self._checker

    def _concluded(
        self, program: Sandbox, verdict: tuple[int, int, str | None, bool, bool], over: str | None
    ) -> Judgement:
        passed, total, reason, is_judged, is_gone = verdict
        if not is_judged:
            return Judgement(0, None, reason)
        if is_gone:
            death = over or self._death(program.end(1.0))
            return Judgement(min(passed, total - 1), total, f"{death} ({reason})" if reason else death)
        return Judgement(passed, total, with_limit(reason, self._launcher.limits) if reason else None)

    def _watch(self, program: Sandbox, checker: Sandbox | None = None) -> Watch:
        return Watch(program, checker, self._launcher.limits, self._stop)

    def _death(self, ended: Ended) -> str:
        """Why a program's process is gone."""
        code = ended.exit_code
        if code == 128 + signal.SIGXCPU or ended.cpu_seconds > self._launcher.limits.cpu_seconds:
            return cpu_reason(self._launcher.limits)
        if code is None:
            return "the program closed its channel before its tests were done"
        if code > 128:
            return f"the program died of {_signal_name(code - 128)} before its tests were done"
        return f"the program ended (exit code {code}) before its tests were done"


def _is_end(message: Any) -> bool:
    return isinstance(message, list) and message[:1] == ["exited"]


def _read_verdict(message: Any) -> tuple[int, int, str | None, bool, bool]:
    """(passed, total, reason, is judged, is gone), see inside/report.py. Raises CheckerFailed."""
    kinds = [(str,), (int,), (int,), (str, type(None)), (bool,), (bool,)]
    if not isinstance(message, list) or len(message) != len(kinds):
        raise CheckerFailed("the tests' process gave no verdict")
    if not all(type(value) in kind for value, kind in zip(message, kinds, strict=True)):
        raise CheckerFailed("the tests' process gave no verdict that can be read")
    return tuple(message[1:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
