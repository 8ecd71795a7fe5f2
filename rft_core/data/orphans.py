"""A worker ends when the process that started it is gone, however that ended. Imports nothing heavy, so that the watch
begins before a worker's own imports do.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """Watch the parent from a thread of its own."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)
