"""The command in a process of its own: how it ends, and what it leaves, when it is killed, stopped or out of disk."""

import sqlite3
import time
from contextlib import closing

import psutil
import pytest

from tests.faults.harness import assert_same, children_of, commit_points, finish, kill_when, output_of, rft

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_two_runs_have_equal_digests(recipe, undisturbed, prefect_api, tmp_path):
    """One forked from a warm process, one in a process of its own."""
    finish(rft("run", recipe, "--name", "x", root=tmp_path, environment=prefect_api))
    assert_same(tmp_path, undisturbed, kills=0)


def test_after_a_kill_nothing_is_left_and_the_next_command_mends_the_flow_run(recipe, tmp_path):
    """With the embedded server: it dies with the run, and `rft status` sets the orphaned flow run to Crashed."""
    process = rft("run", recipe, "--name", "x", root=tmp_path)
    left = []

    def is_time():
        if commit_points(tmp_path) > 8:
            left.extend(children_of(process))
            return True
        return False

    assert kill_when(process, is_time)
    assert left, "the embedded server must have been a child"
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
    status = finish(rft("status", "x", root=tmp_path))
    assert "crashed" in status.lower()
    assert flow_run_states(tmp_path) == ["CRASHED"]
    finish(rft("run", recipe, "--name", "x", root=tmp_path))
    assert flow_run_states(tmp_path) == ["COMPLETED", "CRASHED"]


def flow_run_states(root):
    """States of all flow runs in the embedded server's database, sorted."""
    with closing(sqlite3.connect(root / "prefect" / "prefect.db")) as connection:
        return sorted(row[0] for row in connection.execute("select state_type from flow_run"))


def test_sigterm_leaves_nothing_and_the_same_command_resumes(recipe, undisturbed, tmp_path):
    deadline = time.monotonic() + 120
    with rft("run", recipe, "--name", "x", root=tmp_path) as process:
        while commit_points(tmp_path) < 8:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        left = children_of(process)
        process.terminate()
        output = output_of(process, 60)
    assert process.returncode == 130, output
    assert "the same command resumes" in output
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
    assert '"state": "interrupted"' in finish(rft("status", "x", "--json", root=tmp_path))
    finish(rft("run", recipe, "--name", "x", root=tmp_path))
    assert_same(tmp_path, undisturbed, kills=1)


def test_a_full_disk_is_said_in_one_sentence_and_costs_nothing(recipe, undisturbed, runs, prefect_api, small_disk):
    process = rft(
        "run", recipe, "--name", "x", "--set", "execution.retries=0", root=small_disk.path, environment=prefect_api
    )
    output = output_of(process, 200)
    assert process.returncode == 1
    assert "the disk is full: free some space; what was committed before is safe" in output
    assert "Traceback" not in output
    small_disk.enlarge()
    runs.finish("run", recipe, "--name", "x", root=small_disk.path)
    assert_same(small_disk.path, undisturbed, kills=1)
