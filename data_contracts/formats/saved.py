"""Folders that `datasets` saved with save_to_disk: a Dataset, or a DatasetDict of splits."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats.kinds import DataFile, data_file

STATE = "state.json"
INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"
DEFAULT_SPLIT = "train"


def is_saved(files: Any, folder: str) -> bool:
    return files.exists(f"{folder}/{SPLITS}") or all(files.exists(f"{folder}/{name}") for name in (STATE, INFO))


def saved_files(files: Any, folder: str, full: Callable[[str], str], split: str | None) -> list[DataFile]:
    """The Arrow files of one split, in its order. Its rows count through, as in the Dataset.

    Raises SettingsError for a split that is not there, ContractError for a folder that is damaged.
    """
    label = folder.rstrip("/").rpartition("/")[2]
    if files.exists(f"{folder}/{SPLITS}"):
        names = _object(files, f"{folder}/{SPLITS}").get("splits", [])
        split = choose_split(folder, names, split)
        folder, label = f"{folder}/{split}", f"{label}/{split}"
    elif split is not None:
        raise SettingsError(f"data.parameters.split is for a DatasetDict, found one Dataset in {folder}; remove it")
    names = [entry["filename"] for entry in _object(files, f"{folder}/{STATE}").get("_data_files", [])]
    if not names:
        raise ContractError(f"{folder} must hold at least one row, found a Dataset without files")
    for name in names:
        if not files.exists(f"{folder}/{name}"):
            raise ContractError(f"{folder} must be whole: {STATE} names {name}, which is not there; save it again")
    files = [data_file(full(f"{folder}/{name}"), label) for name in names]
    return [replace(file, continues=index > 0) for index, file in enumerate(files)]


def choose_split(where: str, names: list[str], split: str | None) -> str:
    """The split asked for; without one, the only one or `train`. Raises SettingsError with those there are."""
    if split is None and len(names) == 1:
        return names[0]
    wanted = DEFAULT_SPLIT if split is None else split
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f"; near: {near[0]}" if near and split else ""
        raise SettingsError(
            f"data.parameters.split must be one of {where}: {', '.join(names)}; got {split or 'none'}{hint}"
        )
    return wanted


def _object(files: Any, path: str) -> dict[str, Any]:
    try:
        value = json.loads(files.cat_file(path))
    except (ValueError, OSError) as error:
        raise ContractError(f"{path} must be what datasets saved, found it unreadable: {error}") from error
    if not isinstance(value, dict):
        raise ContractError(f"{path} must be what datasets saved, found other JSON")
    return value
