"""Tests of a program, as public data sets write them.

The tests of a row are a field of its metadata (`tests` by default), else its answer. They are one of the following, or
JSON text of one:

- Python text: asserts, or a file for pytest (test functions or classes). HumanEval's `check(candidate)` is called with
  `entry_point`.
- a list of texts with asserts (MBPP); `test_setup_code` of the metadata goes before them.
- {"kind": "assert" | "pytest", "code": text or list}.
- {"kind": "stdio", "cases": [{"stdin", "expected_stdout"}]}.
- {"inputs": [...], "outputs": [...]} of stdin and stdout; with `fn_name`, of argument lists and values (APPS, TACO).
- a list of {"input", "output"}, with `testtype` functional and `func_name`: one JSON value per line (LiveCodeBench).

`entry_point`, `fn_name` and `func_name` may stand in the tests or in the metadata.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rft_core.rewards.code_names import count_checks, count_pytests, is_pytest_file, names_in, used_names


class NoTests(ValueError):
    """A row's tests cannot be used. The message says why."""


@dataclass(frozen=True)
class Tests:
    """`cases` of kind stdio are (stdin, expected stdout), of kind calls (arguments, expected value)."""

    kind: str  # assert | pytest | calls | stdio
    num_tests: int
    code: str = ""
    cases: tuple[tuple[Any, Any], ...] = ()
    function: str | None = None
    names: tuple[str, ...] = ()  # what they use of the program
    words: tuple[str, ...] = ()  # every identifier in them


def read_tests(answer: str | None, metadata: dict[str, Any], field: str, modules: tuple[str, ...]) -> Tests:
    """`modules` are the names under which tests may import the program. Raises NoTests.

    >>> read_tests(None, {"tests": ["assert add(2, 3) == 5"]}, "tests", ()).names
    ('add',)
    """
    raw = metadata.get(field)
    raw = answer if raw is None else raw
    if raw is None:
        raise NoTests(f"no tests: metadata has no {field}, and there is no answer")
    named = next((metadata[key] for key in ("entry_point", "fn_name", "func_name") if metadata.get(key)), None)
    setup = metadata.get("test_setup_code")
    return _read(raw, named, setup if isinstance(setup, str) else "", modules)


def _read(raw: Any, named: str | None, setup: str, modules: tuple[str, ...]) -> Tests:
    if isinstance(raw, str):
        plain = _json(raw) if raw.lstrip()[:1] in ("[", "{", '"') else None
        if plain is not None:
            return _read(plain, named, setup, modules)
        return _from_text(raw, None, named, setup, modules)
    if isinstance(raw, dict):
        named = next((raw[key] for key in ("entry_point", "fn_name", "func_name") if raw.get(key)), named)
        for key, reader in FORMS.items():
            if key in raw:
                return reader(raw, named, setup, modules)
        raise NoTests(f"tests must have one of the keys {', '.join(FORMS)}, they have {', '.join(map(str, raw))[:200]}")
    if isinstance(raw, list):
        return _from_list(raw, named, setup, modules)
    raise NoTests(f"tests must be a text, a list or a mapping, got {type(raw).__name__}")


def _from_list(raw: list[Any], named: str | None, setup: str, modules: tuple[str, ...]) -> Tests:
    if not raw:
        raise NoTests("the list of tests is empty")
    if all(isinstance(item, str) for item in raw):
        return _from_text("\n".join(raw), None, named, setup, modules)
    if all(isinstance(item, dict) for item in raw):
        if all("expected_stdout" in item for item in raw):
            return _stdio([(item.get("stdin", ""), item["expected_stdout"]) for item in raw])
        if all("input" in item and "output" in item for item in raw):
            pairs = [(item["input"], item["output"]) for item in raw]
            if any(item.get("testtype") == "functional" for item in raw) or named:
                return _calls(pairs, named)
            return _stdio(pairs)
    raise NoTests("a list of tests must hold texts, or mappings with input and output, or with expected_stdout")


