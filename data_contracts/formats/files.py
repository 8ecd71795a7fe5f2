"""Which files a source names: one, those of a glob, or those of a folder."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats.kinds import ENDINGS, DataFile, data_file, kind_by_name
from data_contracts.formats.saved import is_saved, saved_files
from data_contracts.formats.streams import filesystem_of, is_url, local_path, name_of, reaching

GLOB = re.compile(r"[*?\[]")
SPLIT_IN_NAME = re.compile(r"(?:^|[-_./ ])(train|training|test|testing|validation|valid|val|dev|eval)(?=[-_./ ]|$)")
SPLIT_NAMES = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}
REGULAR = ("file", "link")
CARDS = ("dataset_info.json", "dataset_infos.json")  # what the hub keeps beside data


@dataclass(frozen=True)
class Tree:
    """A file system and a path in it. `paths` of its results are paths that `streams.open_file` takes."""

    files: Any
    path: str
    given: str

    def full(self, path: str) -> str:
        return self.files.unstrip_protocol(path) if is_url(self.given) else path

    def kind(self) -> str | None:
        """file | directory | link | other, null when there is nothing."""
        with reaching(self.given):
            try:
                return str(self.files.info(self.path)["type"])
            except FileNotFoundError:
                return None


@dataclass(frozen=True)
class Found:
    """The files of a source in their order, and what a reader of the report should know about the choice."""

    files: tuple[DataFile, ...]
    notes: tuple[str, ...] = ()


def find_files(source: str, parameters: dict[str, Any]) -> Found:
    """The files that a source names, checked for what they are.

    Raises SettingsError for a source that names no file and for parameters that do not suit it, ContractError for files
    without rows, of several kinds, or of a kind that can't be read.
    """
    unknown = sorted(parameters.keys() - {"split"})
    if unknown:
        raise SettingsError(
            f"data.parameters of files may hold split alone (of a folder), found {', '.join(unknown)}; the others are "
            "for procedural sources and hub:"
        )
    split = parameters.get("split")
    tree = _tree(source)
    kind = tree.kind()
    if kind == "directory":
        return _of_folder(tree, split)
    if split is not None:
        raise SettingsError(f"data.parameters.split is for folders and hub:, found it with {source}; remove it")
    if kind is None and GLOB.search(tree.path):
        return _of_glob(tree)
    if kind is None:
        raise SettingsError(f"data.source must exist, found no file {source}{_near(tree)}")
    if kind not in REGULAR:
        raise SettingsError(f"data.source must be a regular file, found a device or pipe: {source}")
    file = data_file(tree.full(tree.path), name_of(source))
    if file.is_empty:
        raise ContractError(f"{source} must hold at least one row, found an empty file")
    return _found([file])


def _tree(source: str) -> Tree:
    if is_url(source):
        files = filesystem_of(source)
        return Tree(files, files._strip_protocol(source), source)
    from fsspec.implementations.local import LocalFileSystem

    path = os.path.abspath(local_path(source))
    return Tree(LocalFileSystem(), path, path)


def _of_glob(tree: Tree) -> Found:
    base = _fixed_part(tree.path)
    with reaching(tree.given):
        found = tree.files.glob(tree.path, detail=True)
    labels = _labels(found, base)
    if not labels:
        raise SettingsError(f"data.source must match files, found none for {tree.given}{_near(tree)}")
    return _found(_of_one_kind(tree, labels))


def _of_folder(tree: Tree, split: str | None) -> Found:
    """Of a folder that `datasets` saved, its split; of another, all data files below it."""
    if is_saved(tree.files, tree.path):
        return _found(saved_files(tree.files, tree.path, tree.full, split))
    with reaching(tree.given):
        found = tree.files.find(tree.path, detail=True)
    labels = _labels(found, tree.path)
    data = {path: label for path, label in labels.items() if kind_by_name(label)[0] and name_of(path) not in CARDS}
    if not data:
        raise SettingsError(f"data.source must hold data files ({ENDINGS}), found none in the folder {tree.given}")
    passed_over = [label for path, label in labels.items() if path not in data]
    notes = [f"passed over {', '.join(passed_over)}"] if passed_over else []
    return _found(_of_one_kind(tree, _of_split(tree.given, data, split)), notes)


def _found(files: list[DataFile], notes: list[str] | None = None) -> Found:
    return Found(tuple(files), (*(notes or ()), *(file.note for file in files if file.note)))


def _labels(found: dict[str, dict[str, Any]], base: str) -> dict[str, str]:
    """Path -> path below `base`, of the regular files that are not hidden; sorted."""
    labels = {path: path.removeprefix(base).lstrip("/") for path in sorted(found) if found[path]["type"] in REGULAR}
    return {path: label for path, label in labels.items() if not _is_hidden(label)}


def _is_hidden(label: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(label).parts)


def _of_split(folder: str, data: dict[str, str], split: str | None) -> dict[str, str]:
    """Files of one split: names may say train, test, validation. Held-out rows must not slip in unasked."""
    splits = {path: _split_in(label) for path, label in data.items()}
    known = sorted({name for name in splits.values() if name})
    if split is None and len(known) > 1:
        raise SettingsError(
            f"data.parameters.split must say which files to take of {folder}: its names say {', '.join(known)}"
        )
    if split is None:
        return data
    chosen = {path: label for path, label in data.items() if splits[path] == SPLIT_NAMES.get(split, split)}
    if not chosen:
        found = f"names say {', '.join(known)}" if known else "no name says a split"
        raise SettingsError(f"data.parameters.split must be one of {folder}: {found}; got {split!r}")
    return chosen


def _split_in(label: str) -> str | None:
    words = SPLIT_IN_NAME.findall(label.lower())
    return SPLIT_NAMES.get(words[-1], words[-1]) if words else None


def _of_one_kind(tree: Tree, labels: dict[str, str]) -> list[DataFile]:
    files = [data_file(tree.full(path), label) for path, label in labels.items()]
    kinds = {file.kind: file.label for file in files}
    if len(kinds) > 1:
        found = ", ".join(f"{label} ({kind})" for kind, label in kinds.items())
        raise ContractError(
            f"the files of {tree.given} must be of one kind, found {found}; choose with a glob, e.g. *.jsonl"
        )
    if all(file.is_empty for file in files):
        raise ContractError(f"{tree.given} must hold at least one row, found empty files only")
    return files


def _fixed_part(pattern: str) -> str:
    """The folder above the first wildcard."""
    match = GLOB.search(pattern)
    assert match, "a glob has a wildcard"
    return pattern[: match.start()].rpartition("/")[0]


def _near(tree: Tree) -> str:
    """The folder that is missing, or files of nearly that name."""
    folder = _fixed_part(tree.path) if GLOB.search(tree.path) else tree.path.rpartition("/")[0]
    with reaching(tree.given):
        if not tree.files.isdir(folder or "/"):
            start = "" if is_url(tree.given) else f" (relative paths start at {Path.cwd()})"
            return f"; its folder does not exist either{start}"
        names = sorted(entry["name"].rpartition("/")[2] for entry in tree.files.ls(folder or "/", detail=True))
    near = difflib.get_close_matches(tree.path.rpartition("/")[2], names, n=3)
    return f"; near: {', '.join(near)}" if near else ""
