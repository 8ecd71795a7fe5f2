"""Exact arithmetic: an expression as a quotient of two sums of monomials over the rationals.

A monomial is a product of atoms with rational exponents: symbols, pi, e, i, primes (2^(1/2) is a root of two, exponents
in [0, 1)), logarithms of primes, powers with symbolic exponents, and any other function of an expression. Roots of
primes are linearly independent over the rationals and the other atoms are taken to be, so that a difference is zero
exactly when it has no monomial left. Not so for functions such as sin(x): these atoms are `opaque`; a difference that
vanishes proves equality as before, one that doesn't proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, isqrt
from typing import Any

from rft_core.rewards.maths.parser import Tree

MAX_TERMS = 400
MAX_BITS = 20_000  # of a number
MAX_WORK = 40_000  # products of monomials for one expression
MAX_POWER = 64  # a sum of several monomials is multiplied out up to this
MAX_FACTOR = 2000  # trial division; what is left over counts as a prime

Number = int | Fraction  # whole numbers as int, which is faster
Monomial = tuple[tuple[Any, Number], ...]
Terms = dict[Monomial, Number]
ONE: Monomial = ()


class TooLarge(ArithmeticError):
    """More digits, terms or work than exact arithmetic is given."""


class Undefined(ArithmeticError):
    """Division by zero."""


@dataclass(frozen=True, slots=True)
class Quotient:
    top: Terms
    bottom: Terms = field(default_factory=lambda: {ONE: 1})
    is_opaque: bool = False

    @property
    def number(self) -> Fraction | None:
        """Its value if it is a rational number."""
        if not self.top:
            return Fraction(0)
        if len(self.top) == 1 and ONE in self.top and self.bottom == {ONE: 1}:
            return Fraction(self.top[ONE])
        return None

    def key(self) -> Any:
        return (frozenset(self.top.items()), frozenset(self.bottom.items()))


class Reducer:
    """Makes normal forms within one budget."""

    def __init__(self) -> None:
        self._work = MAX_WORK

    def reduce(self, tree: Tree) -> Quotient:
        """Raises TooLarge and Undefined."""
        if isinstance(tree, Fraction):
            return Quotient({ONE: _checked(_whole(tree))} if tree else {})
        return RULES.get(tree[0], Reducer._opaque)(self, tree)

    def is_zero(self, difference: Quotient) -> bool | None:
        if not difference.top:
            return True
        return None if difference.is_opaque else False

    def minus(self, one: Quotient, other: Quotient) -> Quotient:
        return self._add(one, Quotient({m: -c for m, c in other.top.items()}, other.bottom, other.is_opaque))

    def is_proportional(self, one: Quotient, other: Quotient) -> Fraction | None:
        """c with one = c * other, a rational number; null where there is none."""
        left, right = self._multiply_terms(one.top, other.bottom), self._multiply_terms(other.top, one.bottom)
        if not left or left.keys() != right.keys():
            return None
        first = next(iter(left))
        ratio = Fraction(left[first]) / right[first]
        return ratio if all(left[m] == ratio * right[m] for m in left) else None

    def _multiply_terms(self, one: Terms, other: Terms) -> Terms:
        self._work -= len(one) * len(other)
        if self._work < 0:
            raise TooLarge("too many terms")
        made: Terms = {}
        for a, x in one.items():
            for b, y in other.items():
                if not a or not b:
                    monomial, factor = a or b, 1
                else:
                    monomial, factor = _canonical(_merged(a, b))
                total = made.get(monomial, 0) + _checked(x * y if factor == 1 else x * y * factor)
                if total:
                    made[monomial] = total
                else:
                    made.pop(monomial, None)
        if len(made) > MAX_TERMS:
            raise TooLarge("too many terms")
        return made

    def _add(self, one: Quotient, other: Quotient) -> Quotient:
        if one.bottom == other.bottom:
            left, right, bottom = one.top, other.top, one.bottom
        else:
            left = self._multiply_terms(one.top, other.bottom)
            right = self._multiply_terms(other.top, one.bottom)
            bottom = self._multiply_terms(one.bottom, other.bottom)
        top = dict(left)
        for monomial, value in right.items():
            total = _checked(top.get(monomial, 0) + value)
            if total:
                top[monomial] = total
            else:
                top.pop(monomial, None)
        self._work -= len(right)
        return Quotient(top, bottom, one.is_opaque or other.is_opaque)

    def _multiply(self, one: Quotient, other: Quotient) -> Quotient:
        return Quotient(
            self._multiply_terms(one.top, other.top),
            self._multiply_terms(one.bottom, other.bottom),
            one.is_opaque or other.is_opaque,
        )

    def _inverse(self, value: Quotient) -> Quotient:
        if not value.top:
            raise Undefined("division by zero")
        if len(value.top) > 1:
            return Quotient(value.bottom, value.top, value.is_opaque)
        ((monomial, coefficient),) = value.top.items()
        inverted, factor = _canonical({atom: -exponent for atom, exponent in monomial})
        return Quotient(
            self._multiply_terms(value.bottom, {inverted: _whole(Fraction(factor) / coefficient)}),
            is_opaque=value.is_opaque,
        )

    def _sum(self, tree: Tree) -> Quotient:
        total = self.reduce(tree[1])
        for part in tree[2:]:
            total = self._add(total, self.reduce(part))
        return total

    def _product(self, tree: Tree) -> Quotient:
        total = self.reduce(tree[1])
        for part in tree[2:]:
            total = self._multiply(total, self.reduce(part))
        return total

    def _quotient(self, tree: Tree) -> Quotient:
        return self._multiply(self.reduce(tree[1]), self._inverse(self.reduce(tree[2])))

    def _symbol(self, tree: Tree) -> Quotient:
        return _atom(tree[1])

    def _constant(self, tree: Tree) -> Quotient:
        return _atom(tree, is_opaque=tree[1] == "infinity")

    def _power(self, tree: Tree) -> Quotient:
        base, exponent = self.reduce(tree[1]), self.reduce(tree[2])
        number = exponent.number
        if number is None:
            return self._symbolic_power(base, exponent)
        if number.denominator == 1:
            return self._whole_power(base, int(number))
        if base.number is not None and base.number < 0 and number.denominator != 2:
            return _atom(("^", base.key(), exponent.key()), is_opaque=True)
        return self._whole_power(self._root(base, number.denominator), number.numerator)

    def _whole_power(self, base: Quotient, exponent: int) -> Quotient:
        if exponent < 0:
            return self._whole_power(self._inverse(base), -exponent)
        if len(base.top) <= 1 and len(base.bottom) == 1:
            if not base.top:
                return base if exponent else Quotient({ONE: 1})
            ((monomial, coefficient),) = base.top.items()
            bits = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
            if (bits if abs(coefficient.numerator) > 1 or coefficient.denominator > 1 else 0) * exponent > MAX_BITS:
                raise TooLarge(
                    f"a power of {exponent.bit_length()} bits" if exponent > 10**6 else f"the {exponent}th power"
                )
            raised, factor = _canonical({atom: power * exponent for atom, power in monomial})
            top = {raised: _checked(coefficient**exponent * factor)}
            return Quotient(top, base.bottom, base.is_opaque)
        if exponent > MAX_POWER:
            raise TooLarge(f"the {exponent}th power of a sum" if exponent < 10**6 else "a power of a sum")
        made = Quotient({ONE: 1})
        for _ in range(exponent):
            made = self._multiply(made, base)
        return made

    def _symbolic_power(self, base: Quotient, exponent: Quotient) -> Quotient:
        """b^(2x + 3) as (b^x)^2 b^3, for a base that is one atom or a positive whole number."""
        named: list[tuple[Any, Number]] | None = None
        is_doubtful = False
        if base.number is not None and base.number > 0:
            factors, is_doubtful = _factors(base.number)
            named = list(factors)
        elif len(base.top) == 1 and base.bottom == {ONE: 1}:
            ((monomial, coefficient),) = base.top.items()
            if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1:
                named = [monomial[0]]
        has_i = any(atom == IMAGINARY for monomial in exponent.top for atom, _ in monomial)
        is_opaque = base.is_opaque or exponent.is_opaque or has_i or is_doubtful
        if named is None or exponent.bottom != {ONE: 1} or (named and named[0][0] == IMAGINARY):
            return _atom(("^", base.key(), exponent.key()), is_opaque=True)
        made = Quotient({ONE: 1}, is_opaque=is_opaque)
        for atom, power in named:
            for monomial, coefficient in exponent.top.items():
                if monomial == ONE and isinstance(atom, int) and abs(coefficient) > MAX_BITS:
                    raise TooLarge("a power")
                raised = atom if monomial == ONE else ("^", atom, monomial)
                form, factor = _canonical({raised: power * coefficient})
                made = self._multiply(made, Quotient({form: factor}))
        return made

    def _nth_root(self, tree: Tree) -> Quotient:
        index = self.reduce(tree[2]).number
        if index is None or index.denominator != 1 or not 1 <= index <= MAX_POWER:
            return self._opaque(tree)
        base, degree = self.reduce(tree[1]), int(index)
        if degree % 2 and base.number is not None and base.number < 0:
            root = self._root(Quotient({ONE: _whole(-base.number)}), degree)
            return self._multiply(Quotient({ONE: -1}), root)
        return self._root(base, degree)

    def _root(self, base: Quotient, degree: int) -> Quotient:
        if degree == 1 or not base.top:
            return base
        coefficient = abs(next(iter(base.top.values())))
        is_single = len(base.top) == 1 and base.bottom == {ONE: 1}
        ((monomial, signed),) = base.top.items() if is_single else ((ONE, coefficient),)
        if is_single and (signed > 0 or degree == 2) and (not monomial or _is_simple(monomial)):
            powers: dict[Any, Number] = {atom: Fraction(1, degree) for atom, _ in monomial}
            factors, is_doubtful = _factors(Fraction(abs(signed)))
            for prime, power in factors:
                powers[prime] = powers.get(prime, Fraction(0)) + Fraction(power, degree)
            form, factor = _canonical(powers)
            root = Quotient({form: factor}, is_opaque=base.is_opaque or is_doubtful)
            return root if signed > 0 else self._multiply(_atom(IMAGINARY), root)
        if coefficient == 1:
            return _atom(("root", base.key(), degree), is_opaque=True)
        inner = Quotient({m: _whole(Fraction(c) / coefficient) for m, c in base.top.items()}, base.bottom)
        return self._multiply(
            _atom(("root", inner.key(), degree), is_opaque=True), self._root(Quotient({ONE: coefficient}), degree)
        )

    def _call(self, tree: Tree) -> Quotient:
        argument = self.reduce(tree[2])
        number = argument.number
        if number is not None and tree[1] in ("abs", "floor", "ceiling"):
            value = _whole(abs(number)) if tree[1] == "abs" else number // 1 if tree[1] == "floor" else -(-number // 1)
            return Quotient({ONE: value} if value else {})
        if number is not None and number > 0 and tree[1] == "ln":
            factors, is_doubtful = _factors(number)
            terms: Terms = {((("ln", prime), 1),): power for prime, power in factors}
            return Quotient(terms, is_opaque=is_doubtful)
        if tree[1] == "ln" and argument.top == {((EULER, 1),): 1} and argument.bottom == {ONE: 1}:
            return Quotient({ONE: 1})
        return _atom((tree[1], argument.key()), is_opaque=True)

    def _factorial(self, tree: Tree) -> Quotient:
        argument = self.reduce(tree[1])
        number = argument.number
        if number is None:
            return _atom(("!", argument.key()), is_opaque=True)
        if number.denominator != 1 or number < 0:
            raise Undefined("a factorial of no whole number")
        if number > 1000:
            raise TooLarge("a factorial")
        return Quotient({ONE: _checked(factorial(int(number)))})

    def _binomial(self, tree: Tree) -> Quotient:
        top, bottom = (self.reduce(part).number for part in tree[1:])
        if top is None or bottom is None or top.denominator != 1 or bottom.denominator != 1 or top < 0 or bottom < 0:
            return self._opaque(tree)
        if top > 1000:
            raise TooLarge("a binomial coefficient")
        value = comb(int(top), int(bottom))
        return Quotient({ONE: value} if value else {})

    def _opaque(self, tree: Tree) -> Quotient:
        return _atom(tree, is_opaque=True)


def _atom(name: Any, is_opaque: bool = False) -> Quotient:
    return Quotient({((name, 1),): 1}, is_opaque=is_opaque)


def _is_simple(monomial: Monomial) -> bool:
    """One symbol, pi or e to the first power: its root is that atom's."""
    ((atom, exponent), *others) = monomial
    return not others and exponent == 1 and (isinstance(atom, str) or atom in (EULER, PI))


