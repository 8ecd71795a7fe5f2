"""What a stage tells whoever watches: a live display on the command line, elsewhere the run's log."""

from __future__ import annotations

from typing import Protocol

Summary = dict[str, str | int | float]


class Watcher(Protocol):
    """Sees the stages of a run as they happen."""

    def started(self, stage: str) -> None: ...
    def advanced(self, stage: str, done: int, total: int, note: str) -> None: ...
    def finished(self, stage: str, summary: Summary) -> None: ...
    def noted(self, line: str) -> None: ...


class LogWatcher:
    """Writes finished stages and notes to the run's log."""

    def started(self, stage: str) -> None:
        pass

    def advanced(self, stage: str, done: int, total: int, note: str) -> None:
        pass

    def finished(self, stage: str, summary: Summary) -> None:
        self.noted(f"{stage}: {describe(summary)}")

    def noted(self, line: str) -> None:
        # Here, since commands look at runs before Prefect may be imported (flows.server).
        from prefect.exceptions import MissingContextError
        from prefect.logging import get_logger, get_run_logger

        try:
            get_run_logger().info(line)
        except MissingContextError:
            get_logger("rft").info(line)


def describe(summary: Summary) -> str:
    """`reward 0.41, rows 64`: one line of a stage's summary."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in summary.items()
    )
