"""`rft serve` and a run created through the API do what the command line does."""

import json
import os
import subprocess
import sys
import time

import httpx
import pytest
import yaml

from data_contracts.ledger import Ledger
from tests.faults.harness import all_digests, finish, rft, write_recipe
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 240


@pytest.fixture
def served(prefect_api, tmp_path):
    """`rft serve` on a real server; gives the API's URL and the artifact root."""
    root = tmp_path / "root"
    url = prefect_api["PREFECT_API_URL"]
    log = tmp_path / "serve.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "serve", "--root", str(root)],
            env={**os.environ, **prefect_api, "PREFECT_RUNNER_POLL_FREQUENCY": "1"},
            stdout=file,
            stderr=file,
        ) as process,
    ):
        try:
            wait_for(lambda: len(deployments(url)) == 2, log)
            yield url, root
        finally:
            process.terminate()
            process.wait(30)


def deployments(url):
    found = when_free(f"{url}/deployments/filter", {}).json()
    return {f"{deployment['name']}": deployment for deployment in found}


def wait_for(condition, log=None):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log else "waited in vain"
        time.sleep(0.5)


def when_free(url, body):
    """The server's answer, asked again while its database is busy (503), as Prefect's own client does."""
    deadline = time.monotonic() + 60
    while (answer := httpx.post(url, json=body)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(1)
    return answer


def run_through_api(url, deployment, parameters):
    """Create a flow run as the UI would, wait for its end, and give its state's type and name."""
    created = when_free(f"{url}/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
    assert created.status_code == 201, created.text
    flow_run = f"{url}/flow_runs/{created.json()['id']}"
    wait_for(lambda: httpx.get(flow_run).json().get("state_type") in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"))
    state = httpx.get(flow_run).json()["state"]
    return state["type"], state["name"], state["message"]


def test_runs_created_through_the_api(served, prefect_api, tmp_path):
    url, root = served
    folder = tmp_path / "recipe"
    recipe = write_recipe(folder, make_tiny_model(folder / "model"), steps=2, model__dtype="float32")
    found = deployments(url)
    assert [schedule["active"] for schedule in found["train"]["schedules"]] == [False]
    assert found["train"]["parameters"]["if_busy"] == "skip"
    parameters = {"recipe": absolute(recipe), "run": "api"}
    assert run_through_api(url, found["train"], parameters)[0] == "COMPLETED"

    finish(rft("run", recipe, "--name", "x", root=tmp_path / "other", environment=prefect_api))
    assert all_digests(root, "api") == all_digests(tmp_path / "other", "x")

    relative = {"recipe": yaml.safe_load(recipe.read_text()), "run": "relative"}
    state, _, message = run_through_api(url, found["train"], relative)
    assert state == "FAILED"
    assert "data.source must be an absolute path, or reasoning_gym:NAME" in message
    rerun = {"run": "api", "stage": "data", "new": "moved", "overrides": ["data.source=prompts.jsonl"]}
    state, _, message = run_through_api(url, found["rerun"], rerun)
    assert (state, "found the relative path 'prompts.jsonl'" in message) == ("FAILED", True)

    rerun = {"run": "api", "stage": "advantages", "new": "dr", "overrides": ["algorithm.name=dr_grpo"]}
    assert run_through_api(url, found["rerun"], rerun)[0] == "COMPLETED"
    assert len(Ledger(root / "runs" / "dr").entries("update")) == 2


def absolute(recipe):
    """The recipe as parameters: paths as a form would hold them."""
    values = yaml.safe_load(recipe.read_text())
    values["data"]["source"] = str(recipe.parent / values["data"]["source"])
    values["reward"]["functions"][0]["path"] = f"{recipe.parent}/{values['reward']['functions'][0]['path']}"
    return json.loads(json.dumps(values))
