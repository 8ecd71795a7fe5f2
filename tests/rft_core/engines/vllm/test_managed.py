"""Our own server: a process that is started, watched, restarted and never left behind. A fake, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rft_core.engines import Request, Sampling
from rft_core.engines.vllm import check_interpreter
from rft_core.errors import EngineUnavailable, SettingsError
from rft_core.vllm_settings import VllmSettings

POLICY = "a" * 64
SAMPLING = Sampling(1.0, 1.0, 0, 4)
REQUESTS = [Request((1, 50, 60), seed, "g") for seed in range(4)]
END_SECONDS = 5.0


def family(engine) -> list[psutil.Process]:
    """The guard and all below it."""
    guard = psutil.Process(engine.servers[0].managed.process_id)
    return [guard, *guard.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert alive == []


@pytest.fixture
def engine(engine_at, fake_python, blank):
    engine = engine_at(python=fake_python, start_timeout_seconds=60)
    engine.serve(blank, POLICY)
    return engine


def test_it_serves_the_policy_and_ends_with_the_engine(engine, tmp_path):
    processes = family(engine)
    assert len(processes) == 2
    made = engine.generate(REQUESTS, SAMPLING)
    assert [len(row.token_ids) for row in made].count(0) == 0
    assert engine.provenance == {"engine": "vllm", "vllm": ["0.32.0"], "servers": 1}
    started = (tmp_path / "run/server.log").read_text()
    assert started.startswith(f"serving {tmp_path}/run/weights/{POLICY}")
    for argument in ("--logprobs-mode', 'processed_logprobs", "--generation-config', 'vllm", "--dtype', 'float32"):
        assert argument in started
    engine.close()
    wait_until_gone(processes)


def test_its_key_is_in_no_file_and_in_no_command_line(engine, tmp_path):
    key = engine.servers[0].at.headers["Authorization"].removeprefix("Bearer ")
    assert len(key) > 30
    assert key not in (tmp_path / "run/server.log").read_text()
    assert not any(key in " ".join(process.cmdline()) for process in family(engine))


def test_a_dead_server_is_started_again_within_the_stage(engine, notes):
    expected = engine.generate(REQUESTS, SAMPLING)
    before = family(engine)
    before[-1].kill()
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert any("trying them anew" in note for note in notes)
    wait_until_gone(before)
    family(engine)[-1].kill()  # once a stage
    with pytest.raises(EngineUnavailable, match=r"server.log"):
        engine.generate(REQUESTS, SAMPLING)


def test_it_is_stopped_while_the_policy_trains_where_the_settings_wish(engine_at, fake_python, blank):
    engine = engine_at(python=fake_python, while_training="stop")
    engine.serve(blank, POLICY)
    processes = family(engine)
    engine.rest()
    wait_until_gone(processes)
    engine.serve(blank, POLICY)
    assert engine.generate(REQUESTS, SAMPLING)[0].finish_reason != "error"


def test_it_is_kept_on_a_cpu(engine):
    processes = family(engine)
    engine.rest()
    assert all(process.is_running() for process in processes)


@pytest.mark.parametrize(("status", "error"), [(2, SettingsError), (1, EngineUnavailable)])
def test_one_that_does_not_start_says_why(engine_at, fake_python, blank, status, error):
    """Exit status 2 is what programs say of wrong arguments: no retry would help."""
    engine = engine_at(python=fake_python, arguments=["--ends-with", str(status)])
    with pytest.raises(error, match=f"ended with status {status}") as raised:
        engine.serve(blank, POLICY)
    assert "the reason why it does not start" in str(raised.value)


def test_one_that_is_not_up_in_time_is_ended(engine_at, tmp_path, blank):
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec sleep 60\n')
    slow.chmod(0o755)
    engine = engine_at(python=str(slow), start_timeout_seconds=0.5)
    with pytest.raises(EngineUnavailable, match=r"within 0\.5 s"):
        engine.serve(blank, POLICY)
    assert engine.servers[0].managed.process_id is None


SERVES = """
import sys, time
from pathlib import Path
from rft_core.config import ModelSettings
from rft_core.engines.vllm.managed import ManagedServer
from rft_core.vllm_settings import VllmSettings

python, folder = sys.argv[1:]
model = ModelSettings(path="x", device="cpu", dtype="float32")
server = ManagedServer(VllmSettings(python=python), model, Path(folder) / "log")
server.start(Path(folder))
print(server.process_id, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_us_however_we_end(fake_python, tmp_path, number):
    repository = Path(__file__).parents[4]
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, fake_python, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
    ) as ours:
        assert ours.stdout is not None
        guard = psutil.Process(int(ours.stdout.readline()))
        processes = [guard, *guard.children(recursive=True)]
        assert len(processes) == 2
        began = time.monotonic()
        ours.send_signal(number)
    wait_until_gone(processes)
    assert time.monotonic() - began < END_SECONDS


def test_it_ends_with_its_guard(engine):
    guard, server = family(engine)
    guard.kill()
    wait_until_gone([server])


def test_an_interpreter_without_vllm_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(SettingsError, match="needs the package vllm"):
        check_interpreter(VllmSettings(python=sys.executable))
    with pytest.raises(SettingsError, match=r"rollout\.vllm\.python must be a Python interpreter"):
        check_interpreter(VllmSettings(python=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"urls": ["http://a:1"]}, "weights_folder must name a folder"),
        ({"urls": ["http://a:1"], "weights_folder": "/w", "python": "/p"}, "python has no effect with urls"),
        ({"urls": ["http://a:1"], "weights_folder": "/w", "arguments": ["-x"]}, "arguments has no effect with urls"),
        ({"urls": ["http://a:1"], "weights_folder": "/w", "while_training": "stop"}, "stop is for our own server"),
        ({"urls": ["http://a:1", "http://a:1/"], "weights_folder": "/w"}, "urls must differ"),
        ({"urls": ["http://me:secret@a:1"], "weights_folder": "/w"}, "must hold no user"),
        ({"api_key_env": "KEY"}, "api_key_env has no effect without urls"),
        ({"arguments": ["--port=1"]}, "arguments must not hold --port"),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        VllmSettings(**settings)


def test_what_changes_tokens_is_content_and_nothing_else():
    settings = VllmSettings(python="/p", arguments=["--quantization", "fp8"], weights_folder="/w", concurrency=3)
    assert json.dumps(settings.content()) == '{"arguments": ["--quantization", "fp8"], "lora": "adapter"}'
