"""Data sets of the Hugging Face hub: `hub:ORG/NAME`, through `datasets`, streamed where it can be.

Parameters: `name` (the configuration), `split`, `revision` (branch, tag or commit). The identity is the commit that
they resolve to. `hub:` also takes a folder that `datasets` can load, written as a path; its identity is its files'
content. Code that comes with a data set is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_contracts.errors import ContractError, SettingsError, StorageUnavailable
from data_contracts.formats.chunks import ROWS, Chunk
from data_contracts.formats.columnar import batch_chunks
from data_contracts.formats.plain_values import check_columns
from data_contracts.formats.saved import choose_split
from data_contracts.formats.streams import file_digest
from data_contracts.refs import digest_of

PREFIX = "hub"
PARAMETERS = ("name", "split", "revision")


def chunks(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> Iterator[Chunk]:
    """Raises SettingsError for a data set, configuration, split or revision that is not there, StorageUnavailable where
    the hub can't be reached.
    """
    builder = _builder(name, parameters)
    with _asking(name):
        splits = _splits(builder, is_streamed=_is_streamed(name))
    split = choose_split(_label(name), list(splits), parameters.get("split"))
    return _chunks(name, splits[split])


def digest(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> str:
    """Hash of the name, configuration, split and commit."""
    builder = _builder(name, parameters)
    folder = _folder(name)
    identity = {
        "name": _label(name),
        "configuration": builder.config.name,
        "split": parameters.get("split"),
        "revision": _content(folder) if folder else builder.hash,
    }
    return digest_of(identity)


def notes(name: str, parameters: dict[str, Any], size: int | None, seed: int) -> tuple[str, ...]:
    return ()


def _folder(name: str) -> Path | None:
    """A folder of this machine, when the name is written as a path; `ORG/NAME` always is the hub's."""
    return Path(name).expanduser() if name.startswith(("/", "./", "../", "~")) else None


def _label(name: str) -> str:
    """What rows carry as their source: no path of this machine."""
    folder = _folder(name)
    return f"{PREFIX}:{folder.name if folder else name}"


def _content(folder: Path) -> list[list[str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [[path.relative_to(folder).as_posix(), file_digest(str(path))] for path in files]


def _builder(name: str, parameters: dict[str, Any]) -> Any:
    unknown = sorted(parameters.keys() - set(PARAMETERS))
    if unknown:
        raise SettingsError(
            f"data.parameters of {PREFIX}: must be among {', '.join(PARAMETERS)}; found {', '.join(unknown)}"
        )
    folder = _folder(name)
    if folder is not None and not folder.is_dir():
        raise SettingsError(f"data.source must exist, found no folder {folder}")
    from datasets import load_dataset_builder

    with _asking(name):
        return load_dataset_builder(
            str(folder) if folder else name, parameters.get("name"), revision=parameters.get("revision")
        )


def _is_streamed(name: str) -> bool:
    """Without the hub, what was downloaded before is there, as a whole."""
    from datasets import config

    return _folder(name) is not None or not config.HF_HUB_OFFLINE


def _splits(builder: Any, is_streamed: bool) -> dict[str, Any]:
    """Split -> data set that gives Arrow tables."""
    if is_streamed:
        return dict(builder.as_streaming_dataset().with_format("arrow"))
    builder.download_and_prepare()
    return dict(builder.as_dataset().with_format("arrow"))


def _chunks(name: str, rows: Any) -> Iterator[Chunk]:
    source = _label(name)
    first = 1
    schema = None
    with _asking(name):
        for table in rows.iter(batch_size=ROWS):
            if table.schema != schema:
                schema = table.schema
                check_columns(schema, source)
            for batch in table.combine_chunks().to_batches():
                for chunk in batch_chunks(source, first, batch):
                    first += chunk.length
                    yield chunk
    if first == 1:
        raise ContractError(f"{source} must hold at least one row, found none")


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """Turns what `datasets` raises into errors that name the data set and the mend."""
    import httpx
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    source = f"{PREFIX}:{name}"
    try:
        yield
    except DatasetNotFoundError as error:
        raise SettingsError(
            f"data.source must be a data set that exists and that you may read: {source}: {error}; a private or gated "
            "one needs `hf auth login`"
        ) from error
    except (DatasetsError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ContractError(
            f"datasets can't read {source}: {error}; its files may be read one by one instead: "
            f"hf://datasets/{name}/**/*.jsonl"
        ) from error
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        raise SettingsError(f"data.source and data.parameters must suit the data set {source}: {error}") from error
    except (OSError, httpx.HTTPError) as error:
        raise StorageUnavailable(f"cannot reach {source}: {error}") from error
