"""What the command line costs before it does anything."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.house.sources import REPOSITORY

HEAVY = ("torch", "transformers", "prefect", "great_expectations", "datasets", "peft", "pandas")
HELP = """
import sys
sys.argv = ["rft", "--help"]
from flows.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
CHECK = """
from rft_core.recipes import load_recipe
load_recipe("quickstart")
"""
# What a command imports before its server is up: Prefect reads the server's address when it is imported.
BEFORE_THE_SERVER = """
import flows.evaluate, flows.launch, flows.orphans, flows.serve, flows.validate
"""
# Seconds of CPU time, which other work on the machine does not stretch the way it stretches the clock.
HELP_SECONDS = 1.0
CHECK_SECONDS = 0.5


def _run(code: str) -> tuple[list[str], float]:
    """Heavy modules that the code loaded, and the CPU seconds of its process."""
    report = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code + report]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.split(), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("code", "seconds"), [(HELP, HELP_SECONDS), (CHECK, CHECK_SECONDS)], ids=["help", "check"])
def test_starts_light(code, seconds):
    runs = [_run(code) for _ in range(3)]
    assert runs[0][0] == []
    assert min(cpu_seconds for _, cpu_seconds in runs) < seconds


def test_prefect_is_not_imported_before_its_server_is_up():
    assert "prefect" not in _run(BEFORE_THE_SERVER)[0]
