"""Runs in processes of their own, killed from outside, and what is compared afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from data_contracts.ledger import Ledger

REWARD = '''
def low_letters(rows):
    """Share of the letters a-m: a reward on which a random model's completions differ."""
    return [sum(c in "abcdefghijklm" for c in row.completion_text) / (len(row.completion_text) or 1) for row in rows]
'''


def write_recipe(folder: Path, model: Path, **changes: Any) -> Path:
    """A recipe of small everything: 3 blocks a step, checkpoints further apart than steps, bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    with open(folder / "prompts.jsonl", "w") as file:
        for number in range(40):
            file.write(json.dumps({"prompt": f"word {number}", "answer": str(number)}) + "\n")
    recipe: dict[str, Any] = {
        "steps": 4,
        "model": {"path": str(model), "dtype": "bfloat16", "device": "cpu"},
        "data": {"source": "prompts.jsonl", "heldout_fraction": 0.2},
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_completion_tokens": 6, "block_groups": 2},
        "reward": {"functions": [{"name": "custom", "path": "rewards.py:low_letters"}]},
        "training": {"learning_rate": 0.01, "checkpoint_every": 3},
        "evaluation": {"every": 4, "prompts": 3, "samples": 2, "pass_at": [2]},
        "execution": {"threads": 1},
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            recipe[section] = {**recipe.get(section, {}), name: value}
        else:
            recipe[section] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def rft(*arguments: str | Path, root: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """The command line, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *map(str, arguments), "--root", str(root)],
        # As a user has it: the command itself decides how much of Prefect's log is shown.
        env={**os.environ, "PREFECT_LOGGING_LEVEL": "CRITICAL", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


class Runs:
    """Runs of the command line forked from a process that has imported everything; one at a time."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            env={**os.environ, **environment, "PREFECT_LOGGING_LEVEL": "CRITICAL"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._read() != "ready":
            self.close()
            raise AssertionError("the process that forks runs must start")

    def finish(self, *arguments: str | Path, root: Path) -> None:
        """Run a command that must succeed."""
        self._start(arguments, root)
        assert self._read() == "0", self.log.read_text()

    def kill_when(
        self, is_time: Callable[[], bool], *arguments: str | Path, root: Path, timeout_seconds: float = 120
    ) -> bool:
        """SIGKILL the run as soon as it is time. False when it ended well by itself before."""
        pid = self._start(arguments, root)
        deadline = time.monotonic() + timeout_seconds
        is_late = False
        while not (ready := select.select([self._zygote.stdout], [], [], 0.002)[0]):
            is_late = time.monotonic() >= deadline
            if is_late or is_time():
                os.kill(pid, signal.SIGKILL)
                break
        status = int(self._read())
        assert not is_late and status in (0, signal.SIGKILL), self.log.read_text()
        return not ready and status == signal.SIGKILL

    def close(self) -> None:
        with self._zygote as process:  # leaving closes its output too
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)

    def _start(self, arguments: tuple[str | Path, ...], root: Path) -> int:
        assert self._zygote.stdin is not None
        command = {"arguments": [*map(str, arguments), "--root", str(root)], "log": str(self.log)}
        self._zygote.stdin.write(json.dumps(command) + "\n")
        self._zygote.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._zygote.stdout is not None
        return self._zygote.stdout.readline().strip()


def output_of(process: subprocess.Popen[bytes], timeout_seconds: float = 300) -> str:
    """All that a process says; it must end in time."""
    with process:
        try:
            return process.communicate(timeout=timeout_seconds)[0].decode()
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def finish(process: subprocess.Popen[bytes]) -> str:
    """The output of a process that must succeed."""
    output = output_of(process)
    assert process.returncode == 0, output
    return output


def commit_points(root: Path) -> int:
    """How many blocks, ledger entries and checkpoints are committed below a root."""
    patterns = ("store/*/*/part-*.json", "runs/*/ledger/[!.]*.json", "checkpoints/*/manifest.json")
    return sum(1 for pattern in patterns for _ in root.glob(pattern))


def kill_when(process: subprocess.Popen[bytes], is_time: Callable[[], bool], timeout_seconds: float = 300) -> bool:
    """SIGKILL the process as soon as it is time. False when it ended by itself before."""
    deadline = time.monotonic() + timeout_seconds
    with process:
        while process.poll() is None:
            is_late = time.monotonic() >= deadline
            if is_late or is_time():
                process.kill()
                assert not is_late, "the process neither ended nor reached the moment of its kill"
                return True
            time.sleep(0.005)
    return False


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_digests(root: Path, run: str) -> dict[str, Any]:
    """Digest of every table in the run's ledger, identity of every policy, and digests of the weights."""
    entries = Ledger(root / "runs" / run).entries()
    digests: dict[str, Any] = {}
    for entry in entries:
        phase = "" if entry.phase == "main" else f"{entry.phase}."
        slot = f"{phase}{entry.step}.{entry.stage}.{entry.round}"
        digests[slot] = {record: [ref.key, ref.digest, ref.rows] for record, ref in entry.refs.items()}
        digests[slot]["policy"] = entry.policy.policy_id if entry.policy else None
    for phase in {entry.phase for entry in entries}:
        last = [entry.policy for entry in entries if (entry.stage, entry.phase) == ("checkpoint", phase)][-1]
        assert last is not None
        manifest = json.loads((root / "checkpoints" / last.policy_id / "manifest.json").read_text())
        digests["weights" if phase == "main" else f"weights of {phase}"] = manifest["weights_digest"]
    return digests


def flip_a_byte(path: Path) -> None:
    """What a bad disk does: another byte in the middle of the file, its size as before."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def generated_blocks(root: Path, run: str) -> list[tuple[str, int]]:
    """(slot, block) of everything that was really generated, in order, with repetitions."""
    lines = (root / "runs" / run / "generated.jsonl").read_text().splitlines()
    return [(line["slot"], line["block"]) for line in map(json.loads, lines)]


def assert_same(root: Path, undisturbed: tuple[dict[str, Any], list[tuple[str, int]]], kills: int) -> None:
    """Equal digests everywhere, and at most one block done twice per kill."""
    digests, blocks = undisturbed
    assert all_digests(root, "x") == digests
    repeated = Counter(generated_blocks(root, "x")) - Counter(blocks)
    assert sum(repeated.values()) <= kills
    assert max(repeated.values(), default=0) <= 1
    assert set(blocks) == set(generated_blocks(root, "x"))
