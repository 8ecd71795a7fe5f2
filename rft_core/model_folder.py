"""Which folder a model's name means, and what identifies its content. No torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from rft_core.errors import ModelUnreadable, SettingsError
from rft_core.phases import NAMES_PHASE

FETCHED = "models"  # below the artifact root: where `rft fetch-model` puts them
# Content of a model folder: everything that from_pretrained and the tokenizer read.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def resolve_model_path(name: str, root: Path, setting: str = "model.path") -> Path:
    """An absolute folder, one fetched before, or a hub id's local snapshot. Raises SettingsError for a name of none of
    them, ModelUnreadable when the hub does not give it.

    A folder of that name in the working directory is none of them: a flow may run anywhere.
    """
    if name.startswith(NAMES_PHASE):
        raise SettingsError(f"{setting} must not name a phase where the recipe has none, got {name}")
    given = Path(name).expanduser()
    if given.is_absolute() and given.is_dir():
        return given.resolve()
    if given.is_absolute():
        found = "a file" if given.exists() else "nothing"
        raise SettingsError(
            f"{setting} must be a folder with config.json and safetensors files, found {found} at {given}"
        )
    fetched = root / FETCHED / name
    if fetched.is_dir():
        return fetched.resolve()
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub_snapshot(name, setting)
    raise SettingsError(
        f"{setting} must be an absolute model folder, a fetched name or a hub id, found no folder {fetched}: "
        f"run `rft fetch-model {given.name}`, or name a folder with config.json and safetensors files"
    )


def model_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the files that make a model: config, weights, tokenizer.

    Raises ModelUnreadable when there is no such folder or no config.json in it.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelUnreadable(f"a model folder must hold config.json, found none in {folder}")
    digest = hashlib.sha256()
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        stat = path.stat()
        content = _file_digest(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        digest.update(f"{path.name}\0{content}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, state: tuple[int, ...]) -> str:
    """Read once in a process while its `state` on disk is the same: a grader is built more than once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hub_snapshot(name: str, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise SettingsError(
            f"{setting} must be a model folder, a fetched name or a hub id, found {name!r}: {error}"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnreadable(
            f"{setting} {name!r} must be a hub id that can be downloaded, found: {error}; "
            "download it elsewhere and name its folder"
        ) from error
