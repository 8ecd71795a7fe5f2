"""Saved policies on disk. Knows their files, not what is in them.

    checkpoints/<policy id>/manifest.json   the policy, its weights' digest, sizes and SHA-256 of all files; last
                            ...             the files

A folder without a manifest is no checkpoint. A deleted one keeps its manifest with a tombstone in it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_contracts.errors import DamagedTable
from data_contracts.files import LocalFiles, file_digest, read_json, storage_error
from data_contracts.refs import PolicyRef
from data_contracts.tombstones import Tombstone

MANIFEST = "manifest.json"


def checkpoint_folder(root: Path, ref: PolicyRef) -> Path:
    return root / "checkpoints" / ref.policy_id


def checkpoint_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, also of a deleted one; None when there is none that can be read."""
    try:
        return read_json(folder / MANIFEST, ("files", "deleted", "weights_digest"))
    except DamagedTable:  # its policy is replayed, as without a checkpoint
        return None


def commit_checkpoint(folder: Path, policy: PolicyRef, weights_digest: str) -> None:
    """Make the folder's files durable and write the manifest: from now on it is a checkpoint."""
    manifest = {
        "policy": policy.to_json(),
        "weights_digest": weights_digest,
        "files": _synced(folder),
        "deleted": False,
    }
    _write_manifest(folder, manifest)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is committed, not deleted, and all its files have their sizes."""
    manifest = checkpoint_manifest(folder)
    if manifest is None or manifest["deleted"]:
        return False
    sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with the bytes of a complete checkpoint; None when every digest is the manifest's."""
    for name, file in (checkpoint_manifest(folder) or {"files": {}})["files"].items():
        found = file_digest(folder / name)
        if found != file["sha256"]:
            return f"{folder / name} must have SHA-256 {file['sha256'][:12]}, found {found[:12]}"
    return None


def is_half_deleted(folder: Path) -> bool:
    """Whether a crash left files behind a tombstone."""
    tombstone = Tombstone.of(checkpoint_manifest(folder) or {})
    return tombstone is not None and not tombstone.is_swept and len(list(folder.iterdir())) > 1


def num_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's files, by its manifest."""
    return sum(file["bytes"] for file in (checkpoint_manifest(folder) or {"files": {}})["files"].values())


def delete_checkpoint(folder: Path, tombstone: Tombstone) -> None:
    """Delete the files and keep the manifest. The tombstone comes first: after a crash the checkpoint counts as
    deleted, and deleting it again removes what was left over.
    """
    manifest = checkpoint_manifest(folder)
    if manifest is None:
        return
    tombstone = Tombstone.of(manifest) or tombstone
    _write_manifest(folder, tombstone.put_on(manifest))
    for path in folder.iterdir():
        if path.name == MANIFEST:
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise storage_error(error, path, "delete") from error
    _write_manifest(folder, replace(tombstone, is_swept=True).put_on(manifest))


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    LocalFiles(folder).write(MANIFEST, json.dumps(manifest, indent=1).encode())


def _synced(folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes and SHA-256 of every file, each durable."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    return files
