"""The only Parquet input and output: tables found by what decides their content, committed once, checked when read.

    store/<record>/<key>/part-00000.parquet    a block of rows
                         part-00000.json       its rows, bytes and SHA-256: the block is committed
                         manifest.json         all blocks, inputs, settings, provenance: the table is committed

A table without a manifest does not exist; its committed blocks are reused by the writer that continues it. Sizes are
checked at each reuse, digests at the first read in a process. A deleted table keeps its manifest with a tombstone in
it; who makes it again must make the same bytes.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.errors import ContractError, DamagedTable, DeletedTable, FatalError, StorageUnavailable
from data_contracts.files import open_files
from data_contracts.refs import TableRef
from data_contracts.schemas import RECORDS
from data_contracts.tombstones import Tombstone

# Bounded row groups keep nested columns readable by every reader (larger ones hit Arrow's chunked-nested limit).
ROW_GROUP_ROWS = 16_384
THREADED_BYTES = 8 << 20  # below, starting threads costs more than they save
MANIFEST = "manifest.json"
PART_KEYS = {"name", "rows", "bytes", "sha256"}
MANIFEST_KEYS = {"schema_version", "digest", "rows", "parts", "provenance"}
MEND = "delete the table's folder and run the same command again, which makes it again"


class Store:
    """Tables below `<root>/store`; the root is a local folder or an fsspec URL."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files = open_files(root)
        self._verified: set[str] = set()

    def find(self, record: str, key: str) -> TableRef | None:
        """The committed table of a key; None also for one that was deleted. Raises DamagedTable when its files do not
        have their sizes.
        """
        manifest = self._manifest_if_any(record, key)
        if manifest is None or Tombstone.of(manifest) is not None:
            return None
        ref = TableRef(record, key, manifest["digest"], manifest["rows"])
        self.check(ref)
        return ref

    def named(self, record: str, key: str) -> TableRef | None:
        """The ref of a key that was ever committed, whether its data is there or not."""
        manifest = self._manifest_if_any(record, key)
        return TableRef(record, key, manifest["digest"], manifest["rows"]) if manifest else None

    def tombstone(self, record: str, key: str) -> Tombstone | None:
        """When and why a table was deleted; None when it was not."""
        return Tombstone.of(self._manifest_if_any(record, key) or {})

    def manifest(self, ref: TableRef) -> dict[str, Any]:
        """Rows, parts with sizes and digests, inputs, settings and provenance of a committed table."""
        manifest = self._manifest(ref.record, ref.key)
        if manifest["digest"] != ref.digest:
            raise DamagedTable(
                f"{self.files.locate(_folder(ref.record, ref.key))} must have digest {ref.digest[:12]}, "
                f"found {manifest['digest'][:12]}: it was replaced; {MEND}"
            )
        return manifest

    def check(self, ref: TableRef) -> None:
        """Raise DamagedTable unless every file of the table is there with its size, DeletedTable after its deletion."""
        folder = _folder(ref.record, ref.key)
        for part in self._parts(ref):
            self._check_size(f"{folder}/{part['name']}", part)

    def read(self, ref: TableRef, columns: list[str] | None = None) -> pa.Table:
        """The rows, in the record's exact schema (or a subset of its columns). Raises DeletedTable, DamagedTable."""
        blocks = list(self.read_blocks(ref, columns))
        return pa.concat_tables(blocks) if blocks else _schema(ref.record, columns).empty_table()

    def read_blocks(self, ref: TableRef, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows block by block, as they were committed."""
        folder, schema = _folder(ref.record, ref.key), _schema(ref.record, columns)
        for part in self._parts(ref):
            yield self._read_part(f"{folder}/{part['name']}", part, columns).cast(schema)

    def take(self, ref: TableRef, indices: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """The rows at these indices, in that order. Reads only the row groups that hold them, one at a time."""
        if ((indices < 0) | (indices >= ref.rows)).any():
            raise ContractError(f"rows of {ref.name} must be 0..{ref.rows - 1}, got {indices.min()}..{indices.max()}")
        order = np.argsort(indices, kind="stable")
        rows, first, schema = indices[order], 0, _schema(ref.record, columns)
        found = [schema.empty_table()]
        for part in self.manifest(ref)["parts"]:
            inside = _within(rows, first, part["rows"])
            if len(inside):
                name = f"{_folder(ref.record, ref.key)}/{part['name']}"
                found += [taken.cast(schema) for taken in self._take_from_part(name, part, inside, columns)]
            first += part["rows"]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_tables(found).take(pa.array(back)).combine_chunks()

    def write(
        self, record: str, key: str, table: pa.Table, provenance: dict[str, Any], began: float | None = None
    ) -> TableRef:
        """Commit a table in one block. `began` as in `writer`."""
        writer = self.writer(record, key, provenance, began)
        writer.commit(0, table)
        return writer.close()

    def writer(self, record: str, key: str, provenance: dict[str, Any], began: float | None = None) -> TableWriter:
        """Begin a table, or continue one that lacks its manifest. `began` is when its making did, by the monotonic
        clock; null is now. The manifest's `seconds` count from there, in the process that ended the table.
        """
        return TableWriter(self, record, key, provenance, began)

    def num_bytes(self, ref: TableRef) -> int:
        """Bytes of the table's data files, by its manifest."""
        return sum(part["bytes"] for part in self.manifest(ref)["parts"])

    def delete(self, ref: TableRef, tombstone: Tombstone) -> None:
        """Delete the data and keep the manifest. The tombstone comes first: after a crash the table counts as deleted,
        and deleting it again removes what was left over.
        """
        folder = _folder(ref.record, ref.key)
        manifest = self.manifest(ref)
        tombstone = Tombstone.of(manifest) or tombstone
        if tombstone.is_swept:  # what lies there now is of who makes it again
            return
        self._write_manifest(folder, tombstone.put_on(manifest))
        for name in self.files.names(folder):
            if name != MANIFEST:
                self.files.remove(f"{folder}/{name}")
        self._write_manifest(folder, replace(tombstone, is_swept=True).put_on(manifest))
        self._verified -= {f"{folder}/{part['name']}" for part in manifest["parts"]}

    def set_aside(self, record: str, key: str) -> None:
        """Move a damaged table out of the way so that it can be made again; its bytes are kept in `damaged/`."""
        self.files.set_aside(_folder(record, key), "damaged")

    def locate(self, ref: TableRef) -> str:
        """Where a person would look for the table."""
        return self.files.locate(_folder(ref.record, ref.key))

    def keys(self, record: str) -> list[str]:
        """Keys of the committed tables of a record, deleted ones too (local stores)."""
        folder = Path(self.root) / "store" / record
        return sorted(entry.parent.name for entry in folder.glob(f"*/{MANIFEST}"))

    def _parts(self, ref: TableRef) -> list[dict[str, Any]]:
        manifest = self.manifest(ref)
        tombstone = Tombstone.of(manifest)
        if tombstone is not None:
            what = f"{ref.record}/{ref.key[:12]}"
            raise DeletedTable(f"{tombstone.sentence(what)}; to make it again: {tombstone.mend(self.root)}")
        return list(manifest["parts"])

    def _write_manifest(self, folder: str, manifest: dict[str, Any]) -> None:
        self.files.write(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=1, sort_keys=True).encode())

    def _manifest_if_any(self, record: str, key: str) -> dict[str, Any] | None:
        is_there = self.files.size(f"{_folder(record, key)}/{MANIFEST}") is not None
        return self._manifest(record, key) if is_there else None

    def _manifest(self, record: str, key: str) -> dict[str, Any]:
        name = f"{_folder(record, key)}/{MANIFEST}"
        if self.files.size(name) is None:
            raise DamagedTable(f"{self.files.locate(name)} must exist, found nothing: {MEND}")
        manifest = _parse(self.files.read(name), self.files.locate(name), MANIFEST_KEYS)
        expected = RECORDS[record].version
        if manifest["schema_version"] != expected:
            raise ContractError(
                f"{self.files.locate(name)} must hold {record} version {expected}, found version "
                f"{manifest['schema_version']}: re-run from this stage, or use the release that wrote it"
            )
        return manifest

    def _read_part(self, name: str, part: dict[str, Any], columns: list[str] | None) -> pa.Table:
        self._verify(name, part)
        use_threads = part["bytes"] > THREADED_BYTES
        if columns is None:
            return pq.read_table(pa.BufferReader(self.files.read(name)), use_threads=use_threads)
        with self.files.open(name) as file:
            return pq.read_table(file, columns=columns, use_threads=use_threads)

    def _take_from_part(
        self, name: str, part: dict[str, Any], rows: np.ndarray, columns: list[str] | None
    ) -> Iterator[pa.Table]:
        """The rows of one file, which ascend."""
        self._verify(name, part)
        with self.files.open(name) as stream, pq.ParquetFile(stream) as file:
            first = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                inside = _within(rows, first, num_rows)
                if len(inside):
                    held = file.read_row_group(group, columns, use_threads=part["bytes"] > THREADED_BYTES)
                    yield held.take(pa.array(inside))
                first += num_rows

    def _verify(self, name: str, part: dict[str, Any]) -> None:
        if name not in self._verified:
            self._check_digest(name, part)
            self._verified.add(name)

    def _check_size(self, name: str, part: dict[str, Any]) -> None:
        size = self.files.size(name)
        if size != part["bytes"]:
            found = "nothing" if size is None else f"{size} bytes"
            raise DamagedTable(f"{self.files.locate(name)} must have {part['bytes']} bytes, found {found}: {MEND}")

    def _check_digest(self, name: str, part: dict[str, Any]) -> None:
        self._check_size(name, part)
        digest = self.files.digest(name)
        if digest != part["sha256"]:
            raise DamagedTable(
                f"{self.files.locate(name)} must have SHA-256 {part['sha256'][:12]}, found {digest[:12]}: "
                f"its bytes were altered; {MEND}"
            )


