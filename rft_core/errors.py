"""Exceptions of the thinking part; `data_contracts.errors` holds the root and what concerns tables.

A malformed completion is data (reward 0 with a reason), a dead grader is transient, a wrong setting is fatal before
anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_contracts.errors import (
    ContractError,
    DamagedTable,
    DeletedTable,
    FatalError,
    LeaseLost,
    RftError,
    RunBusy,
    SettingsError,
    StorageUnavailable,
    TransientError,
)

if TYPE_CHECKING:
    import pyarrow as pa


class EngineUnavailable(TransientError):
    """A rollout engine cannot be reached or died."""


class WrongWeights(FatalError):
    """A rollout engine holds other weights than the policy's, and loading them again did not help."""


class CompilerFailed(TransientError):
    """The compiler behind torch.compile failed on code that torch could make: memory, disk, or its own fault."""


class GraderUnavailable(TransientError):
    """So many rewards could not be computed that the table would mislead."""


class ContentChanged(SettingsError):
    """Resuming a run under other content settings, data or model."""


class EngineForbidden(FatalError):
    """An offline run asked for generation."""


class RolloutsFailed(FatalError):
    """Not one rollout of a stage could be made: there is nothing to learn or measure from."""


class ModelUnreadable(FatalError):
    """A model folder is missing, incomplete or of an unknown kind."""


class RowsRejected(ContractError):
    """Too many source rows were rejected. `quarantine` holds those of the last block, `counts` what became of all."""

    def __init__(self, message: str, quarantine: pa.Table, counts: dict[str, int]) -> None:
        super().__init__(message)
        self.quarantine = quarantine
        self.counts = counts


class RewardFunctionError(FatalError):
    """A reward function raised, or returned the wrong number or kind of values."""


class CleaningFunctionError(FatalError):
    """A user's cleaning function raised, or gave what is neither a row nor null."""


class AlgorithmFunctionError(FatalError):
    """A user's advantage, surrogate or row raised, or gave what none of them may give."""


class ReplayMismatch(FatalError):
    """A replayed update did not reproduce its stored loss and gradient norm."""


class TrainingDiverged(FatalError):
    """Too many updates in a row had a non-finite loss or gradient."""


__all__ = [
    "AlgorithmFunctionError",
    "CleaningFunctionError",
    "ContentChanged",
    "ContractError",
    "DamagedTable",
    "DeletedTable",
    "EngineForbidden",
    "EngineUnavailable",
    "FatalError",
    "GraderUnavailable",
    "LeaseLost",
    "ModelUnreadable",
    "ReplayMismatch",
    "RewardFunctionError",
    "RftError",
    "RolloutsFailed",
    "RowsRejected",
    "RunBusy",
    "SettingsError",
    "StorageUnavailable",
    "TrainingDiverged",
    "TransientError",
    "WrongWeights",
]
