"""Values to many digits, by mpmath. Slower than floating.py and with no bound on time, so for the child only.

The digits grow with the numbers in an expression, so that what cancels leaves enough of them.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from rft_core.rewards.maths.floating import symbols
from rft_core.rewards.maths.parser import Tree

DIGITS = 60
MAX_DIGITS = 1500
LOST_DIGITS = 20  # to rounding
LARGEST_EXPONENT = 10**7
POINTS = ("1.3702", "2.3451", "-0.7411", "0.2637", "-1.9372", "4.7291")


class NoValue(ArithmeticError):
    """It cannot be evaluated as it stands."""


def agree(one: Tree, other: Tree) -> bool | None:
    """Whether both have the same value wherever both are real; null where they have none. Raises OverflowError."""
    names = sorted(symbols(one) | symbols(other))
    digits = min(DIGITS + 2 * (_num_digits(one) + _num_digits(other)), MAX_DIGITS)
    verdict = None
    with mpmath.workdps(digits):
        small = mpmath.mpf(10) ** (LOST_DIGITS - digits)
        for index in range(len(POINTS) if names else 1):
            try:
                at = {
                    name: mpmath.mpf(POINTS[(index + place) % len(POINTS)]) * (1 + place // len(POINTS))
                    for place, name in enumerate(names)
                }
                numbers = value(one, at), value(other, at)
            except (NoValue, ZeroDivisionError):
                continue
            if not all(mpmath.isfinite(number) for number in numbers):
                continue
            a, b = (mpmath.mpc(number) for number in numbers)
            if names and max(abs(a.imag), abs(b.imag)) > small * max(abs(a), abs(b), 1):
                continue
            if abs(a - b) > small * max(abs(a), abs(b), 1):
                return False
            verdict = True
    return verdict


def value(tree: Tree, at: dict[str, Any]) -> Any:
    if isinstance(tree, Fraction):
        return mpmath.mpf(tree.numerator) / tree.denominator
    head = tree[0]
    if head == "symbol":
        if tree[1] not in at:
            raise NoValue(tree[1])
        return at[tree[1]]
    if head == "constant":
        if tree[1] not in CONSTANTS:
            raise NoValue(tree[1])
        return CONSTANTS[tree[1]]()
    if head == "call":
        return CALLS[tree[1]](value(tree[2], at))
    if head not in RULES:
        raise NoValue(head)
    return RULES[head](*(value(part, at) for part in tree[1:]))


def _sum(*parts: Any) -> Any:
    return mpmath.fsum(parts)


def _product(*parts: Any) -> Any:
    return mpmath.fprod(parts)


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if mpmath.im(exponent) or exponent <= 0:
            raise NoValue("a power of zero")
        return base
    if abs(exponent) > LARGEST_EXPONENT or abs(exponent) * abs(mpmath.log(abs(base))) > LARGEST_EXPONENT:
        raise OverflowError("a power")
    return base**exponent


def _root(base: Any, degree: Any) -> Any:
    if not mpmath.isint(degree) or degree < 1:
        raise NoValue("a root of this kind")
    if degree % 2 and not mpmath.im(base) and mpmath.re(base) < 0:
        return -mpmath.root(-mpmath.re(base), int(degree))
    return mpmath.root(base, int(degree))


def _factorial(number: Any) -> Any:
    if abs(number) > LARGEST_EXPONENT:
        raise OverflowError("a factorial")
    if mpmath.isint(number) and mpmath.re(number) < 0:
        raise NoValue("a factorial of a negative number")
    return mpmath.factorial(number)


def _rounded(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def rounded(number: Any) -> Any:
        if abs(number - mpmath.nint(number)) < mpmath.mpf(10) ** (LOST_DIGITS - mpmath.mp.dps):
            return mpmath.nint(number)
        return function(number)

    return rounded


def _num_digits(tree: Tree) -> int:
    if isinstance(tree, Fraction):
        return (tree.numerator.bit_length() + tree.denominator.bit_length()) // 3
    return sum(map(_num_digits, tree[1:])) if isinstance(tree, tuple) else 0


CONSTANTS: dict[str, Callable[[], Any]] = {
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "ln": mpmath.log,
    "abs": abs,
    "floor": _rounded(mpmath.floor),
    "ceiling": _rounded(mpmath.ceil),
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
}
RULES: dict[str, Callable[..., Any]] = {
    "+": _sum,
    "*": _product,
    "/": lambda top, bottom: top / bottom,
    "^": _power,
    "root": _root,
    "!": _factorial,
    "binomial": mpmath.binomial,
}
