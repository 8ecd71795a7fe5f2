"""What counts as a check in a text of tests, beside an assert statement."""

from __future__ import annotations

import ast


def is_check(node: ast.AST) -> bool:
    """A call that checks: pytest.raises, self.assertEqual, numpy's assert_allclose."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name == "raises" or name.startswith("assert")
