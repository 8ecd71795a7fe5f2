"""What made a table beside its inputs and settings: versions, and the fingerprint under which bits repeat."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from rft_core.config import Recipe
from rft_core.hardware import cpu_name

PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "peft", "safetensors")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of ours and of what computes, and the digest of our sources."""
    found = {"python": platform.python_version()}
    for package in ("rft-pipeline", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "source_digest": _source_digest()}


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Equal fingerprints, recipes and inputs give equal bits."""
    libraries = {name: versions()[name] for name in PACKAGES}
    return {
        "cpu": f"{platform.machine()} {cpu_name()}",
        "threads": recipe.execution.threads,
        "device": recipe.model.device,
        **libraries,
    }


def _source_digest() -> str:
    base = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("data_contracts", "rft_core", "tasks", "flows"):
        for path in sorted((base / package).rglob("*.py")):
            digest.update(path.relative_to(base).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
