"""Procedural sources of reasoning-gym: 106 generators, each with its own verifier.

A row's value is {prompt, answer, source_dataset, parameters, entry}. `entry` is the whole generated entry as
`schemas.to_plain` writes it, so that the reward stage can run the generator's verifier long after:

    create_dataset(source_dataset, **parameters).score_answer(text, from_plain(entry))

Rows count from 1; row r is entry r - 1 of the generator.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from data_contracts.errors import ContractError, SettingsError
from data_contracts.formats.chunks import Chunk, chunks_of
from data_contracts.refs import SourceRow, digest_of
from data_contracts.schemas import canonical_json, to_plain

DEFAULT_SIZE = 500
CHUNK_ROWS = 100  # generators may take a while for each row
COMPOSITE = "composite"
OWN_SETTINGS = {"size": "data.size", "seed": "data.seed"}


def chunks(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[Chunk]:
    """Generate rows one by one. Raises SettingsError for an unknown generator, parameter or value."""
    _create(name, parameters, size, seed)
    return chunks_of(_rows(name, parameters, size, seed), CHUNK_ROWS)


def digest(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> str:
    """Hash of the generator's name and version, its parameters, size and seed. Generates nothing."""
    _create(name, parameters, size, seed)
    return digest_of(
        {
            "generator": name,
            "version": importlib.metadata.version("reasoning-gym"),
            "parameters": parameters,
            "size": size or DEFAULT_SIZE,
            "seed": seed,
        }
    )


def notes(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> tuple[str, ...]:
    return ()


def _create(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise SettingsError(
            f"data.source must name a generator of reasoning-gym, found none named {name!r}"
            f"{_near(name, list(DATASETS))}"
        )
    accepted = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in OWN_SETTINGS]
    for parameter in parameters:
        if parameter in OWN_SETTINGS:
            raise SettingsError(f"data.parameters must not hold {parameter}: set {OWN_SETTINGS[parameter]} instead")
        if parameter not in accepted:
            raise SettingsError(
                f"data.parameters of {name} must be among {', '.join(accepted)}; "
                f"found {parameter!r}{_near(parameter, accepted)}"
            )
    values = {**parameters, "size": size or DEFAULT_SIZE, "seed": seed}
    if name == COMPOSITE:
        values["datasets"] = _parts(parameters)
    try:
        return create_dataset(name, **values)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(f"data.parameters do not suit {name}: {error or type(error).__name__}") from error


def _parts(parameters: dict[str, Any]) -> list[Any]:
    """The data sets that a composite draws from, from plain values."""
    from reasoning_gym.composite import DatasetSpec

    try:
        return [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parameters.get("datasets", [])]
    except TypeError as error:
        raise SettingsError(
            f"data.parameters.datasets of {COMPOSITE} must be a list of {{name, weight, config}}: {error}"
        ) from error


def _rows(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[SourceRow]:
    """Rows from a child process whose hash seed and global random states are fixed.

    Six generators (word_ladder, ransom_note, ...) walk sets of texts, list_functions draws from the global stream:
    in a process of its own they give the same rows every time. The child ends when its pipe closes.
    """
    source = f"reasoning_gym:{name}"
    request = json.dumps([name, parameters, size, seed])
    command = [sys.executable, "-c", "from data_contracts.formats.reasoning_gym import generate; generate()", request]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, env=environment)
        try:
            index = 0
            assert child.stdout is not None, "a pipe was asked for"
            for index, line in enumerate(child.stdout, start=1):
                raw = line.rstrip(b"\n")
                yield SourceRow(source, index, json.loads(raw), raw)
            if child.wait():
                complaints.seek(0)
                said = complaints.read().decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                raise ContractError(f"{source} must generate entry {index}; its process said: {said[0]}")
        finally:
            child.kill()
            child.communicate()


def generate() -> None:
    """What the child process does: write one row's value a line, as canonical JSON, on stdout."""
    import random

    import numpy

    name, parameters, size, seed = json.loads(sys.argv[1])
    generator = _create(name, parameters, size, seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    configs = (
        {part["name"]: part.get("config", {}) for part in parameters.get("datasets", [])} if name == COMPOSITE else {}
    )
    for index in range(len(generator)):
        entry = generator[index]
        dataset = entry["metadata"].get("source_dataset", name) if name == COMPOSITE else name
        value = {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "source_dataset": dataset,
            "parameters": configs.get(dataset, parameters),
            "entry": to_plain(entry),
        }
        sys.stdout.buffer.write(canonical_json(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _near(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return f"; near: {', '.join(near)}" if near else ""
