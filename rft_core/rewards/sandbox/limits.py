"""What a program may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
# The tests' process: it holds what programs give, and pytest. Its time is bounded by the program's.
CHECKER_MEMORY_BYTES = 2048 * MIB
CHECKER_CPU_SECONDS = 3600.0


@dataclass(frozen=True)
class Limits:
    """Time is that of one run: of all tests that call a program, or of one stdin case.

    Memory and processor time are those of all its processes together.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 20.0
    memory_bytes: int = 512 * MIB
    processes: int = 32  # threads count
    file_bytes: int = 64 * MIB  # all files together
    output_bytes: int = 4 * MIB

    def to_json(self, *, counts_processes: bool, is_reserving: bool = False) -> dict[str, Any]:
        """As the inside takes them."""
        return {
            "cpu_seconds": self.cpu_seconds,
            "memory_bytes": self.memory_bytes,
            "file_bytes": self.file_bytes,
            "processes": self.processes if counts_processes else None,
            "is_reserving": is_reserving,
        }

    def for_checker(self) -> Limits:
        return Limits(
            cpu_seconds=CHECKER_CPU_SECONDS,
            wall_seconds=self.wall_seconds,
            memory_bytes=max(CHECKER_MEMORY_BYTES, 2 * self.memory_bytes),
            processes=max(self.processes, 64),
            file_bytes=self.file_bytes,
            output_bytes=self.output_bytes,
        )
