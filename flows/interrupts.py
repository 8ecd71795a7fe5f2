"""What Ctrl-C and SIGTERM do to a command. Imported before everything that takes time, so it imports next to nothing.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a weak reference's callback or a finaliser,
and each import runs some, it is printed and dropped, and the command goes on as if nobody had asked it to end. So what
was dropped is raised again; and while a command has only begun to load, it ends at once instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
MESSAGE = "interrupted: the same command resumes at the last committed block"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
RAISED_AGAIN_SECONDS = 0.05
# What a signal's handler raises: ours, and Prefect's for SIGTERM during a flow, whose import costs seconds.
RAISED = ("Interrupted", "KeyboardInterrupt", "TerminationSignal")


class Interrupted(KeyboardInterrupt):
    """Not KeyboardInterrupt itself: when that passes through `exec` of a text, which dataclasses use, CPython notes it
    as unhandled (pythonrun.c, unhandled_keyboard_interrupt) and later ends by the signal instead of our exit code.
    """


def end_at_once() -> None:
    """From now on a signal ends the process: before there is anything to put in order, and after it was."""
    _handle(_end)


@contextmanager
def interruptible() -> Iterator[None]:
    """A first signal raises Interrupted in here, a second one ends the process at once."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    sys.unraisablehook = lambda dropped: _raise_again(dropped, hook)
    _handle(_raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _handle(handler: Callable[..., None]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as a shell starts what is to outlive its Ctrl-C
            signal.signal(number, handler)


def _end(*_: object) -> None:
    os.write(2, f"rft: {MESSAGE}\n".encode())
    os._exit(EXIT_INTERRUPTED)  # what ends with us, such as the embedded server, sees its pipe close


def _raise(*_: object) -> None:
    end_at_once()
    raise Interrupted


def _raise_again(dropped: sys.UnraisableHookArgs, hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
    """An exception that Python could only print. Later, since raised in here it would be dropped once more."""
    if dropped.exc_type.__name__ not in RAISED:
        hook(dropped)
        return
    _handle(_raise)
    timer = threading.Timer(RAISED_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
