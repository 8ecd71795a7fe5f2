"""What every test has: an artifact root of its own, one thread, no usage analytics, no hub; and the order of tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
# Where the real model is fetched to, once for all test runs; the same folder as the demo's.
MODEL_ROOT = Path(os.environ.get("RFT_HOME") or REPOSITORY / ".rft")

# Before any test imports a dependency, for they read these at import. Child processes inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",  # on two-layer models a second thread only waits, and test processes share the cores
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    PREFECT_LOGGING_LEVEL="WARNING",
    TOKENIZERS_PARALLELISM="false",
)
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # without a device Triton's kernels are tested on its interpreter
for _name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE"):
    os.environ.pop(_name, None)


@pytest.fixture(scope="session", autouse=True)
def artifact_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RFT_HOME and Prefect's own folder for all tests of this process: none touches the user's."""
    from flows.analytics import switch_analytics_off

    switch_analytics_off()
    root = tmp_path_factory.mktemp("rft-home")
    os.environ["RFT_HOME"] = str(root)
    os.environ["PREFECT_HOME"] = str(root / "prefect")
    return root


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real model, fetched on first use, by one test process while the others wait. For slow tests.

    In a process of its own: transformers leaves the file that it dequantises open, and warnings are errors here.
    """
    command = [sys.executable, "-m", "flows.cli", "fetch-model", "smollm2-135m", "--root", str(MODEL_ROOT)]
    MODEL_ROOT.mkdir(parents=True, exist_ok=True)
    with open(MODEL_ROOT / ".fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, cwd=REPOSITORY)
    return MODEL_ROOT / "models" / "smollm2-135m"


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real Prefect server that outlives the runs under test; gives the environment that names it."""
    from flows.server import free_port, is_healthy

    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    with subprocess.Popen(  # leaving closes its standard input, which ends it
        [sys.executable, "-P", "-m", "flows.embedded_server", str(port)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        deadline = time.monotonic() + 120
        while not is_healthy(url):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}


class SmallDisk:
    """A file system of one mebibyte that can be made larger."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enlarge(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=256m", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fast ring first. Several processes take whole files, the slow ones first: then they end together."""
    is_parallel = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is None) == is_parallel
    )  # stable: order in files stays


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("vllm") and "RFT_VLLM_PYTHON" not in os.environ:
        pytest.skip("needs an environment with vllm: make test-vllm")
