"""A process that has imported everything and forks one command after the other, so that a kill costs no start-up.

Reads one JSON line per command, {"arguments", "log"}; answers with the child's pid, then with its wait status.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

# What a run imports anyway: by itself, or within Prefect and transformers.
PRELOADED = (
    "anyio._backends._asyncio",
    "fastapi",
    "flows.cli",
    "flows.launch",
    "flows.train",
    "great_expectations",
    "peft",
    "prefect.engine",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "pyarrow.dataset",
    "rft_core.checkpoint",
    "rft_core.engines.transformers",
    "rft_core.rewards.grader",
    "rft_core.update",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(command["arguments"], command["log"])
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


def run(arguments: list[str], log: str) -> None:
    """In the child: the command line, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(0)
    sys.argv = ["rft", *arguments]
    from flows.cli import main as command_line

    try:
        command_line()
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
