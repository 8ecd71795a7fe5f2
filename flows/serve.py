"""Serve the deployments on this machine: schedules and runs from the Prefect UI or API execute here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flows.server import prefect_server
from rft_core.recipes import load_recipe

WEEKLY = "0 2 * * 1"  # Monday, 02:00
DEFAULT_RECIPE = "quickstart"


def serve_deployments(root: Path) -> None:
    """Serve train (with a paused weekly schedule) and rerun until stopped."""
    # A user's tasks.py in the working directory must not shadow ours in the processes that run flows.
    os.environ["PYTHONSAFEPATH"] = "1"
    with prefect_server(root, with_schedules=True) as url:
        from prefect import serve
        from prefect.client.schemas.objects import ConcurrencyLimitConfig
        from prefect.deployments.runner import EntrypointType
        from prefect.schedules import Cron

        from flows.rerun import rerun
        from flows.train import train

        one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy="ENQUEUE")
        recipe = load_recipe(DEFAULT_RECIPE).model_dump(mode="json")
        # to_deployment gives a coroutine only where it is awaited.
        deployments: list[Any] = [
            train.to_deployment(
                "train",
                description="Train a model, or resume the run of that name.",
                parameters={"recipe": recipe, "run": "train-{date}", "root": str(root), "if_busy": "skip"},
                schedules=[Cron(WEEKLY, active=False)],
                concurrency_limit=one_at_a_time,
                entrypoint_type=EntrypointType.MODULE_PATH,
            ),
            rerun.to_deployment(
                "rerun",
                description="Re-run from a stage of an old run, from its stored tables.",
                parameters={"root": str(root)},
                concurrency_limit=one_at_a_time,
                entrypoint_type=EntrypointType.MODULE_PATH,
            ),
        ]
        print(f"serving train/train and rerun/rerun from {root} at {url}", flush=True)
        serve(*deployments, print_starting_message=False)
