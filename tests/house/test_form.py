"""Sizes, names, and what no file may do."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter

import pytest

from tests.house.sources import REPOSITORY, Source, sources

FILE_LINES = 400
FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# Modules whose loading runs code from a file, and calls that run text.
CODE_FROM_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
RUNS_TEXT = {"eval", "exec", "compile"}
BROAD = {"Exception", "BaseException"}
# Where code that is not ours may raise anything, and what it raised is kept as data. Each with the number of handlers.
FOREIGN_CODE = {
    "rft_core/rewards/custom.py": 1,  # a user's function: its values' repr may raise
    "rft_core/rewards/user_calls.py": 1,  # an error that crosses to the process that asked
    "tasks/beside.py": 1,  # an error that crosses a thread
    "rft_core/rewards/event_loop.py": 1,  # an error that crosses a thread
    "rft_core/rewards/verifier.py": 1,  # a data set's own verifier, in a process of its own: the error is the reason
    # In the sandbox: tests, the program, and what either passes to the other, may raise anything.
    "rft_core/rewards/sandbox/inside/asserts.py": 1,
    "rft_core/rewards/sandbox/inside/calls.py": 1,
    "rft_core/rewards/sandbox/inside/checker.py": 2,
    "rft_core/rewards/sandbox/inside/peer.py": 2,
}
ROOT = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "data_contracts",
    "deployments",
    "flows",
    "pyproject.toml",
    "rft_core",
    "tasks",
    "tests",
}

ALL = (*sources(), *sources(("tests",)))


def _ids(source: Source) -> str:
    return str(source.path)


def test_files_stay_within_their_budget():
    lengths = {str(source.path): source.text.count("\n") for source in ALL}
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_functions_stay_within_their_budget():
    too_long = {
        f"{source.path}:{node.name}": node.end_lineno - node.lineno + 1
        for source in ALL
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    }
    assert too_long == {}


def test_names_say_what_is_inside():
    names = {part for source in ALL for part in source.path.with_suffix("").parts}
    assert names & FORBIDDEN_NAMES == set()


def test_root_holds_nothing_else():
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert {path.partition("/")[0] for path in listed.splitlines()} - ROOT == set()


def test_broad_except_raises_again():
    """`except Exception` that goes on hides faults; with a raise it only adds to them."""
    offences = [
        str(source.path)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler)
        and _is_broad(node.type)
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert Counter(offences) == Counter(FOREIGN_CODE)


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(choice) for choice in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in BROAD)


@pytest.mark.parametrize("source", ALL, ids=_ids)
def test_data_never_runs_as_code(source):
    assert list(_unsafe(source.tree)) == []


def _unsafe(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if CODE_FROM_DATA & {module.partition(".")[0] for module in modules}:
                yield node.lineno, "import"
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(node: ast.Call):
    if isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
        yield node.lineno, node.func.id
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for name in ("trust_remote_code", "shell"):
        value = keywords.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield node.lineno, name
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load":
        value = keywords.get("weights_only")
        if not (isinstance(value, ast.Constant) and value.value is True):
            yield node.lineno, "torch.load without weights_only=True"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", "import"),
        ("from dill import loads", "import"),
        ("eval('1')", "eval"),
        ("f(trust_remote_code=True)", "trust_remote_code"),
        ("run(x, shell=y)", "shell"),
        ("torch.load(p)", "torch.load without weights_only=True"),
    ],
)
def test_unsafe_code_is_seen(text, what):
    assert [found for _, found in _unsafe(ast.parse(text))] == [what]


def test_safe_code_passes():
    text = "model.eval()\nf(trust_remote_code=False)\ntorch.load(p, weights_only=True)\nre.compile('a')"
    assert list(_unsafe(ast.parse(text))) == []
