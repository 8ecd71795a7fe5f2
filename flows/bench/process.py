"""A benchmark in a process of its own, with the memory that it and its children take."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

import psutil

SAMPLE_SECONDS = 0.2


def run_measured(command: list[str]) -> tuple[dict[str, Any], int]:
    """(the JSON object that it prints, peak bytes of it and its children)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = _Peak(process.pid)
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the benchmark's process ended with {process.returncode}")
    return json.loads(output), peak.stop()


class _Peak:
    """Samples the memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self._bytes

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            total = 0
            try:
                for process in (self._process, *self._process.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self._bytes = max(self._bytes, total)
