"""Whether two expressions are equal, by the cheapest means that can tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from rft_core.rewards.maths.floating import BINDERS, differ
from rft_core.rewards.maths.normal_form import Quotient, Reducer, TooLarge, Undefined
from rft_core.rewards.maths.parser import Tree


@dataclass
class Oracle:
    """Answers True, False, or null where neither exact nor floating-point arithmetic can tell.

    `stages` gathers what was used; `note` says why something was not decided.
    """

    stages: set[str] = field(default_factory=set)
    note: str | None = None

    def is_equal(self, one: Tree, other: Tree) -> bool | None:
        if one == other:
            return True
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            self.stages.add("exact")
            return False
        signs = _infinite_sign(one), _infinite_sign(other)
        if any(signs) and (all(signs) or not (_has_limit(one) or _has_limit(other))):
            self.stages.add("exact")
            return signs[0] == signs[1]
        verdict = self._exactly(one, other)
        if verdict is not None:
            self.stages.add("exact")
            return verdict
        if differ(one, other):
            self.stages.add("floating")
            return False
        return self.last_resort(one, other)

    def last_resort(self, one: Tree, other: Tree) -> bool | None:
        """What the child overrides, which has sympy."""
        return None

    def ratio(self, one: Tree, other: Tree) -> Fraction | None:
        """c with one = c * other, where exact arithmetic finds it."""
        self.stages.add("exact")
        reducer = Reducer()
        try:
            return reducer.is_proportional(reducer.reduce(one), reducer.reduce(other))
        except (TooLarge, Undefined):
            return None

    def number(self, tree: Tree) -> Fraction | None:
        """The rational number that it is, if it is one."""
        try:
            return Reducer().reduce(tree).number
        except (TooLarge, Undefined):
            return None

    def reduced(self, tree: Tree) -> Quotient | None:
        try:
            return Reducer().reduce(tree)
        except (TooLarge, Undefined):
            return None

    def _exactly(self, one: Tree, other: Tree) -> bool | None:
        reducer = Reducer()
        try:
            return reducer.is_zero(reducer.minus(reducer.reduce(one), reducer.reduce(other)))
        except TooLarge as error:
            self.note = f"too large for exact arithmetic: {error}"
            return None
        except Undefined:
            return False


def _infinite_sign(tree: Tree) -> int:
    """1 or -1 of an infinity, 0 of anything else."""
    if tree == ("constant", "infinity"):
        return 1
    if isinstance(tree, tuple) and tree[0] == "*" and len(tree) == 3 and isinstance(tree[1], Fraction):
        return _infinite_sign(tree[2]) * (1 if tree[1] > 0 else -1 if tree[1] < 0 else 0)
    return 0


def _has_limit(tree: Tree) -> bool:
    return isinstance(tree, tuple) and (tree[0] in BINDERS or any(_has_limit(part) for part in tree[1:]))
