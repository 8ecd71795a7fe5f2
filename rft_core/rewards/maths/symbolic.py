"""sympy as the oracle's last resort. Runs in a child (worker.py): sympy may take for ever on a few characters.

Expressions are built from our own trees, never from text. Two are equal when they agree to many digits at several
points (precise.py); where they hold sums, integrals or limits, when what sympy makes of them does, or when it
simplifies their difference to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

from rft_core.rewards.maths.oracle import Oracle
from rft_core.rewards.maths.parser import Tree
from rft_core.rewards.maths.precise import DIGITS, LOST_DIGITS, agree

MAX_BITS = 4_000_000  # of a power that is worked out
MAX_FACTORIAL = 100_000


class SymbolicOracle(Oracle):
    def last_resort(self, one: Tree, other: Tree) -> bool | None:
        self.stages.add("symbolic")
        try:
            return self._decide(one, other)
        except OverflowError as error:
            self.note = f"too large: {error}"
        except RecursionError:
            self.note = "nested too deep"
        except MemoryError:
            self.note = "it needs more memory than it is given"
        except (ArithmeticError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            self.note = f"sympy cannot compare them: {type(error).__name__}: {error}"[:200]
        return None

    def _decide(self, one: Tree, other: Tree) -> bool | None:
        if (verdict := agree(one, other)) is not None:
            return verdict
        left, right = build(one), build(other)
        if left == right:
            return True
        if any(side.has(sympy.zoo, sympy.nan) for side in (left, right)):
            return False
        if not left.free_symbols | right.free_symbols and (verdict := _same_number(left, right)) is not None:
            return verdict
        return True if sympy.simplify((left - right).doit()) == 0 else None


def build(tree: Tree) -> Any:
    """Raises OverflowError for a number that is too large to work out."""
    if isinstance(tree, Fraction):
        return sympy.Rational(tree.numerator, tree.denominator)
    head = tree[0]
    if head == "symbol":
        return sympy.Symbol(tree[1], real=True)
    if head == "constant":
        return CONSTANTS[tree[1]]
    if head == "call":
        return CALLS[tree[1]](build(tree[2]))
    if head in BINDERS:
        return BINDERS[head](tree)
    parts = [build(part) for part in tree[1:]]
    return BUILDERS[head](*parts)


def _power(base: Any, exponent: Any) -> Any:
    if base.is_Rational and exponent.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if abs(base) != 1 and bits * abs(exponent) > MAX_BITS:
            raise OverflowError(f"a power of more than {MAX_BITS} bits")
    return base**exponent


def _root(base: Any, degree: Any) -> Any:
    if degree.is_Integer and degree % 2 and base.is_negative:
        return -sympy.root(-base, degree)
    return sympy.root(base, degree)


def _factorial(number: Any) -> Any:
    if number.is_number and abs(number) > MAX_FACTORIAL:
        raise OverflowError(f"a factorial of more than {MAX_FACTORIAL}")
    return sympy.factorial(number)


def _binomial(top: Any, bottom: Any) -> Any:
    if any(number.is_number and abs(number) > MAX_FACTORIAL for number in (top, bottom)):
        raise OverflowError(f"a binomial coefficient of more than {MAX_FACTORIAL}")
    return sympy.binomial(top, bottom)


def _series(kind: Any) -> Callable[[Tree], Any]:
    def made(tree: Tree) -> Any:
        _, name, start, end, body = tree
        index = sympy.Symbol(name, integer=True)
        return kind(build(body).subs(sympy.Symbol(name, real=True), index), (index, build(start), build(end))).doit()

    return made


def _integral(tree: Tree) -> Any:
    variable = sympy.Symbol(tree[1], real=True)
    if len(tree) == 3:
        return sympy.Integral(build(tree[2]), variable).doit()
    return sympy.Integral(build(tree[4]), (variable, build(tree[2]), build(tree[3])))


def _limit(tree: Tree) -> Any:
    return sympy.limit(build(tree[3]), sympy.Symbol(tree[1], real=True), build(tree[2]))


def _same_number(left: Any, right: Any) -> bool | None:
    """Null where one has no value."""
    numbers = [side.evalf(DIGITS) for side in (left, right)]
    if not all(number.is_number and number.is_finite for number in numbers):
        return None
    parts = [number.as_real_imag() for number in numbers]
    if not all(part.is_Float or part.is_Rational for pair in parts for part in pair):
        return None
    scale = max(*(abs(part) for pair in parts for part in pair), 1)
    small = sympy.Float(10, DIGITS) ** (LOST_DIGITS - DIGITS)
    return all(abs(one - other) <= small * scale for one, other in zip(*parts, strict=True))


CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infinity": sympy.oo}
CALLS = {
    "ln": sympy.log,
    "abs": sympy.Abs,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
}
BUILDERS: dict[str, Callable[..., Any]] = {
    "+": sympy.Add,
    "*": sympy.Mul,
    "/": lambda top, bottom: top / bottom,
    "^": _power,
    "root": _root,
    "!": _factorial,
    "binomial": _binomial,
}
BINDERS: dict[str, Callable[[Tree], Any]] = {
    "sum": _series(sympy.Sum),
    "product": _series(sympy.Product),
    "integral": _integral,
    "limit": _limit,
}
