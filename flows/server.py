"""The Prefect server that a run talks to: the one of PREFECT_API_URL, or our own child on SQLite under the root."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_contracts.errors import TransientError
from flows.analytics import switch_analytics_off

START_TIMEOUT_SECONDS = 120  # a loaded laptop takes half a minute for the first migration of the database
STOP_TIMEOUT_SECONDS = 5

# Loops that look every few seconds for schedules, workers and concurrency slots; a single run has none of them.
IDLE_SERVICES = {
    f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false"
    for name in (
        "CANCELLATION_CLEANUP",
        "CLEANUP_RECONCILER",
        "FOREMAN",
        "LATE_RUNS",
        "PAUSE_EXPIRATIONS",
        "REPOSSESSOR",
        "SCHEDULER",
        "TRIGGERS",
    )
}


@contextmanager
def prefect_server(root: Path, with_schedules: bool = False) -> Iterator[str]:
    """The URL of an API that is up. Prefect must not be imported before: it reads its settings then."""
    switch_analytics_off()
    given = os.environ.get("PREFECT_API_URL")
    if given:
        if not is_healthy(given):
            raise TransientError(
                f"PREFECT_API_URL must name a Prefect server that answers, found none at {given}: start it, or unset "
                "the variable to use an embedded one"
            )
        with _said_when_gone(given):
            yield given
        return
    home = root / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        **({} if with_schedules else IDLE_SERVICES),
        "PREFECT_UI_SERVE_BASE": "/",
        "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    }
    with open(home / "server.log", "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.embedded_server", str(port)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            # Its own group: Ctrl-C in the terminal is for the run, which then ends the server itself.
            start_new_session=True,
        )
    os.environ["PREFECT_API_URL"] = url
    os.environ["PREFECT_HOME"] = str(home)
    try:
        _await_health(url, child, home / "server.log")
        with _said_when_gone(url):
            yield url
    finally:
        del os.environ["PREFECT_API_URL"]
        _stop(child)


@contextmanager
def _said_when_gone(url: str) -> Iterator[None]:
    """Prefect's client waits out a restart of the server; what it raises after that is httpx's."""
    try:
        yield
    except Exception as error:
        import httpx  # Prefect has brought it

        if not isinstance(error, httpx.TransportError) or is_healthy(url):
            raise
        raise TransientError(
            f"the Prefect server must answer throughout a run, found that {url} went away: start it again; the same "
            "command resumes at the last committed block"
        ) from error


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_healthy(url: str, timeout_seconds: float = 2.0) -> bool:
    """Whether a Prefect API answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_seconds) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _await_health(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        if is_healthy(url):
            return
        time.sleep(0.1)
    raise TransientError(
        f"the embedded Prefect server must answer within {START_TIMEOUT_SECONDS} s, found "
        f"{'no answer' if child.poll() is None else f'exit code {child.returncode}'}: see {log}, "
        "or start `prefect server start` yourself and set PREFECT_API_URL"
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
