"""Where the bytes lie: a local folder, or an object store through fsspec. Nothing here knows what a table is.

`write` is atomic on both: locally a temporary name, fsync, rename and fsync of the folder; an object store shows an
object only when its upload ended.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from data_contracts.errors import DamagedTable, StorageUnavailable

CHUNK_BYTES = 1 << 20


class Files(Protocol):
    """Relative names below one root."""

    def write(self, name: str, data: bytes) -> None: ...
    def read(self, name: str) -> bytes: ...
    def open(self, name: str) -> BinaryIO:
        """For reading parts of a file."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it is not there."""

    def digest(self, name: str) -> str:
        """SHA-256 of a file, streamed."""

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; an absent folder has none."""

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is no fault."""

    def set_aside(self, folder: str, into: str) -> None:
        """Move a folder out of the way, keeping its bytes; one that is gone already is no fault."""

    def locate(self, name: str) -> str:
        """Where a person would look for it."""


def open_files(root: str) -> Files:
    """A root with a scheme (s3://, gs://, memory://) is an object store; anything else is a local folder."""
    if "://" in root and not root.startswith("file://"):
        return ObjectFiles(root)
    return LocalFiles(Path(root.removeprefix("file://")))


class LocalFiles:
    """Files in a POSIX folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, data: bytes) -> None:
        write_whole(self.root / name, data, os.replace)

    def read(self, name: str) -> bytes:
        path = self.root / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise storage_error(error, path, "read") from error

    def open(self, name: str) -> BinaryIO:
        path = self.root / name
        try:
            return open(path, "rb")
        except OSError as error:
            raise storage_error(error, path, "read") from error

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def digest(self, name: str) -> str:
        return file_digest(self.root / name)

    def names(self, folder: str) -> list[str]:
        path = self.root / folder
        if not path.is_dir():
            return []
        return sorted(entry.name for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))

    def remove(self, name: str) -> None:
        path = self.root / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, path, "delete") from error

    def set_aside(self, folder: str, into: str) -> None:
        target = self.root / into / f"{folder.replace('/', '-')}-{uuid.uuid4().hex[:8]}"
        if not (self.root / folder).exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(self.root / folder), str(target))

    def locate(self, name: str) -> str:
        return str(self.root / name)


class ObjectFiles:
    """Files in an object store."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.filesystem, self.base = fsspec.core.url_to_fs(url)
        self.url = url.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.base.rstrip('/')}/{name}"

    def write(self, name: str, data: bytes) -> None:
        try:
            self.filesystem.pipe_file(self._path(name), data)
        except OSError as error:
            raise storage_error(error, self.locate(name), "write") from error

    def read(self, name: str) -> bytes:
        try:
            return self.filesystem.cat_file(self._path(name))
        except OSError as error:
            raise storage_error(error, self.locate(name), "read") from error

    def open(self, name: str) -> BinaryIO:
        try:
            return cast(BinaryIO, self.filesystem.open(self._path(name)))
        except OSError as error:
            raise storage_error(error, self.locate(name), "read") from error

    def size(self, name: str) -> int | None:
        try:
            return self.filesystem.size(self._path(name))
        except FileNotFoundError:
            return None

    def digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with self.filesystem.open(self._path(name), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def names(self, folder: str) -> list[str]:
        try:
            entries = self.filesystem.ls(self._path(folder), detail=True, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")

    def remove(self, name: str) -> None:
        try:
            self.filesystem.rm_file(self._path(name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, self.locate(name), "delete") from error

    def set_aside(self, folder: str, into: str) -> None:
        if not self.filesystem.exists(self._path(folder)):
            return
        target = self._path(f"{into}/{folder.replace('/', '-')}-{uuid.uuid4().hex[:8]}")
        self.filesystem.mv(self._path(folder), target, recursive=True)

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"


def write_whole(path: Path, data: bytes, publish: Callable[[Path, Path], None]) -> None:
    """Write a file so that it is there whole and durably, or not at all. `publish` gives the temporary file its name.

    Raises FileExistsError where `publish` does, else StorageUnavailable.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        make_folder(path.parent)
    except OSError as error:  # a file in the folder's place is no file that exists already
        raise storage_error(error, path, "write") from error
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise storage_error(error, path, "write") from error
    finally:
        with suppress(OSError):  # where nothing can be written, there is nothing to remove
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each durable in its parent: a file in a folder that is lost is lost."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a local file, streamed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, needs: tuple[str, ...] = (), mend: str = "") -> dict[str, Any] | None:
    """The JSON object of a local file that holds the keys `needs`; None when there is no such file.

    Raises DamagedTable, which ends with `mend`.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value.keys() >= set(needs):
        wanted = f" with {', '.join(needs)}" if needs else ""
        raise DamagedTable(f"{path} must be a JSON object{wanted}, found {text[:40]!r}{mend and f': {mend}'}")
    return value


def storage_error(error: OSError, where: object, action: str) -> StorageUnavailable:
    """What the operating system said, as a transient error with the mend for the two common causes."""
    mends = {
        errno.ENOSPC: "the disk is full: free some space; what was committed before is safe",
        errno.EDQUOT: "the quota is used up: free some space; what was committed before is safe",
        errno.EACCES: "the folder is not writable for this user",
        errno.EROFS: "the file system is read-only",
    }
    mend = mends.get(error.errno or 0, error.strerror or str(error))
    return StorageUnavailable(f"cannot {action} {where}: {mend}")
