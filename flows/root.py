"""Where artifacts live: `--root`, else RFT_HOME, else ./.rft; never relative to a worker's directory."""

from __future__ import annotations

import os
from pathlib import Path

from data_contracts.errors import SettingsError


def artifact_root(given: str | None = None) -> Path:
    """The root that a command line means. Raises SettingsError for what is no folder."""
    root = Path(given or os.environ.get("RFT_HOME") or ".rft").expanduser().resolve()
    present = next(path for path in (root, *root.parents) if path.exists())
    if not present.is_dir():
        raise SettingsError(f"the artifact root (--root, else RFT_HOME) must be a folder, found a file at {present}")
    return root


def flow_root(given: str | None = None) -> Path:
    """The root of a flow, which may run in any folder. Raises SettingsError unless it is given as an absolute path."""
    named = given or os.environ.get("RFT_HOME")
    if named is None or not Path(named).is_absolute():
        raise SettingsError(
            f"a flow's root must be an absolute path, found {named or 'none'}: give the parameter root, or set "
            "RFT_HOME where its worker runs"
        )
    return Path(named).resolve()
