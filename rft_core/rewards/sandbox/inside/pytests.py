"""Runs tests that are a pytest file. Skipped and expected-to-fail tests count neither way."""

from __future__ import annotations

import ast
import builtins
import contextlib
import os

from .asserts import ISOLATION, isolated_asserts
from .report import Verdict, describe, missing_module, shortened
from .tests_end import TestsEnd, install_modules, names_of

FILE = "test_of_program.py"
NOT_NEEDED = ("cacheprovider", "faulthandler", "unraisableexception")  # the last collects garbage for long
PLUGINS = tuple(part for name in NOT_NEEDED for part in ("-p", f"no:{name}"))
OPTIONS = ("-q", *PLUGINS, "--capture=sys", "--noconftest", "--rootdir=.")


def load_pytest() -> None:
    with contextlib.suppress(ImportError):  # run_pytest meets it again, where it has a verdict to give
        import pytest  # noqa: F401


def run_pytest(job: dict, peer: TestsEnd) -> Verdict:
    import pytest

    outcomes = Outcomes()
    peer.own_modules.add(FILE.removesuffix(".py"))
    install_modules(peer, job)
    for name, value in names_of(peer, job["names"]).items():
        if not hasattr(builtins, name):  # where a test file without imports finds what it tests
            setattr(builtins, name, value)
    tree = isolated_asserts(ast.parse(job["code"]))
    setattr(builtins, ISOLATION, peer.isolated)
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(ast.unparse(tree))
    options = [*OPTIONS, "-c", os.devnull, *([] if job["is_partial"] else ["-x"])]
    code = pytest.main([*options, FILE], plugins=[outcomes])
    if outcomes.unjudged is not None:
        return Verdict.unjudged(outcomes.unjudged)
    if outcomes.is_broken or peer.is_gone or code not in (0, 1, 5):  # any program may bring pytest itself down
        return Verdict(0, job["num_tests"], outcomes.reason or f"pytest ended with code {int(code)}")
    passed = len(outcomes.passed - outcomes.failed)
    total = max(outcomes.num_collected - len(outcomes.skipped - outcomes.failed), passed + len(outcomes.failed))
    if not total:
        return Verdict(0, job["num_tests"], "no test ran: all were skipped")
    return Verdict(passed, total, outcomes.reason or next((f"{name} failed" for name in outcomes.failed), None))


class Outcomes:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.num_collected = 0
        self.is_broken = False  # the file could not be collected
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: set[str] = set()
        self.reason: str | None = None
        self.unjudged: str | None = None

    def pytest_collection_finish(self, session) -> None:
        self.num_collected = len(session.items)

    def pytest_exception_interact(self, node, call, report) -> None:
        error = call.excinfo.value
        cause = error.__cause__ if report.when == "collect" and error.__cause__ is not None else error
        self.unjudged = self.unjudged or missing_module(cause)
        self.reason = self.reason or shortened(f"{node.name}: {describe(cause)}".replace("\n", " "))
        self.is_broken = self.is_broken or report.when == "collect"

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            (self.skipped if hasattr(report, "wasxfail") else self.passed).add(report.nodeid)
