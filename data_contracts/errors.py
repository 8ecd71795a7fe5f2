"""The root of the exception tree, and what can go wrong with tables. `rft_core.errors` carries the rest.

Whether a retry can help is the exception's type. Messages say what must hold, what was found (file, row, column,
value), and how to mend it.
"""

from __future__ import annotations


class RftError(Exception):
    """Every error that we raise on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class TransientError(RftError):
    """A retry can help: an engine that is down, a busy judge, storage that hiccups."""


class FatalError(RftError):
    """A retry gives the same result."""


class StorageUnavailable(TransientError):
    """A read or write failed in a way that may pass (full disk, network)."""


class SettingsError(FatalError):
    """A recipe, override, path or argument is wrong."""

    exit_code = 2


class ContractError(FatalError):
    """Data does not meet its record's contract."""

    exit_code = 3


class DamagedTable(FatalError):
    """A committed file is missing, truncated or altered."""


class DeletedTable(FatalError):
    """A table whose data retention deleted; its manifest says when, by which rule, and keeps its lineage."""


class RunBusy(FatalError):
    """Another live process holds the run."""


class LeaseLost(FatalError):
    """Another process took the run over; this one must not write any more."""
