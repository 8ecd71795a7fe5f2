r"""LaTeX and plain expressions as trees. Reads all of the text or refuses it; never evaluates anything.

A tree is a number (Fraction), or a tuple whose head says what it is:
("symbol", "x_1")   ("constant", "pi" | "e" | "i" | "infinity")   ("+", a, b, ...)   ("*", a, b, ...)   ("/", a, b)
("^", a, b)   ("root", a, n): the real n-th root where there is one   ("call", "sin", a)   ("!", a)   ("binomial", n, k)
("sum" | "product", "k", from, to, body)   ("integral", "x", from, to, body), without bounds ("integral", "x", body)
("limit", "x", to, body)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from rft_core.rewards.maths.tokens import GREEK, NoExpression, number_of, repeating_of, tokens_of

Tree = Any

MAX_DEPTH = 40
MAX_TREE_DEPTH = 80


def parse(text: str) -> Tree:
    r"""The tree of plain LaTeX (text.plain_latex). Raises NoExpression.

    >>> parse(r"2\frac{1}{4}"), parse(r"x/2")
    (('+', Fraction(2, 1), ('/', Fraction(1, 1), Fraction(4, 1))), ('/', ('symbol', 'x'), Fraction(2, 1)))
    """
    parser = _Parser(tokens_of(text))
    tree = parser.sum()
    if not parser.is_done:
        raise NoExpression(f"cannot read {parser.rest()!r}")
    _check_depth(tree)
    return tree


def _check_depth(tree: Tree) -> None:
    """What reads trees recurses into them."""
    level = [tree]
    for _ in range(MAX_TREE_DEPTH):
        level = [part for inner in level if isinstance(inner, tuple) for part in inner[1:]]
        if not level:
            return
    raise NoExpression(f"more than {MAX_TREE_DEPTH} deep")


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._in_call = 0

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._tokens)

    def rest(self) -> str:
        return "".join(text for _, text in self._tokens[self._at : self._at + 8])

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else END

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, *texts: str) -> str | None:
        if self._at < len(self._tokens) and (text := self._tokens[self._at][1]) in texts:
            self._at += 1
            return text
        return None

    def _expect(self, text: str) -> None:
        found = self._take()[1]
        if found != text:
            raise NoExpression(f"{text!r} must come next, found {found!r}")

    def sum(self) -> Tree:
        terms = [self._term()]
        while sign := self._accept("+", "-"):
            term = self._term()
            terms.append(_negative(term) if sign == "-" else term)
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def _term(self) -> Tree:
        is_negative = False
        while sign := self._accept("+", "-"):
            is_negative ^= sign == "-"
        tree = self._power()
        while True:
            if operator := self._accept("*", "/"):
                factor = self._signed_power()
                tree = _product(tree, factor) if operator == "*" else ("/", tree, factor)
            elif self._begins_factor():
                tree = self._juxtaposed(tree)
            else:
                return _negative(tree) if is_negative else tree

    def _begins_factor(self) -> bool:
        kind, text = self._peek()
        if kind in ("symbol", "number", "spaced number", "repeating", "based") or text in ("(", "[", "{"):
            return True
        return kind == "command" and (text in READERS or text in CONSTANTS or text in GREEK)

    def _juxtaposed(self, tree: Tree) -> Tree:
        kind, text = self._peek()
        before = self._tokens[self._at - 1][1]
        factor = self._power()
        is_whole = isinstance(tree, Fraction) and tree.denominator == 1
        if kind == "spaced number" and is_whole and isinstance(factor, Fraction):  # 2 1/4
            if self._accept("/"):
                divisor = self._power()
                if isinstance(divisor, Fraction) and divisor and 0 < factor / divisor < 1:
                    return ("+", tree, factor / divisor)
            raise NoExpression("two numbers stand side by side")
        if kind in ("number", "spaced number") and before != "!":
            raise NoExpression("a number stands behind its factor")
        if is_whole and text == "\\frac" and _is_proper(factor):
            return ("+", tree, factor)
        return _product(tree, factor)

    def _signed_power(self) -> Tree:
        is_negative = False
        while sign := self._accept("+", "-"):
            is_negative ^= sign == "-"
        tree = self._power()
        return _negative(tree) if is_negative else tree

    def _power(self) -> Tree:
        base = self._postfixed()
        if not self._accept("^", "**"):
            return base
        if self._accept("\\circ"):
            return self._degrees(base)
        if self._tokens[self._at : self._at + 3] == CIRCLE:
            self._at += 3
            return self._degrees(base)
        self._descend()
        exponent = self._signed_power()
        self._depth -= 1
        return ("^", base, exponent)

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpression(f"more than {MAX_DEPTH} deep")

    def _degrees(self, base: Tree) -> Tree:
        """Degrees are angles inside functions; elsewhere the sign says no more than a unit does."""
        return ("/", ("*", base, ("constant", "pi")), Fraction(180)) if self._in_call else base

    def _postfixed(self) -> Tree:
        self._descend()
        tree = self._primary()
        self._depth -= 1
        while self._accept("!"):
            tree = ("!", tree)
        return tree

    def _primary(self) -> Tree:
        kind, text = self._take()
        if kind in ("number", "spaced number"):
            return number_of(text)
        if kind == "repeating":
            return repeating_of(text)
        if kind == "based":  # of two spellings only: in which base a number was wanted, nobody says
            return ("symbol", re.sub(r"[{}]", "", text))
        if kind == "symbol":
            return ("constant", text) if text in ("e", "i") else ("symbol", text)
        if text in ("(", "[", "{"):
            inner = self.sum()
            self._expect({"(": ")", "[": "]", "{": "}"}[text])
            return inner
        if text == "|":
            inner = self.sum()
            self._expect("|")
            return ("call", "abs", inner)
        if text in CONSTANTS:
            return ("constant", CONSTANTS[text])
        if text in GREEK:
            return ("symbol", text + self._subscript())
        if text in READERS:
            return READERS[text](self)
        raise NoExpression(f"cannot read {text!r}" if text else "it ends too soon")

    def _subscript(self) -> str:
        if not self._accept("_"):
            return ""
        if self._accept("{"):
            parts = []
            while not self._accept("}"):
                kind, text = self._take()
                if kind == "end":
                    raise NoExpression("it ends too soon")
                parts.append(text)
            return "_" + "".join(parts)
        return "_" + self._take()[1]

    def _argument(self, takes_digit: bool) -> Tree:
        """{...}, or what follows a command without braces: one digit of \\frac12, all of \\sqrt12."""
        kind, text = self._peek()
        if kind in ("number", "spaced number") and takes_digit and len(text) > 1 and text.isdigit():
            self._tokens[self._at] = (kind, text[1:])
            return Fraction(int(text[0]))
        return self._postfixed()

    def fraction(self) -> Tree:
        top = self._argument(True)
        return ("/", top, self._argument(True))

    def binomial(self) -> Tree:
        top = self._argument(True)
        return ("binomial", top, self._argument(True))

    def square_root(self) -> Tree:
        index: Tree = Fraction(2)
        if self._accept("["):
            index = self.sum()
            self._expect("]")
        return ("root", self._argument(False), index)

    def bracketed(self, name: str, closing: str) -> Tree:
        inner = self.sum()
        self._expect(closing)
        return ("call", name, inner)

    def call(self, name: str) -> Tree:
        base: Tree = None
        power: Tree = None
        if name == "log" and self._accept("_"):
            base = self._argument(True)
        if self._accept("^"):
            power = self._signed_power()
        self._in_call += 1
        if self._peek()[1] in ("(", "[", "{", "|"):
            argument = self._postfixed()
        else:
            argument = self._power()
            while self._begins_factor() and self._peek()[1].removeprefix("\\") not in CALLS:
                argument = self._juxtaposed(argument)
            if self._peek()[1] == "/" and self._tokens[self._at + 1 : self._at + 2] and argument == CONSTANT_PI:
                self._at += 1
                argument = ("/", argument, self._power())  # sin pi/6
        self._in_call -= 1
        if power == Fraction(-1) and f"arc{name}" in CALLS:
            return ("call", f"arc{name}", argument)
        tree = _called(name, argument, base)
        return tree if power is None else ("^", tree, power)

    def series(self, head: str) -> Tree:
        self._expect("_")
        self._expect("{")
        name = self._take()
        if name[0] != "symbol" and name[1] != "i":
            raise NoExpression("an index must come next")
        self._expect("=")
        start = self.sum()
        self._expect("}")
        self._expect("^")
        end = self._argument(False)
        return (head, name[1], start, end, self._bound_body(name[1]))

    def integral(self) -> Tree:
        bounds: tuple[Tree, ...] = ()
        if self._accept("_"):
            start = self._signed_argument()
            self._expect("^")
            bounds = (start, self._signed_argument())
        body = self.sum()
        found = _differential(body)
        if found is None:
            raise NoExpression("an integral must end in its variable's differential")
        name, integrand = found
        return ("integral", name, *bounds, integrand)

    def limit(self) -> Tree:
        self._expect("_")
        self._expect("{")
        name = self._take()[1]
        if self._take()[1] not in ("\\to", "\\rightarrow"):
            raise NoExpression("\\to must come next")
        to = self.sum()
        self._expect("}")
        return ("limit", name, to, self._bound_body(name))

    def _bound_body(self, name: str) -> Tree:
        body = self._term()
        return _renamed(body, ("constant", "i"), ("symbol", "i")) if name == "i" else body

    def _signed_argument(self) -> Tree:
        sign = self._accept("-")
        tree = self._argument(True)
        return _negative(tree) if sign else tree


def _product(*factors: Tree) -> Tree:
    """Flat, so that long products are not deep."""
    if len(factors) == 1:
        return factors[0]
    first, *others = factors
    return ("*", *first[1:], *others) if isinstance(first, tuple) and first[0] == "*" else ("*", *factors)


def _negative(tree: Tree) -> Tree:
    return -tree if isinstance(tree, Fraction) else ("*", Fraction(-1), tree)


def _is_proper(tree: Tree) -> bool:
    if not (isinstance(tree, tuple) and tree[0] == "/" and all(isinstance(part, Fraction) for part in tree[1:])):
        return False
    return 0 < tree[1] < tree[2] and tree[1].denominator == tree[2].denominator == 1


def _called(name: str, argument: Tree, base: Tree) -> Tree:
    if name == "exp":
        return ("^", ("constant", "e"), argument)
    if name in ("log", "ln"):
        tree: Tree = ("call", "ln", argument)
        return tree if base is None else ("/", tree, ("call", "ln", base))
    return ("call", name, argument)


def _differential(tree: Tree) -> tuple[str, Tree] | None:
    """(x, f) of a product that ends in d x, which reads as the symbols d and x."""
    if not isinstance(tree, tuple):
        return None
    if tree[0] == "*" and isinstance(tree[-1], tuple) and tree[-1][0] == "symbol" and tree[-2] == ("symbol", "d"):
        return tree[-1][1], _product(*tree[1:-2]) if len(tree) > 3 else Fraction(1)
    if tree[0] == "*" and tree[1] == Fraction(-1) and (inner := _differential(tree[2])):
        return inner[0], _negative(inner[1])
    if tree[0] == "+" and (last := _differential(tree[-1])):
        return last[0], ("+", *tree[1:-1], last[1])
    return None


def _renamed(tree: Tree, old: Tree, new: Tree) -> Tree:
    if tree == old:
        return new
    return tuple(_renamed(part, old, new) for part in tree) if isinstance(tree, tuple) else tree


END = ("end", "")
CIRCLE = [("operator", "{"), ("command", "\\circ"), ("operator", "}")]
CONSTANT_PI = ("constant", "pi")
CONSTANTS = {"\\pi": "pi", "\\infty": "infinity"}
CALLS = {
    *(
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "ln",
        "log",
        "exp",
    )
}
READERS: dict[str, Callable[[_Parser], Tree]] = {
    "\\frac": _Parser.fraction,
    "\\binom": _Parser.binomial,
    "\\sqrt": _Parser.square_root,
    "\\lfloor": partial(_Parser.bracketed, name="floor", closing="\\rfloor"),
    "\\lceil": partial(_Parser.bracketed, name="ceiling", closing="\\rceil"),
    "\\|": partial(_Parser.bracketed, name="abs", closing="\\|"),
    "\\sum": partial(_Parser.series, head="sum"),
    "\\prod": partial(_Parser.series, head="product"),
    "\\int": _Parser.integral,
    "\\lim": _Parser.limit,
    **{f"\\{name}": partial(_Parser.call, name=name) for name in sorted(CALLS)},
}
