"""Loading a user's function, and the identity of its code: its file and all it imports from beside it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rft_core.errors import (
    AlgorithmFunctionError,
    CleaningFunctionError,
    FatalError,
    RewardFunctionError,
    SettingsError,
)
from rft_core.rewards.rows import shortened
from rft_core.rewards.user_state import USER_STATE

Purpose = Literal["reward", "cleaning", "algorithm"]  # what the function is for, which errors say

OWN_NAME = "rft_function_"  # begins the module name of a user's file, which then hides no other module
_LOADED: dict[Path, str] = {}  # digest of each user file when this process last loaded it


@dataclass(frozen=True)
class Plugin:
    """A user's function and what decides its behaviour: {relative file name: SHA-256} and the function's name."""

    function: Callable[..., Any]
    identity: dict[str, Any]


@dataclass(frozen=True)
class _Place:
    """Where a function lives. `root` is the folder that its imports may resolve in; `package` limits them to one."""

    purpose: Purpose
    module: str
    file: Path
    root: Path
    package: str | None
    function: str


def load_plugin(path: str, folder: Path | None, depends_on: list[str], purpose: Purpose = "reward") -> Plugin:
    """Load `FILE.py:function` or `module.function`; relative files start at `folder`, or the working directory, and
    modules may lie in `folder` too.

    The user's folder goes to the end of sys.path, so nothing of theirs hides a library. Imports that the code builds at
    run time are not seen: name such files in depends_on. Raises SettingsError for what is missing or can't be parsed,
    RewardFunctionError (of another purpose, the error of IMPORT_ERRORS) when importing raises.
    """
    base = (folder or Path.cwd()).resolve()
    place = _file_place(path, base, purpose) if ".py:" in path else _module_place(path, folder, purpose)
    _append_to_path(place.root)
    sources = _sources(place)
    _refuse_hidden(sources, place)
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in sources.items()}
    _forget_changed(sources, digests)
    module = _import(place, path)
    function = getattr(module, place.function, None)
    if not callable(function):
        known = sorted(
            n for n, v in vars(module).items() if isinstance(v, types.FunctionType) and not n.startswith("_")
        )
        raise SettingsError(
            f"{purpose} path must name a function, {place.file.name} has no function {place.function!r}; it has {known}"
        )
    identity = {
        "function": place.function,
        "sources": digests,
        "depends_on": [_bytes_digest(base / name, name) for name in depends_on],
    }
    return Plugin(function, identity)


def _file_place(path: str, base: Path, purpose: Purpose) -> _Place:
    name, _, function = path.rpartition(":")
    file = (base / name).resolve()
    if not file.is_file():
        raise SettingsError(f"{purpose} path must name a file, {file} does not exist")
    return _Place(purpose, f"{OWN_NAME}{file.stem}", file, file.parent, None, function)


def _module_place(path: str, folder: Path | None, purpose: Purpose) -> _Place:
    module, _, function = path.replace(":", ".").rpartition(".")
    if not module:
        raise SettingsError(f"{purpose} path must be module.function or FILE.py:function, got {path!r}")
    if folder is not None:
        _append_to_path(folder.resolve())
    importlib.invalidate_caches()
    with _importing(path, purpose):  # the packages around the module are
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise SettingsError(f"{purpose} path {path!r} must name a Python module that can be imported; {module!r} can't")
    file = Path(spec.origin).resolve()
    depth = module.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    package = module.partition(".")[0] if root.name in ("site-packages", "dist-packages") else None
    return _Place(purpose, module, file, root, package, function)


def _append_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _sources(place: _Place) -> dict[str, Path]:
    """The function's file and every module that it imports from beside it, recursively, by name relative to root."""
    found: dict[str, Path] = {}
    waiting = [place.file, *_files_of(place.module.split("."), place)]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(place.root).as_posix()
        if name in found:
            continue
        found[name] = file
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError) as error:
            raise SettingsError(f"{place.purpose} code {file} must be Python: {error}") from error
        for parts in _imports(tree, list(file.relative_to(place.root).parts[:-1])):
            waiting.extend(_files_of(parts, place))
    return dict(sorted(found.items()))


def _imports(tree: ast.AST, package: list[str]) -> list[list[str]]:
    """Dotted names, as parts from root, of all that a file imports, wherever in it. `package` is the file's folder."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            parts = parts + (node.module.split(".") if node.module else [])
            names += [[*parts, alias.name] for alias in node.names]  # the last may be a module or a name in one
    return names


def _files_of(parts: list[str], place: _Place) -> list[Path]:
    if parts[0] in sys.stdlib_module_names or (place.package and parts[0] != place.package):
        return []
    files = []
    for length in range(1, len(parts) + 1):
        stem = place.root.joinpath(*parts[:length])
        files += [file for file in (stem.with_name(stem.name + ".py"), stem / "__init__.py") if file.is_file()]
    return [file.resolve() for file in files if file.resolve().is_relative_to(place.root)]


def _refuse_hidden(sources: dict[str, Path], place: _Place) -> None:
    """A module beside the file that Python would find elsewhere: its digest would vouch for code that doesn't run."""
    importlib.invalidate_caches()
    for name, file in sources.items():
        if file == place.file and place.module.startswith(OWN_NAME):
            continue
        top = name.partition("/")[0].removesuffix(".py")
        spec = importlib.util.find_spec(top)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is not None and not origin.is_relative_to(place.root):
            raise SettingsError(
                f"{place.purpose} code imports {top!r} from beside it, but Python finds {origin} first; rename {file}"
            )


def _forget_changed(sources: dict[str, Path], digests: dict[str, str]) -> None:
    """After an edit, drop all modules of the plug-in from this process, since each may hold parts of another."""
    if any(_LOADED.get(file, digests[name]) != digests[name] for name, file in sources.items()):
        files = {str(file) for file in sources.values()}
        for module_name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in files:
                del sys.modules[module_name]
    _LOADED.update({file: digests[name] for name, file in sources.items()})


class _FreshSource(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now: a cached .pyc is trusted by its whole-second time, too coarse after an edit."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextmanager
def _importing(path: str, purpose: Purpose) -> Iterator[None]:
    """Around users' code that runs when it is imported. Raises the purpose's error for whatever it raises."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with USER_STATE.entered():
            yield
    except (Exception, SystemExit) as error:
        raise IMPORT_ERRORS[purpose](
            f"{purpose} code {path} must be importable, it raised {type(error).__name__}: {shortened(str(error))}"
        ) from error
    finally:
        sys.dont_write_bytecode = before


def _import(place: _Place, path: str) -> types.ModuleType:
    with _importing(path, place.purpose):
        if not place.module.startswith(OWN_NAME):
            return importlib.import_module(place.module)
        loader = _FreshSource(place.module, str(place.file))
        spec = importlib.util.spec_from_file_location(place.module, place.file, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[place.module] = module  # dataclasses and pickles look their module up
        loader.exec_module(module)
        return module


def _bytes_digest(file: Path, name: str) -> Any:
    """SHA-256 of a file, or of every file below a folder by relative name."""
    if file.is_dir():
        inside = sorted(part for part in file.rglob("*") if part.is_file())
        return {part.relative_to(file).as_posix(): _bytes_digest(part, name) for part in inside}
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"depends_on must name files that can be read: {name}: {error.strerror}") from error


IMPORT_ERRORS: dict[Purpose, type[FatalError]] = {
    "reward": RewardFunctionError,
    "cleaning": CleaningFunctionError,
    "algorithm": AlgorithmFunctionError,
}
