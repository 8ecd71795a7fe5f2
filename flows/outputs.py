"""Files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from data_contracts.endings import COMPRESSIONS, KINDS
from rft_core.errors import SettingsError


def refuse_output(option: str, out: Path | None, source: str, endings: tuple[str, ...]) -> None:
    """Raise SettingsError, before anything is done, where the file can't be written, is the one that is read, or has a
    name that says it is of another kind than those of `endings`."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise SettingsError(f"{option} must lie in a folder that exists, found no {out.absolute().parent}")
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise SettingsError(f"{option} must be another file than the one that is read, got {out} for both")
    ending = out.suffix.lower()
    if ending in {*KINDS, *COMPRESSIONS} and ending not in endings:
        raise SettingsError(f"{option} must end in {' or '.join(endings)}, got {out}")
