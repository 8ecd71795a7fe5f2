"""A whole run whose rollouts a real vLLM server makes: killed in its second step, resumed, and nothing left of it."""

import json
import os
from collections import Counter

import psutil
import pytest

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from tests.faults.harness import children_of, generated_blocks, kill_when, output_of, rft, write_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults]
STEPS, BLOCKS = 2, 3


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, prefect_api):
    """(root, processes that were alive when the run was killed)."""
    folder = tmp_path_factory.mktemp("vllm")
    vllm = {"python": os.environ["RFT_VLLM_PYTHON"], "arguments": ["--enforce-eager"]}
    recipe = write_recipe(
        folder,
        make_tiny_model(folder / "model", head_dim=32),  # vLLM's kernels for a CPU take heads of 32 and more
        steps=STEPS,
        model__dtype="float32",
        rollout__engine="vllm",
        rollout__vllm=vllm,
        evaluation={"every": 0},
    )
    root, environment, left = folder / "root", {**prefect_api, "TORCHDYNAMO_DISABLE": "1"}, []
    process = rft("run", recipe, "--name", "x", root=root, environment=environment)

    def is_time():
        if len(list(root.glob("store/rollouts/*/part-*.json"))) > BLOCKS:  # the second step has begun
            left.extend(children_of(process))
            return True
        return False

    assert kill_when(process, is_time, 600)
    psutil.wait_procs(left, timeout=5)
    alive = [child for child in left if child.is_running()]
    process = rft("run", recipe, "--name", "x", root=root, environment=environment)
    output = output_of(process, 600)
    assert process.returncode == 0, output
    return root, left, alive


def tables(root, record, stage):
    ledger, store = Ledger(root / "runs/x"), Store(str(root))
    return [store.read(ledger.get("main", step, stage).refs[record]).to_pylist() for step in range(1, STEPS + 1)]


def test_nothing_is_left_after_a_kill(resumed):
    _, left, alive = resumed
    assert len(left) >= 3  # the guard, the server, its workers
    assert alive == []


def test_nothing_is_left_after_the_end(resumed):
    root, _, _ = resumed
    named = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [cmdline for cmdline in named if any(str(root) in word for word in cmdline)]
    assert [path.name for path in (root / "runs/x/engine").iterdir()] == ["server.log"]


def test_what_was_committed_is_not_made_again(resumed):
    root, _, _ = resumed
    counts = Counter(generated_blocks(root, "x"))
    assert len(counts) == STEPS * BLOCKS
    assert sum(counts.values()) <= STEPS * BLOCKS + 1  # at most the block in flight


def test_rows_say_who_sampled_them_and_are_corrected(resumed):
    root, _, _ = resumed
    for rollouts in tables(root, "rollouts", "rollouts"):
        assert {json.loads(row["sampling"])["engine"] for row in rollouts} == {"vllm"}
        assert {row["status"] for row in rollouts} <= {"completed", "truncated"}
    for (update,) in tables(root, "updates", "update"):
        assert update["off_policy_rows"] == 0 and update["ratio_max"] == pytest.approx(1.0)
        assert update["sampling_logp_difference_max"] < 1e-3  # in float32 both compute the same
        assert update["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


def test_manifests_name_the_engine(resumed):
    root, _, _ = resumed
    ref = Ledger(root / "runs/x").get("main", 1, "rollouts").refs["rollouts"]
    engine = Store(str(root)).manifest(ref)["provenance"]["engine"]
    assert engine["engine"] == "vllm" and engine["vllm"] and engine["servers"] == 1
