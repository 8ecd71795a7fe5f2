"""The wheel alone, in an empty folder, runs the shipped quick start."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel as an installer lays it out; its dependencies come from this environment."""
    source = tmp_path_factory.mktemp("source") / "tree"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():  # a build must not leave its folders in the checkout
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    wheels = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True)
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_holds_our_packages_and_nothing_of_the_tests(unpacked):
    packages = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"flows", "tasks", "rft_core", "data_contracts", "deployments"}
    assert (unpacked / "deployments/recipes/quickstart.yaml").is_file()
    assert (unpacked / "deployments/prefect.yaml").is_file()


def test_the_quick_start_runs_by_name_from_an_empty_folder(unpacked, tmp_path, prefect_api):
    model = make_tiny_model(tmp_path / "model")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "tasks.py").write_text("raise SystemExit('a file of the user shadows the package')\n")
    small = [
        f"model.path={model}",
        "steps=1",
        "evaluation.every=0",
        "rollout.prompts_per_step=2",
        "execution.threads=1",
    ]
    arguments = ["run", "quickstart", "--name", "demo"] + [part for setting in small for part in ("--set", setting)]
    environment = {**os.environ, **prefect_api, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    environment.pop("RFT_HOME", None)
    command = "import flows.cli; print(flows.cli.__file__); flows.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=empty, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(unpacked))
    assert (empty / ".rft/runs/demo/recipe.yaml").is_file()
