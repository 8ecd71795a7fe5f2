"""The share of its tests that a program passes, or whether it passes them all.

The program is taken from the completion (code_blocks.py), the tests from the row (code_tests.py), and both run apart
(sandbox/). A program that fails, exits, exceeds a limit or is missing is 0.0 with a reason; a row without tests is
unscored. Metrics: tests, passed, has_program.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft_core.errors import SettingsError
from rft_core.hardware import num_cores
from rft_core.rewards.code_blocks import NoProgram, find_program
from rft_core.rewards.code_tests import NoTests, Tests, read_tests
from rft_core.rewards.rows import RewardRow, Scored, Scorer, shortened
from rft_core.rewards.sandbox import (
    MIB,
    Calls,
    Interrupts,
    Judgement,
    Launcher,
    Limits,
    Script,
    judge_all,
    sandbox_launcher,
)
from rft_core.rewards.settings import RewardFunction

SEMANTICS = 1
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")  # and what it imports
# Names of a program's file, where its language cares.
FILES = {
    "python": "main.py",
    "javascript": "main.js",
    "typescript": "main.ts",
    "java": "Main.java",
    "c": "main.c",
    "cpp": "main.cpp",
    "csharp": "main.cs",
    "go": "main.go",
    "rust": "main.rs",
    "ruby": "main.rb",
    "bash": "main.sh",
    "kotlin": "main.kt",
}


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Raises SettingsError where sandboxes cannot be made, or a package or command is missing."""
    packages = tuple(path for name in settings.code.packages for path in _package(name))
    pytest = tuple(path for name in PYTEST if importlib.util.find_spec(name) for path in _package(name))
    launcher = Launcher(None) if settings.code.sandbox == "unsafe_unsandboxed" else sandbox_launcher()
    launcher = replace(
        launcher,
        limits=_limits(settings),
        shows_system=settings.code.command is not None,
        readonly=tuple(settings.code.readonly),
        packages=packages,
        checker_packages=pytest,
    )
    _check_command(settings)
    has_pytest = importlib.util.find_spec("pytest") is not None
    interrupts = Interrupts()

    def unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
        tests = _tests(answer, metadata, settings, has_pytest)
        return None if isinstance(tests, Tests) else tests

    return Scorer(
        lambda rows: _score(rows, settings, launcher, has_pytest, interrupts),
        {"semantics": SEMANTICS, "python": platform.python_version(), "packages": _versions(settings.code.packages)},
        unreadable,
        close=interrupts.interrupt,
    )


def _score(
    rows: list[RewardRow], settings: RewardFunction, launcher: Launcher, has_pytest: bool, interrupts: Interrupts
) -> list[Scored]:
    """Equal programs for one prompt are judged once."""
    tests_of: dict[str, Tests | str] = {}
    jobs: dict[tuple[str, str], Script | Calls] = {}
    decided: list[Scored | tuple[str, str]] = []
    for row in rows:
        if row.prompt_id not in tests_of:
            tests_of[row.prompt_id] = _tests(row.answer, row.metadata, settings, has_pytest)
        tests = tests_of[row.prompt_id]
        if isinstance(tests, str):
            decided.append(Scored(None, tests))
            continue
        language, allows_raw = settings.code.language, settings.code.raw
        program = find_program(row.completion_text, row.finish_reason, language, tests.names, allows_raw)
        if isinstance(program, NoProgram):
            decided.append(Scored(0.0, program.reason, {"has_program": 0.0, "passed": 0.0, "tests": tests.num_tests}))
            continue
        jobs.setdefault((row.prompt_id, program), _job(program, tests, settings))
        decided.append((row.prompt_id, program))
    is_partial = settings.code.credit == "partial"
    workers = settings.code.workers or num_cores()
    judged = judge_all(launcher, list(jobs.values()), is_partial=is_partial, workers=workers, interrupts=interrupts)
    scores = dict(zip(jobs, (_scored(judgement, is_partial) for judgement in judged), strict=True))
    return [choice if isinstance(choice, Scored) else scores[choice] for choice in decided]