class TableWriter:
    """Commits a table block by block. Blocks of an interrupted writer are found again in `committed`.

    A deleted table is made again block by block as it was: another block is refused before it is written.
    """

    def __init__(
        self, store: Store, record: str, key: str, provenance: dict[str, Any], began: float | None = None
    ) -> None:
        self._began = time.monotonic() if began is None else began
        self._store = store
        self.record = RECORDS[record]
        self.key = key
        self._provenance = provenance
        self._parts: dict[int, dict[str, Any]] = {}
        self._deleted = self._claim()
        folder = _folder(record, key)
        for name in store.files.names(folder):
            if not (name.startswith("part-") and name.endswith(".json")):
                continue
            part = _parse(store.files.read(f"{folder}/{name}"), store.files.locate(f"{folder}/{name}"), PART_KEYS)
            if store.files.size(f"{folder}/{part['name']}") == part["bytes"]:
                self._parts[int(name[5:-5])] = part

    def _claim(self) -> dict[str, Any] | None:
        """The manifest of a deleted table, marked so that no pruning sweeps the blocks that come; else None."""
        folder = _folder(self.record.name, self.key)
        tombstone = self._store.tombstone(self.record.name, self.key)
        if tombstone is None:
            return None
        manifest = self._store._manifest(self.record.name, self.key)
        if not tombstone.is_swept:
            self._store._write_manifest(folder, replace(tombstone, is_swept=True).put_on(manifest))
        return manifest

    @property
    def committed(self) -> list[int]:
        """Indices of the blocks that need not be made again."""
        return sorted(self._parts)

    def commit(self, index: int, table: pa.Table) -> None:
        """Make a block durable. Its schema must be the record's, to the metadata."""
        if not table.schema.equals(self.record.schema, check_metadata=True):
            raise ContractError(
                f"a block of {self.record.name} must have the record's schema, found "
                f"{_first_difference(self.record.schema, table.schema)}"
            )
        data = _parquet_bytes(table)
        part = {
            "name": f"part-{index:05d}.parquet",
            "rows": table.num_rows,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        self._check_made_again(index, part)
        folder = _folder(self.record.name, self.key)
        self._store.files.write(f"{folder}/{part['name']}", data)
        self._store.files.write(f"{folder}/part-{index:05d}.json", json.dumps(part).encode())
        self._parts[index] = part

    def close(self) -> TableRef:
        """Write the manifest: from now on the table exists."""
        if self.committed != list(range(len(self._parts))):
            raise ContractError(f"blocks of {self.record.name}/{self.key} must be 0..n-1, found {self.committed}")
        parts = [self._parts[index] for index in self.committed]
        self._check_complete_again(parts)
        digest = hashlib.sha256("".join(part["sha256"] for part in parts).encode()).hexdigest()
        rows = sum(part["rows"] for part in parts)
        manifest = {
            "record": self.record.name,
            "schema_version": self.record.version,
            "key": self.key,
            "digest": digest,
            "rows": rows,
            "parts": parts,
            "provenance": self._provenance,
            "seconds": round(time.monotonic() - self._began, 3),
            "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._store._write_manifest(_folder(self.record.name, self.key), manifest)
        return TableRef(self.record.name, self.key, digest, rows)

    def _check_made_again(self, index: int, part: dict[str, Any]) -> None:
        """A block of a deleted table must be what it was: ledgers name its digest."""
        if self._deleted is None:
            return
        before = self._deleted["parts"][index]["sha256"] if index < len(self._deleted["parts"]) else None
        if part["sha256"] != before:
            raise FatalError(
                f"block {index} of {self.record.name}/{self.key} must be what it was before its deletion, SHA-256 "
                f"{before and before[:12]}, found {part['sha256'][:12]}{_what_differs(self._deleted, self._provenance)}"
                f": it is made again where it was made, or given up by deleting "
                f"{self._store.files.locate(_folder(self.record.name, self.key))}"
            )

    def _check_complete_again(self, parts: list[dict[str, Any]]) -> None:
        """Before a tombstone is taken off: all its blocks, each there with its size whatever was swept meanwhile."""
        if self._deleted is None:
            return
        if len(parts) != len(self._deleted["parts"]):
            raise FatalError(
                f"{self.record.name}/{self.key} must have {len(self._deleted['parts'])} blocks as before its deletion, "
                f"found {len(parts)}"
            )
        for part in parts:
            name = f"{_folder(self.record.name, self.key)}/{part['name']}"
            if self._store.files.size(name) != part["bytes"]:
                raise StorageUnavailable(f"{self._store.files.locate(name)} was deleted while its table was made again")


def _folder(record: str, key: str) -> str:
    return f"store/{record}/{key}"


def _schema(record: str, columns: list[str] | None) -> pa.Schema:
    schema = RECORDS[record].schema
    if columns is None:
        return schema
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def _within(rows: np.ndarray, first: int, count: int) -> np.ndarray:
    """Those of ascending rows that are among the `count` rows from `first`, counted from there."""
    return rows[np.searchsorted(rows, first) : np.searchsorted(rows, first + count)] - first


def _parse(data: bytes, where: str, needs: set[str]) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value.keys() >= needs:
        raise DamagedTable(f"{where} must be a JSON object with {sorted(needs)}, found {data[:40]!r}: {MEND}")
    return value


def _what_differs(before: dict[str, Any], provenance: dict[str, Any]) -> str:
    """Where a table was made and where it is made again, as far as the fingerprints differ."""
    old, new = before["provenance"].get("fingerprint", {}), provenance.get("fingerprint", {})
    differences = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    return f" ({', '.join(differences)})" if differences else ""


def _parquet_bytes(table: pa.Table) -> bytes:
    """Deterministic bytes: equal tables give equal files under one pyarrow version."""
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", row_group_size=ROW_GROUP_ROWS, store_schema=True)
    return sink.getvalue()


def _first_difference(expected: pa.Schema, found: pa.Schema) -> str:
    for name in expected.names:
        if name not in found.names:
            return f"no column {name}"
        if not expected.field(name).equals(found.field(name), check_metadata=True):
            return f"column {name}: {found.field(name)} instead of {expected.field(name)} (or other metadata)"
    extra = [name for name in found.names if name not in expected.names]
    return f"extra column {extra[0]}" if extra else "other column order or schema metadata"
