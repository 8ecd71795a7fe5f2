"""After the work, and after a kill, nothing of it is left; during it, nothing of the machine is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from rft_core.errors import GraderUnavailable
from rft_core.rewards.sandbox import Launcher, Limits, Script, judge_all, sandbox_launcher
from rft_core.rewards.sandbox.process import Sandbox

REPOSITORY = Path(__file__).parents[4]
STAYS = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n"
SLEEPS = f"{STAYS}time.sleep(600)\n"
GOES = f"{STAYS}print(input())\n"
FAST = Limits(cpu_seconds=1.0, wall_seconds=1.0)


def launcher_of(limits: Limits = FAST) -> Launcher:
    import dataclasses

    return dataclasses.replace(sandbox_launcher(), limits=limits)


def traces() -> tuple[set[str], str, set[int]]:
    """Names in the folder for temporary files, mounts, descriptors of this process."""
    names = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("rft", "bwrap", ".bubblewrap"))}
    return names, Path("/proc/self/mountinfo").read_text(), set(map(int, os.listdir("/proc/self/fd")[:-1]))


def below() -> set[psutil.Process]:
    """Processes below this one; those of other tests' servers are there all along."""
    return set(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("mode", ["sandbox", "unsandboxed"])
def test_no_process_file_mount_or_descriptor_is_left(mode):
    launcher = launcher_of() if mode == "sandbox" else Launcher(None, FAST)
    judge_all(launcher, [Script("print(1)", (("", "1"),))], is_partial=False, workers=1)
    before, others = traces(), below()
    jobs = [Script(program, (("x", "x"),)) for program in (GOES, "print(input())", "import os\nos.abort()")]
    jobs += [Script(SLEEPS, (("", ""),))] if mode == "sandbox" else []
    judge_all(launcher, jobs, is_partial=False, workers=2)
    assert below() <= others
    assert traces() == before


def test_an_error_in_one_worker_ends_all():
    jobs = [Script("print(1)", (("", "1"),)), Script(SLEEPS, (("", ""),)), Script("", (("", 7),))]
    launcher = launcher_of(Limits(wall_seconds=60.0))
    began, others = time.monotonic(), below()
    with pytest.raises(AttributeError):
        judge_all(launcher, [*jobs, *jobs[:2]], is_partial=False, workers=2)
    assert time.monotonic() - began < 30
    assert below() <= others


def test_a_sandbox_that_cannot_start_is_transient(tmp_path):
    broken, others = tmp_path / "bwrap", below()
    broken.write_text("#!/bin/sh\necho 'bwrap: Resource temporarily unavailable' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(GraderUnavailable, match=r"programs cannot be judged: .* Resource temporarily unavailable"):
        judge_all(Launcher(str(broken), FAST), [Script("", (("", ""),))], is_partial=False, workers=2)
    assert below() <= others


PARENT = """
import signal, sys, threading
from dataclasses import replace
from rft_core.rewards.sandbox import Calls, Limits, Script, judge_all, sandbox_launcher

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test process may be told to ignore it
limits = Limits(cpu_seconds=600, wall_seconds=600)
tests = dict(kind="assert", code="assert f() == 1", names=["f"], words=["f"], num_tests=1, calls=[], function=None)
tests |= dict(modules=[], packages=[], tolerance=0)
sleeps, spins = sys.argv[1], "def f():\\n    while True: pass\\n"
jobs = [Script(sleeps, (("", ""),)), Calls(spins, tests), Script(sleeps, (("", ""),)), Calls(spins, tests)]
launcher = replace(sandbox_launcher(), limits=limits)
print("ready", flush=True)
judge_all(launcher, jobs, is_partial=False, workers=4)
"""


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(number):
    before = traces()[:2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SLEEPS], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout.readline() == b"ready\n"
    descendants = _wait_for_descendants(psutil.Process(parent.pid), 20)
    parent.send_signal(number)
    try:
        parent.wait(30)
    finally:
        parent.kill()
        parent.stdout.close()
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert alive == []
    assert traces()[:2] == before


def _wait_for_descendants(parent: psutil.Process, count: int) -> list[psutil.Process]:
    """Two scripts have six processes each below their sandbox's first; everything together is over twenty."""
    deadline = time.monotonic() + 60
    while len(found := parent.children(recursive=True)) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_an_idle_sandbox_ends_when_its_parent_closes_the_channel():
    sandbox = Sandbox(launcher_of(), "program")
    sandbox.wait_ready()
    sandbox.channel.close()
    deadline = time.monotonic() + 20
    while sandbox._process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


SPY = """
import json, os
seen = {"environment": dict(os.environ), "root": sorted(os.listdir("/")), "pids": [], "texts": []}
seen["pids"] = [name for name in os.listdir("/proc") if name.isdigit()]
LIBRARIES = os.path.dirname(os.path.dirname(os.__file__))
PASSED_OVER = ("/usr", "/lib", "/proc/sys", "/proc/self/task", "/proc/thread-self", LIBRARIES)
for folder, _, names in os.walk("/"):
    for name in [] if folder.startswith(PASSED_OVER) else names:
        try:
            with open(os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                text = file.read(1 << 16) or b""
        except (OSError, ValueError):
            continue
        if b"can" + b"ary" in text:
            seen["texts"].append(f"{folder}/{name}")
print(json.dumps(seen))
"""


def test_a_walk_through_all_that_is_visible_finds_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    (tmp_path / "secret").write_text("canary-2")
    launcher = launcher_of(Limits(wall_seconds=60.0, cpu_seconds=20.0))
    sandbox = Sandbox(launcher, "program")
    try:
        sandbox.wait_ready()
        limits = launcher.limits.to_json(counts_processes=True)
        order = {"mode": "cases", "program": SPY, "file": "main.py", "command": [], "output_bytes": 1 << 20}
        sandbox.send({**order, "limits": limits}, 10.0)
        sandbox.send("", 10.0)
        reply = sandbox.receive(60.0)
    finally:
        sandbox.end()
    seen = json.loads(reply["stdout"])
    assert set(seen["environment"]) <= {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "LC_CTYPE"}
    assert seen["environment"]["HOME"] == "/tmp"
    assert seen["texts"] == []
    assert len(seen["pids"]) <= 3
    assert not {"etc/passwd", "home", "var", "work"} & set(seen["root"])


def test_workers_run_at_once():
    """Four programs that sleep for a second each take far less than four."""
    jobs = [Script("import time\ntime.sleep(1.5)\nprint(1)", (("", "1"),)) for _ in range(4)]
    began = time.monotonic()
    judged = judge_all(launcher_of(Limits()), jobs, is_partial=False, workers=4)
    assert all(judgement.is_pass for judgement in judged)
    assert time.monotonic() - began < 5.5
    assert threading.active_count() < 20