def _merged(one: Monomial, other: Monomial) -> dict[Any, Number]:
    powers = dict(one)
    for atom, exponent in other:
        powers[atom] = powers.get(atom, 0) + exponent
    return powers


def _canonical(powers: dict[Any, Number]) -> tuple[Monomial, Number]:
    """(monomial, rational factor): primes keep exponents in [0, 1), i keeps 0 or 1."""
    factor: Number = 1
    kept = []
    for atom, exponent in powers.items():
        if isinstance(atom, int):
            whole = exponent.numerator // exponent.denominator
            if abs(whole) * atom.bit_length() > MAX_BITS:
                raise TooLarge("a power")
            factor *= atom**whole if whole >= 0 else Fraction(1, atom**-whole)
            exponent -= whole
        elif atom == IMAGINARY and exponent.denominator == 1:
            turns = int(exponent) % 4
            factor *= -1 if turns >= 2 else 1
            exponent = turns % 2
        if exponent:
            kept.append((atom, exponent))
    return tuple(sorted(kept, key=_order)) if len(kept) > 1 else tuple(kept), factor


def _order(pair: tuple[Any, Number]) -> str:
    return repr(pair[0]) if not isinstance(pair[0], tuple) or pair[0][0] == "constant" else f"~{hash(pair[0])}"


