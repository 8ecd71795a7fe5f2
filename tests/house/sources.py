"""The repository's Python files as house tests see them: parsed once."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGES = ("data_contracts", "rft_core", "tasks", "flows", "deployments")


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name, e.g. `rft_core.rewards.numeric`."""

    path: Path
    module: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Import:
    """`names` are the dotted modules an import may bind: for `from a.b import c` both a.b and a.b.c."""

    line: int
    names: tuple[str, ...]
    is_lazy: bool

    @property
    def top(self) -> str:
        return self.names[0].partition(".")[0]


@functools.cache
def sources(folders: tuple[str, ...] = PACKAGES) -> tuple[Source, ...]:
    paths = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return tuple(_parse(path) for path in paths)


def _parse(path: Path) -> Source:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(REPOSITORY), module, text, ast.parse(text, str(path)))


@functools.cache
def imports_of(source: Source) -> tuple[Import, ...]:
    """All imports, also those inside functions (lazy) and under TYPE_CHECKING; relative ones made absolute."""
    lazy = {
        id(inner)
        for function in ast.walk(source.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, (alias.name,), id(node) in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            names = (base, *(f"{base}.{alias.name}" for alias in node.names))
            found.append(Import(node.lineno, names, id(node) in lazy))
    return tuple(found)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)
