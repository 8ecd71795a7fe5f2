"""What tests of whole runs share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import write_recipe
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def on_server(prefect_api: dict[str, str]) -> Iterator[None]:
    """Flows called in this process run against a real server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}):
        yield


@pytest.fixture(scope="module")
def warmed(on_server: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of supervision and then reinforcement, on the module's model."""
    from tests.flows.phase_runs import run

    root = tmp_path_factory.mktemp("warmed")
    run(root, model, "sft_then_grpo")
    return root


@pytest.fixture
def copied(warmed: Path, tmp_path: Path) -> Path:
    """That run to do things to; paths in it lead to the copy."""
    shutil.copytree(warmed, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture(scope="module")
def recipe_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of the module's STEPS on a tiny model in float32."""
    folder = tmp_path_factory.mktemp("recipe")
    model = make_tiny_model(folder / "model")
    return write_recipe(folder, model, steps=request.module.STEPS, model__dtype="float32")
