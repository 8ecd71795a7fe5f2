"""The process that holds the tests. It forks a child for each program, so tests share nothing but what was imported."""

from __future__ import annotations

import os
import shutil
import socket

from .asserts import run_asserts
from .calls import run_calls
from .confine import enter, kill_rest, set_limits, silence
from .peer import Gone
from .pytests import load_pytest, run_pytest
from .report import Verdict, describe
from .tests_end import TestsEnd
from .values import Memo
from .wire import BadMessage, Closed, pack, receive, send


def main() -> None:
    """Each job comes with the descriptor of a socket to the program that it judges."""
    channel = enter()
    silence()
    send(channel, pack(["ready"]))
    control = socket.socket(fileno=channel)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        job = receive(channel)
        if job["kind"] == "pytest":
            load_pytest()  # once here, for all children to come
        os.mkdir("job")
        child = os.fork()
        if child == 0:
            try:
                _judge(job, fds[0], channel)
            finally:
                os._exit(0)
        os.close(fds[0])
        _, status = os.waitpid(child, 0)
        kill_rest()
        shutil.rmtree("job")
        send(channel, pack(["exited", os.waitstatus_to_exitcode(status)]))


def _judge(job: dict, fd: int, channel: int) -> None:
    os.setsid()
    os.chdir("job")
    set_limits(job["limits"])
    peer = TestsEnd(fd, job)
    try:
        verdict = _verdict(job, peer)
    except BaseException as error:  # noqa: BLE001 (a data set's own code: the reason says what it raised)
        is_programs = isinstance(error, MemoryError | RecursionError | Gone) or "__foreign__" in error.__dict__
        verdict = Verdict(0, job["num_tests"], describe(error))
        if not is_programs:
            verdict = Verdict.unjudged(f"the tests cannot be run: {describe(error)}")
    verdict.is_gone = peer.is_gone
    send(channel, pack(verdict.to_json()))


def _verdict(job: dict, peer: TestsEnd) -> Verdict:
    try:
        peer.take(receive(peer.fd), Memo())  # the program says that it is loaded, or what it raised
    except (Gone, Closed, BadMessage):
        peer.is_gone = True
        return Verdict(0, job["num_tests"], None)
    except BaseException as error:  # noqa: BLE001 (the program may raise anything)
        return Verdict(0, job["num_tests"], f"the program cannot be loaded: {describe(error)}")
    return KINDS[job["kind"]](job, peer)


KINDS = {"assert": run_asserts, "calls": run_calls, "pytest": run_pytest}
