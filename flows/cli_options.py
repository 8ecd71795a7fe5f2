"""What the commands share: options, and how they print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

Root = Annotated[str | None, typer.Option("--root", help="Artifact root; else RFT_HOME, else ./.rft.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key=value over the recipe, e.g. rollout.group_size=16.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks and Prefect's log.")]
Ema = Annotated[bool, typer.Option("--ema", help="The moving average of the weights (training.ema_decay).")]
_state = {"verbose": False}


def quiet(verbose: bool) -> None:
    """Prefect's own log is for -v; ours says what happens."""
    _state["verbose"] = verbose
    if not verbose:
        os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")


def is_verbose() -> bool:
    return _state["verbose"]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


@contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """What users' code prints meanwhile goes to stderr: stdout is for programs to read."""
    with redirect_stdout(sys.stderr):
        yield


def console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
