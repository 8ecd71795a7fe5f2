"""Global state while a user's code runs: what it sets holds for itself, and for nothing else in the process.

Generation and updates depend to the bit on torch's default type, threads and precision, and anything may depend on
numpy's error handling, warning filters, environment variables or the working directory. So the values that users' code
chose are put in place while it is imported or called, and ours again afterwards. Random streams are left alone:
nothing of ours draws from a global one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

VARIABLE = "environment variable "  # begins the names of those in a state
MIXED = "mixed"  # torch's answer is an error where precision was set by its older and its newer way


@dataclass(frozen=True)
class Setting:
    """One global value: how it is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


class UserState:
    """The values that users' code chose, kept between its calls. All of it shares one state, as in any process."""

    def __init__(self) -> None:
        self._theirs: dict[str, Any] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Their values inside, ours afterwards. What they import for the first time keeps its own defaults."""
        ours = _state()
        with warnings.catch_warnings():  # makes Python see both changes of the filters
            _put(self._theirs)
            try:
                yield
            finally:
                now = _state()
                kept = {name for name in ours.keys() | now.keys() if name in ours or name.startswith(VARIABLE)}
                self._theirs = {name: now.get(name) for name in kept if now.get(name) != ours.get(name)}
                _put({name: ours.get(name) for name in self._theirs})


def _state() -> dict[str, Any]:
    """Every value by name; torch's only where it is loaded, since its import costs seconds."""
    settings = SETTINGS | (TORCH_SETTINGS if "torch" in sys.modules else {})
    variables = {f"{VARIABLE}{name}": value for name, value in os.environ.items()}
    return {name: setting.read() for name, setting in settings.items()} | variables


def _put(state: dict[str, Any]) -> None:
    settings = SETTINGS | TORCH_SETTINGS
    for name, value in state.items():
        if not name.startswith(VARIABLE):
            settings[name].write(value)
        elif value is None:
            os.environ.pop(name.removeprefix(VARIABLE), None)
        else:
            os.environ[name.removeprefix(VARIABLE)] = value


def _torch() -> Any:
    return sys.modules["torch"]


def _read_precision() -> str:
    try:
        return str(_torch().get_float32_matmul_precision())
    except RuntimeError:
        return MIXED


def _write_precision(precision: str) -> None:
    if precision != MIXED:
        _torch().set_float32_matmul_precision(precision)


def _write_device(device: Any) -> None:
    """None, where nothing was chosen: any other value makes each call of torch slower."""
    _torch().set_default_device(None if device.type == "cpu" else device)


def _autocast(device: str) -> Setting:
    return Setting(
        lambda: _torch().is_autocast_enabled(device), lambda is_on: _torch().set_autocast_enabled(device, is_on)
    )


def _write_filters(filters: tuple[Any, ...]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


def _read_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


def _write_folder(folder: str | None) -> None:
    with contextlib.suppress(OSError):  # gone since: nothing of ours depends on it
        os.chdir(folder or os.sep)


SETTINGS = {
    "numpy errors": Setting(np.geterr, lambda errors: np.seterr(**errors)),
    "warning filters": Setting(lambda: tuple(warnings.filters), _write_filters),
    "working directory": Setting(_read_folder, _write_folder),
}
TORCH_SETTINGS = {
    "default dtype": Setting(lambda: _torch().get_default_dtype(), lambda dtype: _torch().set_default_dtype(dtype)),
    "default device": Setting(lambda: _torch().get_default_device(), _write_device),
    "threads": Setting(lambda: _torch().get_num_threads(), lambda count: _torch().set_num_threads(count)),
    "gradients": Setting(lambda: _torch().is_grad_enabled(), lambda on: _torch().set_grad_enabled(on)),
    "float32 precision": Setting(_read_precision, _write_precision),
    "deterministic": Setting(
        lambda: _torch().get_deterministic_debug_mode(), lambda mode: _torch().set_deterministic_debug_mode(mode)
    ),
    "autocast on cpu": _autocast("cpu"),
    "autocast on cuda": _autocast("cuda"),
}
USER_STATE = UserState()