@lru_cache(maxsize=4096)
def _factors(number: Fraction) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Primes of a positive number with their exponents, and whether one may be no prime, being too large to say."""
    found: dict[int, int] = {}
    is_doubtful = False
    for part, sign in ((number.numerator, 1), (number.denominator, -1)):
        for factor in (2, *range(3, MAX_FACTOR, 2)):
            if factor * factor > part:
                break
            while part % factor == 0:
                part //= factor
                found[factor] = found.get(factor, 0) + sign
        if part > 1:
            root = isqrt(part)
            base, times = (root, 2) if root * root == part else (part, 1)
            found[base] = found.get(base, 0) + sign * times
            is_doubtful |= base >= MAX_FACTOR**2
    return tuple(found.items()), is_doubtful


def _whole(value: Fraction) -> Number:
    return value.numerator if value.denominator == 1 else value


def _checked(value: Number) -> Number:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("a number")
    return value


IMAGINARY = ("constant", "i")
EULER = ("constant", "e")
PI = ("constant", "pi")
RULES = {
    "+": Reducer._sum,
    "*": Reducer._product,
    "/": Reducer._quotient,
    "^": Reducer._power,
    "root": Reducer._nth_root,
    "symbol": Reducer._symbol,
    "constant": Reducer._constant,
    "call": Reducer._call,
    "!": Reducer._factorial,
    "binomial": Reducer._binomial,
}
