"""A user's own advantage, surrogate, or whole row of ALGORITHMS: loading, identity, and checks of what they give.

    def advantage(credits: Credits, settings: AlgorithmSettings) -> np.ndarray    # float64[N]
    def surrogate(tokens: Tokens, term: Term) -> Tensor                           # float[T], to be minimised
    def row() -> Algorithm                                                        # its parts by name, or functions

An advantage with the attribute `compares_groups = True` is a group estimator: small groups and groups without signal
get the reasons that those have. A surrogate with `is_likelihood = True` has no ratio in its gradient, so an off-policy
weight starts from the current policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rft_core.errors import AlgorithmFunctionError, SettingsError
from rft_core.rewards.plugin import Plugin, load_plugin
from rft_core.rewards.rows import shortened
from rft_core.rewards.user_state import USER_STATE
from rft_core.terms import Algorithm, Term, UserParts

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings

ATTRIBUTES = ("compares_groups", "is_likelihood")


def user_parts(settings: AlgorithmSettings, folder: Path | None = None) -> UserParts:
    """Loads the user's code. Raises SettingsError for what cannot be found or is no row, AlgorithmFunctionError when
    its import or the row's function raises."""
    plugins = {name: load_plugin(path, folder, [], "algorithm") for name, path in settings.paths().items()}
    row = _row(plugins["path"], settings.path or "") if "path" in plugins else None
    return UserParts(
        row=row,
        advantage=_advantage(plugins["advantage_path"]) if "advantage_path" in plugins else None,
        surrogate=_surrogate(plugins["surrogate_path"]) if "surrogate_path" in plugins else None,
        identity={name: plugin.identity for name, plugin in plugins.items()},
    )


def algorithm_code(settings: AlgorithmSettings) -> dict[str, Any]:
    """Identity of the user's code in an algorithm; empty without any."""
    return user_parts(settings).identity if settings.paths() else {}


def _row(plugin: Plugin, path: str) -> Algorithm:
    row = _called(plugin.function, path)
    if not isinstance(row, Algorithm):
        raise SettingsError(f"algorithm.path must name a function that gives an Algorithm, {path} gave {_kind(row)}")
    if not row.terms or not all(isinstance(term, Term) for term in row.terms):
        raise SettingsError(f"the row of {path} must have terms, each a Term, got {shortened(repr(row.terms), 80)}")
    _refuse_unknown_parts(row, path)
    terms = tuple(
        replace(term, surrogate=checked_surrogate(term.surrogate)) if callable(term.surrogate) else term
        for term in row.terms
    )
    advantage = checked_advantage(row.advantage) if callable(row.advantage) else row.advantage
    return replace(row, name="custom", terms=terms, advantage=advantage)


def _refuse_unknown_parts(row: Algorithm, path: str) -> None:
    from rft_core.advantages import ADVANTAGES
    from rft_core.gates import GATES, REGULARIZER_GATES, STEP_GATES
    from rft_core.losses import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LEVELS, ROW_KINDS
    from rft_core.surrogates import REGULARIZERS, SURROGATES

    tables: dict[str, Any] = {
        "rows": ROW_KINDS,
        "anchor": ("old", "behaviour"),
        "level": LEVELS,
        "gate": {**GATES, **STEP_GATES},
        "surrogate": SURROGATES,
        "regularizer": REGULARIZERS,
        "regularizer_gate": {"none": None, **REGULARIZER_GATES},
        "aggregation": AGGREGATIONS,
    }
    chosen = [(slot, getattr(term, slot), table) for term in row.terms for slot, table in tables.items()]
    chosen += [
        ("advantage", row.advantage, ADVANTAGES),
        ("kl.estimator", row.kl.estimator, KL_ESTIMATORS),
        ("correction.kind", row.correction.kind, CORRECTIONS),
    ]
    for slot, part, table in chosen:
        if not callable(part) and part not in table:
            raise SettingsError(f"{slot} of the row of {path} must be one of {sorted(table)}, got {part!r}")


def _advantage(plugin: Plugin) -> Callable[..., Any]:
    return checked_advantage(plugin.function)


def _surrogate(plugin: Plugin) -> Callable[..., Any]:
    return checked_surrogate(plugin.function)


def checked_advantage(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on copies of the credits; gives float64[N]. Raises AlgorithmFunctionError for whatever is wrong."""
    name = function.__name__

    def advantage(credits: Any, settings: AlgorithmSettings) -> np.ndarray:
        copies = {part.name: getattr(credits, part.name) for part in fields(credits)}
        copies = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in copies.items()}
        found = _called(function, name, replace(credits, **copies), settings)
        size = len(credits.reward_N)
        try:
            values = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise AlgorithmFunctionError(f"advantage {name} must give numbers, got {_kind(found)}: {error}") from error
        if values.shape != (size,):
            raise AlgorithmFunctionError(f"advantage {name} must give {size} values, got shape {values.shape}")
        wild = np.flatnonzero(credits.is_counted_N & ~np.isfinite(values))
        if wild.size:
            raise AlgorithmFunctionError(f"advantage {name} must be finite, rollout {wild[0]} got {values[wild[0]]}")
        return np.where(credits.is_counted_N, values, 0.0)

    return _like(function, advantage)


def checked_surrogate(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its result's shape checked. Raises AlgorithmFunctionError for whatever is wrong."""
    name = function.__name__

    def surrogate(tokens: Any, term: Term) -> Any:
        found = _called(function, name, tokens, term)
        wanted = tuple(tokens.logprobs_T.shape)
        if getattr(found, "shape", None) != wanted or not getattr(found, "is_floating_point", bool)():
            raise AlgorithmFunctionError(
                f"surrogate {name} must give a floating tensor of shape {wanted}, got {_kind(found)} of shape "
                f"{tuple(getattr(found, 'shape', ()))}"
            )
        return found

    return _like(function, surrogate)


def _like(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    checked.__name__ = function.__name__
    for name in ATTRIBUTES:
        setattr(checked, name, bool(getattr(function, name, False)))
    return checked


def _called(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    try:
        with USER_STATE.entered():
            return function(*arguments)
    except (Exception, SystemExit) as error:
        raise AlgorithmFunctionError(
            f"algorithm function {name} raised {type(error).__name__}: {shortened(str(error))}"
        ) from error


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
