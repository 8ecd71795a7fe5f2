"""Rewards beside generation: each committed block of rollouts is scored while the next ones are generated.

Worth its while where graders work in other processes or wait for a network. What comes out waits in memory for the
reward stage, which commits it under its own key; after a crash that stage scores such blocks itself. So no key, row or
order depends on it, and what a grader raises is raised in the reward stage.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pyarrow as pa

from rft_core.rewards.event_loop import cancel_waits

END_SECONDS = 3.0  # for what can't be ended from here, such as a look-up of a host's name

Place = tuple[str, int]  # key of the rollouts, number of the block


class BesideGeneration:
    """One thread, which scores blocks in the order in which they are handed over."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[str, Future[pa.Table], Callable[[], pa.Table]] | None]
        self._waiting = queue.SimpleQueue()
        self._scored: dict[Place, Future[pa.Table]] = {}
        self._failed: set[str] = set()  # keys of rollouts of which one block could not be scored
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def hand_over(self, key: str, index: int, score: Callable[[], pa.Table]) -> None:
        """Have a block of the rollouts of that key scored soon."""
        if self._thread is None:
            # A daemon: it must not hold up the end of a process that is told to end at once.
            self._thread = threading.Thread(target=self._work, name="beside-generation", daemon=True)
            self._thread.start()
        future = self._scored[key, index] = Future()
        self._waiting.put((key, future, score))

    def take(self, key: str, index: int) -> pa.Table | None:
        """The block's rewards, once; waits for them. None for one that was not handed over, or came behind one that
        failed. Raises what scoring it raised."""
        future = self._scored.pop((key, index), None)
        try:
            return future.result() if future is not None else None
        except CancelledError:
            return None

    def forget(self, key: str) -> None:
        """Drop what was not taken: the rewards of these rollouts are committed."""
        for place in [place for place in self._scored if place[0] == key]:
            self._scored.pop(place).cancel()
        self._failed.discard(key)

    def close(self, end_calls: Callable[[], None]) -> None:
        """End the thread; `end_calls` makes the call that it waits for come back."""
        self._is_closed = True
        self._waiting.put(None)
        deadline = time.monotonic() + END_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            end_calls()  # more than once: it may just be between two calls
            cancel_waits(self._thread.ident or 0)
            self._thread.join(0.1)
        self._scored.clear()

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None:
            key, future, score = given
            if not future.set_running_or_notify_cancel():
                continue
            if self._is_closed or key in self._failed:
                future.set_exception(CancelledError())
                continue
            try:
                future.set_result(score())
            except BaseException as error:  # noqa: BLE001 (raised again in the reward stage)
                self._failed.add(key)
                future.set_exception(error)
