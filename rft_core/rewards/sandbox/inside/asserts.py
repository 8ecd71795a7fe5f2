"""Runs tests that are asserts. Each assert statement is a test, wherever it stands.

All or nothing, the first failure ends it, as in a script. With partial credit every statement runs, and a failed assert
lets the next one run. A top-level statement that fails outside an assert is a failed test, and then an assert that was
never reached is one too. A statement that checks by other means (pytest.raises, assert_allclose, try / except) is a
test of its own.
"""

from __future__ import annotations

import ast
import os
from importlib.machinery import SourceFileLoader
from types import ModuleType

from .checks import is_check
from .peer import Gone
from .report import Verdict, describe, missing_module, shortened
from .tests_end import MODULE_OF_TESTS, TestsEnd, install_modules, names_of

RECORD = "__tests__"  # the name under which instrumented tests find their Record
ISOLATION = "__one_assert__"


def run_asserts(job: dict, peer: TestsEnd) -> Verdict:
    tree = ast.parse(job["code"])
    record = Record(tree, peer, job["is_partial"])
    install_modules(peer, job)
    module = ModuleType(MODULE_OF_TESTS)
    try:
        vars(module).update(names_of(peer, job["names"]))
        vars(module)[RECORD] = record
        TreeLoader(record.instrumented(tree)).exec_module(module)
    except Gone:
        pass
    except BaseException as error:  # noqa: BLE001 (a test may raise anything: it has failed)
        if not record.has_failed:
            record.errors[-1] = describe(error)
    return record.verdict()


class TreeLoader(SourceFileLoader):
    """Loads a module from a syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(MODULE_OF_TESTS, os.path.abspath("tests.py"))
        self.tree = tree

    def get_code(self, fullname: str):
        return self.source_to_code(self.tree, self.path)


class Record:
    """What happened to each assert (by number) and each top-level statement (by position)."""

    def __init__(self, tree: ast.Module, peer: TestsEnd, is_partial: bool) -> None:
        self.peer = peer
        self.is_partial = is_partial
        self.asserts: list[ast.Assert] = []
        self.within: list[list[int]] = []  # by statement: the asserts that it contains and runs itself
        self.checks: list[bool] = []  # by statement: whether it checks by other means than an assert that runs
        self.passed: set[int] = set()
        self.failed: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.completed: set[int] = set()
        self.unjudged: str | None = None

    @property
    def has_failed(self) -> bool:
        return bool(self.failed or self.errors)

    def instrumented(self, tree: ast.Module) -> ast.Module:
        numbering = _Numbering(self.asserts)
        body = []
        for position, statement in enumerate(tree.body):
            before = len(self.asserts)
            is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            checks = isinstance(statement, ast.Try) or any(map(is_check, ast.walk(statement)))
            self.checks.append(checks and not is_definition)
            statement = numbering.visit(statement)
            self.within.append([] if is_definition else list(range(before, len(self.asserts))))
            is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            body.append(statement if is_future else _watched("statement", position, statement))
        return ast.fix_missing_locations(ast.Module(body, []))

    def case(self, number: int) -> _Case:
        return _Case(self, number)

    def statement(self, position: int) -> _Statement:
        return _Statement(self, position)

    def verdict(self) -> Verdict:
        if self.unjudged is not None:
            return Verdict.unjudged(self.unjudged)
        passed = self.passed - self.failed.keys()
        ran = self.passed | self.failed.keys()
        others = {
            position
            for position in self.completed - self.errors.keys()
            if self.checks[position] and not ran & set(self.within[position])
        }
        total = len(passed) + len(self.failed) + len(self.errors) + len(others)
        if self.peer.is_gone or self.errors or (self.failed and not self.is_partial):
            total += len(self.asserts) - len(ran)
        if not total and not any(self.within) and not self.peer.is_gone:
            return Verdict.unjudged("the tests hold no test that runs")
        return Verdict(len(passed) + len(others), max(total, 1), self._reason() if total else "no assert ran")

    def _reason(self) -> str | None:
        if self.failed:
            number, error = next(iter(self.failed.items()))
            text = shortened(ast.unparse(self.asserts[number]))
            return text if error in ("AssertionError", "AssertionError: ") else f"{text}: {error}"
        return next(iter(self.errors.values()), None)


class _Case:
    """An assert at work."""

    def __init__(self, record: Record, number: int) -> None:
        self.record, self.number = record, number
        self.isolated = record.peer.isolated

    def __enter__(self) -> None:
        self.isolated.__enter__()

    def __exit__(self, kind, error, traceback) -> bool:
        self.isolated.__exit__()
        if error is None:
            self.record.passed.add(self.number)
            return False
        if isinstance(error, Exception | SystemExit):
            self.record.unjudged = self.record.unjudged or missing_module(error)
            self.record.failed.setdefault(self.number, describe(error))
            error.__dict__["__recorded__"] = True
            return self.record.is_partial
        return False


class _Statement:
    """A top-level statement at work."""

    def __init__(self, record: Record, position: int) -> None:
        self.record, self.position = record, position

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> bool:
        if error is None:
            self.record.completed.add(self.position)
            return False
        if not isinstance(error, Exception | SystemExit):
            return False
        if "__recorded__" not in error.__dict__:
            self.record.unjudged = self.record.unjudged or missing_module(error)
            self.record.errors[self.position] = describe(error)
        return self.record.is_partial


def isolated_asserts(tree: ast.Module) -> ast.Module:
    """Each assert in a `with __one_assert__:`, for runners that count by themselves."""
    return ast.fix_missing_locations(_Isolating().visit(tree))


class _Isolating(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.With:
        return ast.copy_location(ast.With([ast.withitem(ast.Name(ISOLATION, ast.Load()))], [node]), node)


class _Numbering(ast.NodeTransformer):
    def __init__(self, asserts: list[ast.Assert]) -> None:
        self.asserts = asserts

    def visit_Assert(self, node: ast.Assert) -> ast.With:
        self.asserts.append(node)
        return _watched("case", len(self.asserts) - 1, node)


def _watched(kind: str, number: int, statement: ast.stmt) -> ast.With:
    """`with __tests__.KIND(NUMBER): STATEMENT`."""
    watch = ast.Call(ast.Attribute(ast.Name(RECORD, ast.Load()), kind, ast.Load()), [ast.Constant(number)], [])
    return ast.copy_location(ast.With([ast.withitem(watch)], [statement]), statement)
