"""The recipe that is killed, what starts its runs, and the run that nobody killed: once for a test process."""

import pytest

from tests.faults.harness import Runs, all_digests, generated_blocks, write_recipe
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return write_recipe(folder, make_tiny_model(folder / "model"))


@pytest.fixture(scope="session")
def runs(prefect_api, tmp_path_factory):
    forked = Runs(prefect_api, tmp_path_factory.mktemp("log") / "runs.log")
    yield forked
    forked.close()


@pytest.fixture(scope="session")
def undisturbed(recipe, runs, tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    runs.finish("run", recipe, "--name", "x", root=root)
    return all_digests(root, "x"), generated_blocks(root, "x")
