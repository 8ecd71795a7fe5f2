"""The signs of an expression, and the numbers among them."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_TOKENS = 2000
MAX_DIGITS = 2000


class NoExpression(ValueError):
    """The text is no expression that we can read; the message says why."""


def tokens_of(text: str) -> list[tuple[str, str]]:
    tokens = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise NoExpression(f"cannot read {text[position : position + 20]!r}")
        position = match.end()
        kind = str(match.lastgroup)
        if kind == "word":
            raise NoExpression(f"{match[0]!r} is a word")
        if kind == "space":
            continue
        if kind == "number" and match.start() and text[match.start() - 1].isspace():
            kind = "spaced number"
        tokens.append((kind, SUBSCRIPT_BRACES.sub("", match[0]) if kind == "symbol" else match[0]))
        if len(tokens) > MAX_TOKENS:
            raise NoExpression(f"more than {MAX_TOKENS} signs")
    return tokens


GREEK_NAMES = (
    *(
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
    ),
    *("rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "ell", "Gamma", "Delta", "Theta", "Lambda", "Xi"),
    *("Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega"),
)
GREEK = {f"\\{name}" for name in GREEK_NAMES}
SUBSCRIPT_BRACES = re.compile(r"[\s{}]")
TOKEN = re.compile(
    r"""
    (?P<space>\s+)
    | (?P<repeating>\d*\.\d*\\overline\s*\{\d+\})
    | (?P<based>\d+_(?:\d|\{\d+\}))
    | (?P<number>(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?(?:[eE][-+]?\d+(?![A-Za-z]))?|\.\d+(?:[eE][-+]?\d+)?)
    | (?P<command>\\[A-Za-z]+|\\[{}|%$\#&])
    | (?P<word>[A-Za-z]{4,})
    | (?P<symbol>[A-Za-z]'*(?:_(?:[A-Za-z0-9]|\{[^{}]*\}))?'*)
    | (?P<operator>\*\*|[-+*/^!()\[\]{}|,=_])
    """,
    re.VERBOSE,
)


def number_of(text: str) -> Fraction:
    if len(text) < 18 and text.isdigit():
        return Fraction(int(text))
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 4:
        raise NoExpression("a number is too long")
    return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def repeating_of(text: str) -> Fraction:
    whole, _, repeated = text.partition("\\overline")
    digits = repeated.strip(" {}")
    if len(text) > MAX_DIGITS:
        raise NoExpression("a number is too long")
    fixed = whole.partition(".")[2]
    return Fraction(f"0{whole}0") + Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(fixed))
