"""Floating point, with a bound on the error of each step: it can show that expressions differ, never that they agree.

Symbols get values from a fixed list, positive and negative. Functions are compared where both are real.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rft_core.rewards.maths.parser import Tree

Value = tuple[complex, float]  # and the largest possible error

EPSILON = 1e-15
SAFETY = 1e3
POINTS = (0.7310585786, 1.8190025, 2.5066282746, -0.6180339887, 0.2718281828, -1.7724538509)
LARGEST = 1e150  # beyond it nothing is said


class Unknown(ArithmeticError):
    """No value, or none whose error is bounded."""


def symbols(tree: Tree, bound: frozenset[str] = frozenset()) -> set[str]:
    """Names of the free symbols."""
    if not isinstance(tree, tuple):
        return set()
    if tree[0] == "symbol":
        return {tree[1]} - bound
    inner = bound | {tree[1]} if tree[0] in BINDERS else bound
    return set().union(*(symbols(part, inner) for part in tree[1:]))


def differ(one: Tree, other: Tree) -> bool:
    """Whether they certainly have different values at one of the points."""
    names = sorted(symbols(one) | symbols(other))
    for index in range(len(POINTS) if names else 1):
        at = {name: POINTS[(index + 2 * place) % len(POINTS)] * (1 + place // 3) for place, name in enumerate(names)}
        try:
            (a, error_a), (b, error_b) = value(one, at), value(other, at)
        except (Unknown, OverflowError, ValueError, ZeroDivisionError):
            continue
        if names and (a.imag or b.imag) and not (abs(a.imag) <= error_a and abs(b.imag) <= error_b):
            continue
        if abs(a - b) > SAFETY * (error_a + error_b):
            return True
    return False


def value(tree: Tree, at: dict[str, float]) -> Value:
    """Raises Unknown and what float arithmetic raises."""
    if isinstance(tree, Fraction):
        number = complex(tree.numerator / tree.denominator)
        return number, EPSILON * abs(number)
    if tree[0] not in RULES:
        raise Unknown(tree[0])
    found = RULES[tree[0]](tree, at)
    if not abs(found[0]) < LARGEST or not found[1] < LARGEST:
        raise Unknown("too large")
    return found


def _sum(tree: Tree, at: dict[str, float]) -> Value:
    total, error = 0j, 0.0
    for part in tree[1:]:
        number, own = value(part, at)
        total += number
        error += own + EPSILON * (abs(number) + abs(total))
    return total, error


def _times(one: Value, other: Value) -> Value:
    (a, error_a), (b, error_b) = one, other
    return a * b, abs(a) * error_b + abs(b) * error_a + error_a * error_b + EPSILON * abs(a * b)


def _product(tree: Tree, at: dict[str, float]) -> Value:
    total: Value = (1 + 0j, 0.0)
    for part in tree[1:]:
        total = _times(total, value(part, at))
    return total


def _quotient(tree: Tree, at: dict[str, float]) -> Value:
    divisor, error = value(tree[2], at)
    if abs(divisor) <= 2 * error or not divisor:
        raise Unknown("division by what may be zero")
    inverse = (1 / divisor, 2 * error / abs(divisor) ** 2 + EPSILON / abs(divisor))
    return _times(value(tree[1], at), inverse)


def _applied(function: Callable[[complex], complex], argument: Value) -> Value:
    """The error by the function's slope, measured."""
    number, error = argument
    found = complex(function(number))
    step = max(error, EPSILON * abs(number), EPSILON)
    slopes = (abs(complex(function(number + step)) - found), abs(complex(function(number - step)) - found))
    return found, 2 * max(slopes) + EPSILON * abs(found)


def _power(tree: Tree, at: dict[str, float]) -> Value:
    base, exponent = value(tree[1], at), value(tree[2], at)
    if not base[0]:
        if base[1] or exponent[0].real <= exponent[1]:
            raise Unknown("a power of zero")
        return 0j, 0.0
    if isinstance(tree[2], Fraction) and tree[2].denominator == 1 and abs(tree[2]) < 10**6:
        whole = int(tree[2])
        return _applied(lambda number: _plain(number) ** whole, base)
    logarithm = _applied(cmath.log, base)
    return _applied(cmath.exp, _times(logarithm, exponent))


def _plain(number: complex) -> complex:
    return number if number.imag else number.real  # so that powers of a real number stay real


def _root(tree: Tree, at: dict[str, float]) -> Value:
    if not isinstance(tree[2], Fraction) or tree[2].denominator != 1 or tree[2] < 1:
        raise Unknown("a root of this kind")
    degree, (number, error) = int(tree[2]), value(tree[1], at)
    if abs(number) <= 2 * error:
        raise Unknown("a root of what may be zero")
    if degree % 2 and not number.imag and number.real < 0:
        root, own = _applied(lambda inner: inner.real ** (1 / degree), (-number, error))
        return -root, own
    if degree == 2:
        return _applied(cmath.sqrt, (number, error))
    return _applied(lambda inner: inner ** (1 / degree), (number, error))


def _call(tree: Tree, at: dict[str, float]) -> Value:
    argument = value(tree[2], at)
    if tree[1] in ROUNDING:
        number, error = argument
        if number.imag or abs(number.real - round(number.real)) <= 2 * error:
            raise Unknown("rounding at a step")
        return complex(ROUNDING[tree[1]](number.real)), 0.0
    if tree[1] not in CALLS or abs(argument[0]) > 1e6:
        raise Unknown(tree[1])
    return _applied(CALLS[tree[1]], argument)


def _factorial(tree: Tree, at: dict[str, float]) -> Value:
    number, error = value(tree[1], at)
    if number.imag or not -0.9 < number.real < 90:
        raise Unknown("a factorial")
    return _applied(lambda inner: complex(math.gamma(inner.real + 1)), (number, error))


def _constant(tree: Tree, at: dict[str, float]) -> Value:
    if tree[1] not in CONSTANTS:
        raise Unknown(tree[1])
    return CONSTANTS[tree[1]], EPSILON * 4


def _symbol(tree: Tree, at: dict[str, float]) -> Value:
    if tree[1] not in at:
        raise Unknown(tree[1])
    return complex(at[tree[1]]), 0.0


BINDERS = ("sum", "product", "integral", "limit")
CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
ROUNDING: dict[str, Callable[[float], float]] = {"floor": math.floor, "ceiling": math.ceil}
CALLS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda number: 1 / cmath.tan(number),
    "sec": lambda number: 1 / cmath.cos(number),
    "csc": lambda number: 1 / cmath.sin(number),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "ln": cmath.log,
    "abs": lambda number: complex(abs(number)),
}
RULES: dict[str, Callable[[Any, dict[str, float]], Value]] = {
    "+": _sum,
    "*": _product,
    "/": _quotient,
    "^": _power,
    "root": _root,
    "call": _call,
    "!": _factorial,
    "constant": _constant,
    "symbol": _symbol,
}
