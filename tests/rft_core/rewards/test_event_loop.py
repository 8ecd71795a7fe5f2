"""Asynchronous work from synchronous code."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from rft_core.rewards.event_loop import cancel_waits, wait_for


async def later(value: float) -> float:
    await asyncio.sleep(0.01)
    return 1 / value


async def in_a_loop(value: float) -> float:
    return wait_for(later(value))


def test_results_and_errors_come_back_with_and_without_a_running_loop():
    assert wait_for(later(2.0)) == 0.5
    assert asyncio.run(in_a_loop(2.0)) == 0.5
    with pytest.raises(ZeroDivisionError):
        wait_for(later(0.0))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_a_loop(0.0))


class Alarm(Exception):
    """Stands in for Ctrl-C, which pytest keeps to itself."""


def test_an_interrupt_inside_a_running_loop_cancels_the_work():
    ended = []

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def waiting() -> None:
        wait_for(endless())

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            asyncio.run(waiting())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5
    assert ended == ["cancelled"]


def test_another_thread_cancels_what_a_thread_waits_for():
    begun, raised = threading.Event(), []

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(60)

    def wait() -> None:
        try:
            wait_for(endless())
        except asyncio.CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(10)
    cancel_waits(thread.ident)
    thread.join(10)
    assert not thread.is_alive() and len(raised) == 1
    cancel_waits(thread.ident)  # which waits for nothing any more