def _scored(judgement: Judgement, is_partial: bool) -> Scored:
    if not judgement.total:
        return Scored(None, shortened(judgement.reason or "nothing can be said"))
    metrics = {"has_program": 1.0, "passed": float(judgement.passed), "tests": float(judgement.total)}
    if judgement.is_pass:
        return Scored(1.0, None, metrics)
    value = judgement.passed / judgement.total if is_partial else 0.0
    return Scored(value, shortened(judgement.reason or "not all tests passed"), metrics)


def _tests(answer: str | None, metadata: dict[str, Any], settings: RewardFunction, has_pytest: bool) -> Tests | str:
    """A row's tests, or why it has none that can be run."""
    try:
        tests = read_tests(answer, metadata, settings.code.tests, tuple(settings.code.modules))
    except NoTests as error:
        return f"no tests: {error}" if not str(error).startswith("no tests") else str(error)
    if settings.code.command is not None and tests.kind != "stdio":
        return f"tests of kind {tests.kind} call Python functions, and code.command runs scripts: give cases of stdin"
    if tests.kind == "pytest" and not has_pytest:
        return "the tests are a pytest file, and pytest is not installed: pip install pytest"
    return tests


def _job(program: str, tests: Tests, settings: RewardFunction) -> Script | Calls:
    if settings.code.language == "python" and settings.code.prelude:
        program = f"{settings.code.prelude}\n{program}"
    if tests.kind == "stdio":
        file = FILES.get(settings.code.language, "main.txt")
        command = tuple(settings.code.command) if settings.code.command is not None else None
        return Script(program, tests.cases, file, command, settings.code.tolerance)
    order = {"kind": tests.kind, "num_tests": tests.num_tests, "code": tests.code, "calls": tests.cases}
    order |= {"function": tests.function, "names": tests.names, "words": tests.words}
    order |= {"modules": settings.code.modules, "packages": settings.code.packages}
    return Calls(program, {**order, "tolerance": settings.code.tolerance})


def _limits(settings: RewardFunction) -> Limits:
    return Limits(
        cpu_seconds=settings.code.cpu_seconds,
        wall_seconds=settings.code.wall_seconds,
        memory_bytes=settings.code.memory_mib * MIB,
        processes=settings.code.processes,
        file_bytes=settings.code.file_mib * MIB,
        output_bytes=settings.code.output_mib * MIB,
    )


def _package(name: str) -> list[str]:
    """Where an importable package lies, with the libraries that wheels put beside it. Raises SettingsError."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise SettingsError(f"code.packages must name importable packages, {name!r} is none here: install it")
    if spec.submodule_search_locations is None:
        return [spec.origin]
    place = Path(next(iter(spec.submodule_search_locations)))
    libraries = place.with_name(f"{place.name}.libs")
    return [str(place), *([str(libraries)] if libraries.is_dir() else [])]


def _versions(packages: list[str]) -> dict[str, str]:
    from importlib.metadata import packages_distributions, version

    if not packages:
        return {}
    distributions = packages_distributions()
    return {name: version(distributions[name][0]) if name in distributions else "unknown" for name in packages}


def _check_command(settings: RewardFunction) -> None:
    if settings.code.command is None:
        return
    found = shutil.which(settings.code.command[0])
    if found is None:
        raise SettingsError(f"code.command starts {settings.code.command[0]!r}, which is not on the PATH: install it")
    shown = ("/usr", "/bin", "/sbin", *map(os.path.realpath, settings.code.readonly))
    path = os.path.realpath(found)
    if settings.code.sandbox == "bubblewrap" and not any(Path(path).is_relative_to(folder) for folder in shown):
        raise SettingsError(
            f"code.command starts {path}, which programs cannot see: add the folder that it is installed in to "
            "code.readonly, or install it below /usr"
        )
