"""Who may import whom (the layers), and where each heavy dependency may appear."""

from __future__ import annotations

import ast

import pytest

from tests.house.sources import PACKAGES, REPOSITORY, Import, Source, imports_of, sources

# A layer's packages, and what it may import of ours. A dotted name stands for that module alone.
MAY_IMPORT = {
    "data_contracts": ("data_contracts",),
    "rft_core": (
        "rft_core",
        "data_contracts.schemas",
        "data_contracts.refs",
        "data_contracts.errors",
        "data_contracts.reasons",
        "data_contracts.endings",
    ),
    "tasks": ("tasks", "rft_core", "data_contracts"),
    "flows": ("flows", "tasks", "rft_core", "data_contracts"),
    "deployments": ("deployments", "flows", "tasks", "rft_core", "data_contracts"),
}
# Where a dependency may be imported at all, by prefix of the module's name.
ONLY_IN = {
    "prefect": ("flows", "tasks", "deployments"),
    "great_expectations": ("data_contracts",),
    "typer": ("flows",),
    "torch": ("rft_core", "tasks", "flows", "deployments"),
    "transformers": ("rft_core", "flows"),
    "peft": ("rft_core",),
}
# Each of these lives in one module, so that it can be left out and replaced.
ONE_MODULE = ("vllm", "deepspeed", "ray", "openai", "optuna")
# Imported inside functions only: they cost seconds, and the command line's help and checks do without.
LAZY = {
    "great_expectations": PACKAGES,
    "torch": (
        "data_contracts",
        "flows",
        "rft_core.config",
        "rft_core.recipes",
        "rft_core.hardware",
        "rft_core.setting_errors",
    ),
}


def _within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _offences(is_offence) -> list[str]:
    return [
        f"{source.path}:{found.line} {source.module} imports {found.names[-1]}"
        for source in sources()
        for found in imports_of(source)
        if is_offence(source, found)
    ]


def test_layers_import_downwards_only():
    def is_offence(source: Source, found: Import) -> bool:
        if found.top not in PACKAGES:
            return False
        allowed = MAY_IMPORT[source.module.partition(".")[0]]
        # `from data_contracts import refs` names a package first; what counts is each thing it brings.
        brought = found.names[1:] if found.names[0] in PACKAGES and found.names[1:] else found.names[:1]
        return not all(_within(name, allowed) for name in brought)

    assert _offences(is_offence) == []


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_dependency_stays_in_its_layer(package):
    assert _offences(lambda source, found: found.top == package and not _within(source.module, ONLY_IN[package])) == []


@pytest.mark.parametrize("package", sorted(LAZY))
def test_slow_dependency_is_imported_when_used(package):
    def is_offence(source: Source, found: Import) -> bool:
        return found.top == package and _within(source.module, LAZY[package]) and not found.is_lazy

    offences = [offence for offence in _offences(is_offence) if not _only_for_types(offence)]
    assert offences == []


def _only_for_types(offence: str) -> bool:
    """Whether the import at path:line stands under `if TYPE_CHECKING`: it costs nothing at run time."""
    path, _, line = offence.split(" ")[0].rpartition(":")
    source = next(source for source in sources() if str(source.path) == path)
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and node.lineno <= int(line) <= (node.end_lineno or 0)
        for node in ast.walk(source.tree)
    )


def test_triton_lives_in_its_kernels():
    def is_offence(source: Source, found: Import) -> bool:
        return found.top == "triton" and not source.path.stem.endswith("_triton")

    assert _offences(is_offence) == []


@pytest.mark.parametrize("package", ONE_MODULE)
def test_optional_dependency_lives_in_one_module(package):
    users = {source.module for source in sources() for found in imports_of(source) if found.top == package}
    assert len(users) <= 1, users


def test_tests_oracle_imports_nothing_of_ours():
    """The oracle would prove nothing if it called the code it judges."""
    oracle = [source for source in sources(("tests",)) if source.module.startswith("tests.oracle")]
    assert oracle
    offences = [
        f"{source.path}:{found.line}" for source in oracle for found in imports_of(source) if found.top in PACKAGES
    ]
    assert offences == []


def test_imports_are_seen(tmp_path):
    """The parser of imports finds what it must: lazy, relative, under TYPE_CHECKING."""
    text = "import a.b\nif TYPE_CHECKING:\n    from c import d\ndef f():\n    from ..x import y\n"
    source = Source(REPOSITORY.joinpath("p/q/r.py").relative_to(REPOSITORY), "p.q.r", text, ast.parse(text))
    assert [(found.names, found.is_lazy) for found in imports_of(source)] == [
        (("a.b",), False),
        (("c", "c.d"), False),
        (("p.x", "p.x.y"), True),
    ]
