"""Asynchronous work from synchronous code, whether or not this thread runs an event loop already."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any

_WAITS: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}  # what a thread waits for, by its number


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Its result, or what it raises. An interrupt of the caller cancels it and waits for its end."""

    async def wait() -> Any:
        task = asyncio.current_task()
        assert task is not None
        _WAITS[threading.get_ident()] = asyncio.get_running_loop(), task
        try:
            return await awaitable
        finally:
            del _WAITS[threading.get_ident()]

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    outcome: list[Any] = []
    begun: list[Any] = []  # the loop and the task of the thread
    ended = threading.Event()  # Thread.join would take an interrupted wait for the thread's end (Python 3.11)

    async def wait_in_thread() -> Any:
        begun.extend([asyncio.get_running_loop(), asyncio.current_task()])
        return await awaitable

    def run() -> None:
        try:
            outcome.extend([asyncio.run(wait_in_thread()), None])
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            outcome.extend([None, error])
        finally:
            ended.set()

    threading.Thread(target=run).start()
    try:
        ended.wait()
    except BaseException:
        if begun and not begun[0].is_closed():
            begun[0].call_soon_threadsafe(begun[1].cancel)
        ended.wait()
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def cancel_waits(thread: int) -> None:
    """From another thread: what that one waits for now is cancelled, and its wait_for raises CancelledError."""
    found = _WAITS.get(thread)
    if found is not None:
        with contextlib.suppress(RuntimeError):  # it has just ended
            found[0].call_soon_threadsafe(found[1].cancel)
