"""Exact and floating-point verdicts against sympy's own values to fifty digits."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import sympy

from rft_core.rewards.maths.floating import differ
from rft_core.rewards.maths.normal_form import Reducer, TooLarge, Undefined
from rft_core.rewards.maths.parser import Tree, parse
from rft_core.rewards.maths.symbolic import build
from rft_core.rewards.maths.text import plain_latex

X, Y = ("symbol", "x"), ("symbol", "y")
PI, EULER, IMAGINARY = (("constant", name) for name in ("pi", "e", "i"))
AT = {sympy.Symbol("x", real=True): sympy.Rational(1337, 997), sympy.Symbol("y", real=True): sympy.Rational(271, 613)}


def verdict(one: Tree, other: Tree) -> bool | None:
    reducer = Reducer()
    return reducer.is_zero(reducer.minus(reducer.reduce(one), reducer.reduce(other)))


def drawn(draw: random.Random, depth: int) -> Tree:
    """A tree of the kinds that exact arithmetic decides."""
    if not depth:
        number = Fraction(draw.randrange(-4, 9), draw.randrange(1, 5))
        return draw.choice(
            [number, number, X, Y, PI, EULER, IMAGINARY, ("root", Fraction(draw.randrange(1, 30)), Fraction(2))]
        )
    kind = draw.choice(["+", "+", "*", "*", "/", "^"])
    if kind == "^":
        return ("^", drawn(draw, depth - 1), Fraction(draw.randrange(-2, 4)))
    return (kind, drawn(draw, depth - 1), drawn(draw, depth - 1))


def rewritten(draw: random.Random, tree: Tree) -> Tree:
    """The same value in another form: sums and products turned, differences of squares, 1 as a quotient."""
    if not isinstance(tree, tuple) or tree[0] in ("symbol", "constant", "root"):
        return ("*", tree, ("/", X, X)) if draw.random() < 0.2 else tree
    head, *parts = tree
    parts = [rewritten(draw, part) for part in parts]
    if head in "+*":
        return (head, *parts[::-1])
    if head == "/":
        return ("*", parts[0], ("^", parts[1], Fraction(-1)))
    if parts[1] == 2:
        return ("+", ("*", ("+", parts[0], Fraction(-1)), ("+", parts[0], Fraction(1))), Fraction(1))
    return tree


@pytest.mark.parametrize("seed", range(300))
def test_verdicts_agree_with_values(seed):
    draw = random.Random(seed)
    one = drawn(draw, 3)
    other = rewritten(draw, one) if seed % 2 else drawn(draw, 3)
    try:
        found = verdict(one, other)
    except (TooLarge, Undefined):
        return
    values = [sympy.N(build(tree).subs(AT), 60) for tree in (one, other)]
    is_same = abs(values[0] - values[1]) < 1e-40 * max(1, abs(values[0]))
    assert found in (bool(is_same), None)
    assert not (is_same and differ(one, other))
    if seed % 2:
        assert found is True


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (r"\sqrt{6}", r"\sqrt{2}\sqrt{3}", True),
        (r"\sqrt[4]{4}", r"\sqrt{2}", True),
        (r"\sqrt{12} - \sqrt{27}", r"-\sqrt{3}", True),
        (r"\frac{1}{\sqrt{2}+1}", r"\sqrt{2}-1", True),
        (r"\sqrt{2} + \sqrt{3}", r"\sqrt{5}", False),
        (r"\sqrt[3]{-8}", "-2", True),
        (r"(-8)^{1/3}", "-2", None),  # the principal root is complex: nothing is said
        (r"\sqrt{-4}", "2i", True),
        ("i^3", "-i", True),
        (r"4^x", r"2^{2x}", True),
        (r"e^{x+y}", r"e^x e^y", True),
        (r"x^{n+1}", r"x \cdot x^n", True),
        (r"\ln 12", r"2\ln 2 + \ln 3", True),
        (r"\log_4 8", r"\frac{3}{2}", True),
        (r"\sin(x+1)", r"\sin(1+x)", True),
        (r"\sin x", r"\cos x", None),
        (r"\sqrt{x^2}", "x", None),
        # Roots of products of primes beyond trial division: equal, and not recognised as primes.
        (r"\sqrt{10000019 \cdot 10000079}", r"\sqrt{10000019}\sqrt{10000079}", None),
        (r"\frac{2^{901}+1}{5\cdot 2^{902}}", r"\frac{1}{5\cdot 2^{902}}", False),
    ],
)
def test_exact(one, other, expected):
    assert verdict(parse(plain_latex(one)), parse(plain_latex(other))) is expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10^{40} + 1 - 10^{40}", "1"),  # all digits cancel
        (r"\sqrt{10^{30} + 1} - 10^{15}", r"\frac{1}{\sqrt{10^{30}+1} + 10^{15}}"),
        (r"\cos^2 x + \sin^2 x", "1"),
        (r"\ln(x^2)", r"2 \ln x"),  # only where both are real
        (r"\frac{1}{\sqrt{2}^2 - 2}", "5"),  # division by what is zero but for rounding
        (r"\lfloor \sqrt{2} \cdot \sqrt{2} \rfloor", "2"),  # a step
        (r"\tan\frac{\pi}{2}", "5"),
    ],
)
def test_floating_point_refutes_nothing_that_may_be_equal(one, other):
    assert not differ(parse(plain_latex(one)), parse(plain_latex(other)))


@pytest.mark.parametrize(
    ("one", "other"),
    [(r"\sin x", r"\cos x"), (r"\sqrt{x^2}", "x"), (r"\pi", "3.14159265"), (r"e^\pi - \pi", "20"), ("|x|", "x")],
)
def test_floating_point_refutes(one, other):
    assert differ(parse(plain_latex(one)), parse(plain_latex(other)))


@pytest.mark.parametrize("text", ["9^{9^{9}}", "(10^9)!", "(a+b+c+d+f)^{64}", r"\binom{10^6}{500000}", "2^{10^6}"])
def test_large_values_are_refused(text):
    with pytest.raises(TooLarge):
        Reducer().reduce(parse(plain_latex(text)))
