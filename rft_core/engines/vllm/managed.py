"""Our own vLLM server: a child of this process, on a free port of the loopback interface, that ends when we do.

It may live in another environment (`rollout.vllm.python`), for vLLM pins its own torch. A guard (rft_core/guard.py)
stands between: however this process ends, the server and all that it started are gone within seconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

from rft_core import guard
from rft_core.config import ModelSettings
from rft_core.engines.vllm.connection import Connection
from rft_core.errors import EngineUnavailable, SettingsError
from rft_core.vllm_settings import VllmSettings

MODEL_NAME = "policy"
GRACE_SECONDS = 3.0  # for the server to end by itself, which frees its shared memory
END_SECONDS = GRACE_SECONDS + guard.KILL_SECONDS + 2.0
POLL_SECONDS = 0.2
LOG_LINES = 12  # of the end of its log, where it does not start
USAGE_ERROR = 2  # exit status of a program that was given wrong arguments
# Of our environment, what would lead another interpreter to our packages, or give its threads our number.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "VLLM_API_KEY")
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def check_interpreter(settings: VllmSettings) -> None:
    """Raise SettingsError where no server of ours can be started with these settings."""
    python = settings.python or sys.executable
    mend = "pip install 'rft-pipeline[vllm]', or name another environment's interpreter in rollout.vllm.python"
    try:
        found = subprocess.run([python, "-c", HAS_VLLM], env=_environment(settings), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"rollout.vllm.python must be a Python interpreter, {python} is none: {error}") from error
    if found.returncode:
        raise SettingsError(f"engine vllm needs the package vllm, {python} has none: {mend}")


class ManagedServer:
    """At most one process at a time. What it says goes to `log`; its key is in its environment alone."""

    def __init__(self, settings: VllmSettings, model: ModelSettings, log: Path) -> None:
        self.settings = settings
        self.model = model
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int | None:
        """Of the guard; the server is its child."""
        return self._process.pid if self._process is not None else None

    @property
    def sleeps(self) -> bool:
        return self.model.device == "cuda" and self.settings.while_training in ("auto", "sleep")

    def start(self, folder: Path) -> Connection:
        """Serve a model folder; comes back when the server answers.

        Raises SettingsError for arguments that vLLM refuses, EngineUnavailable when it ends or is not up in time.
        """
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        port, key = _free_port(), secrets.token_urlsafe(32)
        watched, self._pipe = os.pipe()
        command = [sys.executable, "-P", str(Path(guard.__file__)), str(watched), str(GRACE_SECONDS)]
        try:
            with open(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    command + self._command(folder, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(watched,),
                    env={**_environment(self.settings), "VLLM_API_KEY": key},
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
                )
        finally:
            os.close(watched)
        connection = Connection(f"http://127.0.0.1:{port}", key, self.settings)
        try:
            self._wait(connection)
        except BaseException:
            self.stop()
            raise
        return connection

    def stop(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the server dies with its guard
                self._process.wait()
            self._process = None

    def _command(self, folder: Path, port: int) -> list[str]:
        model = self.model
        command = [self.settings.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        named = {
            "model": folder,
            "served-model-name": MODEL_NAME,
            "dtype": model.dtype,
            "host": "127.0.0.1",
            "port": port,
            "generation-config": "vllm",  # nothing of the folder's own, such as a repetition penalty
            "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled
        }
        if model.device == "cuda":
            named["gpu-memory-utilization"] = self.settings.gpu_memory_utilization
        else:
            # vLLM 0.32 rewinds the seeded generator of a row whose prompt is cut into chunks, which torch has for CUDA
            # alone: on a CPU its worker dies as soon as the prompts at work exceed one pass.
            command.append("--no-enable-chunked-prefill")
        if model.lora_rank and self.settings.lora == "adapter":
            command.append("--enable-lora")
            named["max-lora-rank"] = _served_rank(model.lora_rank)
        if self.sleeps:
            command.append("--enable-sleep-mode")
        command += [word for name, value in named.items() for word in (f"--{name}", str(value))]
        return command + ["--disable-uvicorn-access-log", *self.settings.arguments]

    def _wait(self, connection: Connection) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_seconds
        while not connection.is_healthy():
            status = self._process.poll() if self._process is not None else None
            if status is not None:
                raise (SettingsError if status == USAGE_ERROR else EngineUnavailable)(
                    f"our vLLM server must start, it ended with status {status}; its log, {self.log}, ends:\n"
                    + self._end_of_log()
                )
            if time.monotonic() >= deadline:
                raise EngineUnavailable(
                    f"our vLLM server must answer within {self.settings.start_timeout_seconds:g} s "
                    f"(rollout.vllm.start_timeout_seconds); its log, {self.log}, ends:\n{self._end_of_log()}"
                )
            time.sleep(POLL_SECONDS)

    def _end_of_log(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES:])
        return "  (no log)"


def _environment(settings: VllmSettings) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        **inherited,
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, reload, reset, sleep
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _served_rank(rank: int) -> int:
    """vLLM takes a few ranks alone, and smaller adapters in each.

    >>> _served_rank(4), _served_rank(16), _served_rank(33)
    (8, 16, 64)
    """
    ranks = (8, 16, 32, 64, 128, 256, 320, 512)
    if rank > ranks[-1]:
        raise SettingsError(f"model.lora_rank must be at most {ranks[-1]} for engine vllm, got {rank}")
    return next(served for served in ranks if served >= rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