def _from_kind(raw: dict[str, Any], named: str | None, setup: str, modules: tuple[str, ...]) -> Tests:
    kind = raw["kind"]
    if kind == "stdio":
        cases = raw.get("cases")
        if not isinstance(cases, list):
            raise NoTests("tests of kind stdio need cases: a list of {stdin, expected_stdout}")
        return _from_list(cases, None, setup, modules)
    code = raw.get("code")
    if kind not in ("assert", "pytest") or not isinstance(code, str | list):
        raise NoTests(f"tests must be of kind assert or pytest with code, or stdio with cases, got kind {kind!r:.80}")
    if isinstance(code, list) and not all(isinstance(item, str) for item in code):
        raise NoTests("code must be a text or a list of texts")
    return _from_text(code if isinstance(code, str) else "\n".join(code), kind, named, setup, modules)


def _from_pairs(raw: dict[str, Any], named: str | None, setup: str, modules: tuple[str, ...]) -> Tests:
    inputs, outputs = raw["inputs"], raw.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise NoTests("inputs and outputs must be lists of one length")
    pairs = list(zip(inputs, outputs, strict=True))
    return _calls(pairs, named) if named else _stdio(pairs)


def _stdio(pairs: list[tuple[Any, Any]]) -> Tests:
    if not pairs:
        raise NoTests("there is no case")
    cases = tuple((_stream(given, "input"), _stream(wanted, "output")) for given, wanted in pairs)
    return Tests("stdio", len(cases), cases=cases)


def _stream(value: Any, what: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)  # APPS has lists of lines
    if isinstance(value, str):
        return value
    raise NoTests(f"an {what} must be a text or a list of lines, got {type(value).__name__}")


def _calls(pairs: list[tuple[Any, Any]], named: str | None) -> Tests:
    if not pairs:
        raise NoTests("there is no call")
    if not named or not isinstance(named, str):
        raise NoTests("tests by calls need fn_name, the function to call")
    function = named.rpartition(".")[2]  # Solution().twoSum is Solution's anyway
    cases = tuple(_call(given, wanted) for given, wanted in pairs)
    return Tests("calls", len(cases), "", cases, function, (function, "Solution"), (function, "Solution"))


def _call(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):  # LiveCodeBench: JSON, one argument a line
        try:
            return [json.loads(line) for line in given.split("\n") if line.strip()], json.loads(wanted)
        except (ValueError, TypeError) as error:
            raise NoTests(f"arguments given as text must be JSON, one a line: {error}") from error
    if not isinstance(given, list):
        raise NoTests(f"the arguments of a call must be a list, got {type(given).__name__}")
    return given, wanted


def _from_text(code: str, kind: str | None, named: str | None, setup: str, modules: tuple[str, ...]) -> Tests:
    code = f"{setup}\n{code}" if setup.strip() else code
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTests(f"tests that are a text must be Python: {error}") from error
    if kind == "pytest" or is_pytest_file(tree):
        kind, num_tests = "pytest", count_pytests(tree)
        if not num_tests:
            raise NoTests("no test function that is not skipped")
    else:
        code, tree = _with_check_called(code, tree, named)
        kind, num_tests = "assert", count_checks(tree)
        if not num_tests:
            raise NoTests("no assert")
    names = used_names(tree, modules)
    return Tests(kind, num_tests, code, names=names, words=tuple(sorted(names_in(tree))))


def _with_check_called(code: str, tree: ast.Module, named: str | None) -> tuple[str, ast.Module]:
    """HumanEval defines check(candidate) and leaves it to the harness to call it."""
    defined = {statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef)}
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "check" not in defined or "check" in calls:
        return code, tree
    if not named:
        raise NoTests("tests define check(candidate) and there is no entry_point to call it with")
    code = f"{code}\ncheck({named})\n"
    try:
        return code, ast.parse(code)
    except SyntaxError as error:
        raise NoTests(f"entry_point must be an expression, got {named!r:.80}") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


Reader = Callable[[dict[str, Any], str | None, str, tuple[str, ...]], Tests]
# By the key that tells a mapping's form.
FORMS: dict[str, Reader] = {
    "kind": _from_kind,
    "inputs": _from_pairs,
    "test": lambda raw, named, setup, modules: _read(raw["test"], named, setup, modules),
    "tests": lambda raw, named, setup, modules: _read(raw["tests"], named, setup, modules),
    "test_list": lambda raw, named, setup, modules: _read(raw["test_list"], named, setup, modules),
}
