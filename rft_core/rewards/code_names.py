"""What a text of tests contains: its tests, and the names that it expects of the program."""

from __future__ import annotations

import ast
import builtins

from rft_core.rewards.sandbox.inside.checks import is_check

BUILTINS = frozenset(dir(builtins))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_pytest_file(tree: ast.Module) -> bool:
    """Whether it defines tests and runs nothing itself."""
    runs = any(
        isinstance(node, ast.Assert | ast.Call)
        for statement in tree.body
        if not isinstance(statement, Function | ast.ClassDef | ast.Assign | ast.AnnAssign) and not _is_main(statement)
        for node in ast.walk(statement)
    )
    return not runs and any(True for _ in _test_functions(tree))


def count_pytests(tree: ast.Module) -> int:
    """Test functions and methods that are not skipped whatever the program."""
    if any(
        isinstance(statement, ast.Assign) and "pytestmark" in map(ast.unparse, statement.targets)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _is_skip(statement.value)
    ):
        return 0
    return sum(not any(map(_is_skip, skipping)) for skipping in _test_functions(tree))


def count_checks(tree: ast.Module) -> int:
    """Assert statements, and calls that check: pytest.raises, numpy's assert_allclose."""
    return sum(isinstance(node, ast.Assert) or is_check(node) for node in ast.walk(tree))


def names_in(tree: ast.AST) -> set[str]:
    """Every identifier that a text mentions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
    return found


def used_names(tree: ast.Module, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Names that the program must define, sorted.

    A built-in function's name is one only where nothing else is (a task that asks for a function `sum`): else a program
    could replace the `abs` that its own results are compared with.
    """
    bound, loaded, imported = _bound(tree), set(), set()
    own = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loaded.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module in own:
            imported |= {alias.name for alias in node.names} - {"*"}
        elif isinstance(node, ast.Import):
            own |= {alias.asname for alias in node.names if alias.name in own and alias.asname}
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own
    }
    found = (loaded - bound - BUILTINS) | imported | attributes
    return tuple(sorted(found or (loaded - bound)))


def _bound(tree: ast.Module) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, Function | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _test_functions(tree: ast.Module) -> list[list[ast.expr]]:
    """By test, the places where it may be skipped for good: its decorators, its class's, and what it does first."""
    found = []
    for statement in tree.body:
        if isinstance(statement, Function) and statement.name.startswith("test"):
            found.append([*statement.decorator_list, *_first_call(statement)])
        elif isinstance(statement, ast.ClassDef) and (
            statement.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in statement.bases)
        ):
            found += [
                [*statement.decorator_list, *method.decorator_list, *_first_call(method)]
                for method in statement.body
                if isinstance(method, Function) and method.name.startswith("test")
            ]
    return found


def _first_call(function: Function) -> list[ast.expr]:
    first = function.body[0]
    return [first.value] if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call) else []


def _is_skip(expression: ast.expr) -> bool:
    """pytest.mark.skip, pytest.mark.skip(...), pytest.skip(...), unittest.skip(...), self.skipTest(...)."""
    target = expression.func if isinstance(expression, ast.Call) else expression
    return ast.unparse(target).rpartition(".")[2] in ("skip", "skipTest")


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
