"""What tests of whole runs share."""

from __future__ import annotations

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
def recipe_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of the module's STEPS on a tiny model in float32."""
    folder = tmp_path_factory.mktemp("recipe")
    model = make_tiny_model(folder / "model")
    return write_recipe(folder, model, steps=request.module.STEPS, model__dtype="float32")
