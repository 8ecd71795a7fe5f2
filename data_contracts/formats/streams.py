"""Where a file's bytes come from: a local disk or whatever fsspec reaches, decompressed on the way.

A path is a local one or a URL (s3://, gs://, https://, memory://, ...). Errors say which file, and whether a retry can
help: what is absent or forbidden is SettingsError, what is cut off or damaged ContractError, the rest of what a remote
store may say StorageUnavailable.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import pyarrow as pa

from data_contracts.errors import ContractError, SettingsError, StorageUnavailable

BLOCK_BYTES = 1 << 20
URL = re.compile(r"^(?P<protocol>[A-Za-z][A-Za-z0-9_+.-]+)://")


def is_url(path: str) -> bool:
    """Whether fsspec reads it. file:// is a local path."""
    return URL.match(path) is not None and not path.startswith("file://")


def local_path(path: str) -> Path:
    return Path(path.removeprefix("file://")).expanduser()


def name_of(path: str) -> str:
    """The last part of a path, or of a URL without its query."""
    return (urlsplit(path).path if path.startswith(("http://", "https://")) else path).rstrip("/").rpartition("/")[2]


def filesystem_of(url: str) -> Any:
    """The fsspec file system of a URL. Raises SettingsError when its package is missing or its protocol unknown."""
    import fsspec

    match = URL.match(url)
    assert match, "asked for URLs only"
    protocol = match["protocol"].lower()
    try:
        return fsspec.filesystem(protocol)
    except ImportError as error:
        package = PACKAGES.get(protocol, f"that fsspec needs for {protocol}")
        raise SettingsError(f"{protocol}:// needs the package {package}: pip install {package} ({error})") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise SettingsError(f"the protocol of a URL must be one that fsspec knows ({known}); got {url}") from error


@contextmanager
def reaching(path: str) -> Iterator[None]:
    """Turns what a file system raises into errors that name the path."""
    try:
        yield
    except (ContractError, SettingsError, StorageUnavailable):
        raise
    except FileNotFoundError as error:
        raise SettingsError(f"data.source must exist, found no file {path}") from error
    except PermissionError as error:
        raise SettingsError(f"data.source must be readable: {path}: {error.strerror or error}") from error
    except OSError as error:
        raise StorageUnavailable(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        if not is_url(path):
            raise
        # Each store has exceptions of its own: no credentials, no route, throttled.
        if type(error).__name__ in NO_CREDENTIALS:
            raise SettingsError(f"reading {path} needs credentials, found none: {error}") from error
        raise StorageUnavailable(f"cannot read {path}: {type(error).__name__}: {error}") from error


def open_file(path: str, in_order: bool = False) -> BinaryIO:
    """A file's bytes. `in_order` does without seeking, which not every web server offers."""
    with reaching(path):
        if not is_url(path):
            return local_path(path).open("rb")
        options = {"block_size": 0} if in_order and path.startswith(("http://", "https://")) else {}
        return cast(BinaryIO, filesystem_of(path).open(path, "rb", **options))


def read_start(path: str) -> bytes:
    """A file's first block, without the read-ahead of an object store."""
    if not is_url(path) or path.startswith(("http://", "https://")):
        with open_file(path, in_order=True) as file, reaching(path):
            return next(_blocks(file), b"")
    with reaching(path):
        return bytes(filesystem_of(path).cat_file(path, start=0, end=BLOCK_BYTES))


def read_blocks(path: str, compression: str | None) -> Iterator[bytes]:
    """A file's bytes, decompressed, in blocks of at most BLOCK_BYTES. Raises ContractError when it ends too early."""
    with open_file(path, in_order=True) as file, reaching(path):
        if compression is None:
            yield from _blocks(file)
            return
        try:
            with DECOMPRESSORS[compression](file) as stream:
                yield from _blocks(stream)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the store's, not the decompressor's
                raise
            raise ContractError(f"{path} must be a whole {compression} file, found it damaged: {error}") from error


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Full blocks, though a stream from afar may give a little at a time."""
    block = b""
    while part := stream.read(BLOCK_BYTES - len(block)):
        block += part
        if len(block) == BLOCK_BYTES:
            yield block
            block = b""
    if block:
        yield block


def file_digest(path: str) -> str:
    """SHA-256 of a file's bytes as they are stored."""
    digest = hashlib.sha256()
    for block in read_blocks(path, None):
        digest.update(block)
    return digest.hexdigest()


def _open_gzip(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=file))


def _open_zstd(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))


def _open_bz2(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, bz2.BZ2File(file))


def _open_xz(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, lzma.LZMAFile(file))


DECOMPRESSORS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "gzip": _open_gzip,
    "zstd": _open_zstd,
    "bz2": _open_bz2,
    "xz": _open_xz,
}
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
# What to install for a protocol; those that come with fsspec or ours need nothing.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "hf": "huggingface-hub",
    "memory": "fsspec",
    "file": "fsspec",
}
