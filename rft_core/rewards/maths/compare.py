"""Whether two forms are the same answer: True, False, or null where only symbolic work could tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from rft_core.rewards.maths.floating import symbols
from rft_core.rewards.maths.forms import Expression, Form, Group, Matrix, Ratio, Relation, Union, Without, Words
from rft_core.rewards.maths.oracle import Oracle
from rft_core.rewards.maths.parser import Tree

MAX_PAIRS = 400  # comparisons for one collection without order

INFINITY = ("constant", "infinity")
ALL_NUMBERS = Group("()", (Expression(("*", Fraction(-1), INFINITY)), Expression(INFINITY)))


def compare(answer: Form, gold: Form, oracle: Oracle) -> bool | None:
    if answer == gold:
        return True
    answer, gold = _simplified(answer), _simplified(gold)
    if isinstance(answer, Words) or isinstance(gold, Words):
        return isinstance(answer, Words) and isinstance(gold, Words) and answer.text == gold.text
    if isinstance(answer, Relation) != isinstance(gold, Relation):
        if isinstance(answer, Relation):
            return _relation_and_value(answer, gold, oracle)
        return _relation_and_value(gold, answer, oracle)
    if isinstance(answer, Ratio) != isinstance(gold, Ratio):
        answer, gold = _as_fraction(answer), _as_fraction(gold)
    for one, other in ((answer, gold), (gold, answer)):
        if isinstance(one, Group) and one.brackets == "{}" and len(one.parts) == 1 and not isinstance(other, Group):
            return compare(one.parts[0], other, oracle)
    rule = RULES.get(type(answer))
    return rule(answer, gold, oracle) if rule is not None and type(answer) is type(gold) else False


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """False as soon as one is; then null if one is."""
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            result = None
    return result


def any_of(verdicts: Iterable[bool | None]) -> bool | None:
    result: bool | None = False
    for verdict in verdicts:
        if verdict:
            return True
        if verdict is None:
            result = None
    return result


def _simplified(form: Form) -> Form:
    """Inequalities in one variable as intervals, alternatives of them as unions."""
    if isinstance(form, Relation):
        return _interval(form) or form
    if isinstance(form, Group) and form.brackets == "" and all(isinstance(part, Relation) for part in form.parts):
        intervals = [_interval(part) for part in form.parts]
        if all(interval is not None for interval in intervals):
            return Union(tuple(intervals))
    if isinstance(form, Without) and form.whole == ALL_NUMBERS and isinstance(form.part, Group):
        return _all_but(form.part.parts[0]) if len(form.part.parts) == 1 else form
    if isinstance(form, Union) and len(form.parts) == 1:
        return form.parts[0]
    return form


def _all_but(value: Expression) -> Union:
    return Union((Group("()", (ALL_NUMBERS.parts[0], value)), Group("()", (value, ALL_NUMBERS.parts[1]))))


def _expressions(one: Expression, other: Expression, oracle: Oracle) -> bool | None:
    a, b = one.tree, other.tree
    if one.unit is not None and other.unit is not None and one.unit != other.unit:
        if one.unit.kind != other.unit.kind:
            return False
        a, b = _scaled(a, one.unit.factor), _scaled(b, other.unit.factor)
    pairs = [(a, b)]
    if one.is_percent and not other.is_percent:
        pairs.append((_scaled(a, Fraction(1, 100)), b))
    if other.is_percent and not one.is_percent:
        pairs.append((a, _scaled(b, Fraction(1, 100))))
    return any_of(oracle.is_equal(left, right) for left, right in pairs)


def _scaled(tree: Tree, factor: Fraction) -> Tree:
    return tree * factor if isinstance(tree, Fraction) else ("*", factor, tree)


def _groups(one: Group, other: Group, oracle: Oracle) -> bool | None:
    kinds = {one.brackets, other.brackets}
    if len(one.parts) != 2 and kinds <= {"", "()", "[]"} and len(kinds) > 1:
        kinds = {"", "()"}  # [1, 2, 3] is a list: no interval has three ends
    has_dots = any(_is_dots(part) for part in (*one.parts, *other.parts))
    if kinds == {"{}"} and not has_dots:
        return _same_set(one.parts, other.parts, oracle)
    if kinds in ({""}, {"", "{}"}) and not has_dots:
        return _same_values(one.parts, other.parts, oracle)
    if kinds == {"", "()"} or len(kinds) == 1 or (has_dots and kinds <= {"", "{}"}):
        return _in_order(one.parts, other.parts, oracle)
    return False


def _is_dots(part: Form) -> bool:
    return isinstance(part, Words) and part.text in ("\\ldots", "...", "\\ldots.")


def _in_order(one: tuple[Form, ...], other: tuple[Form, ...], oracle: Oracle) -> bool | None:
    if len(one) != len(other):
        return False
    return all_of(compare(a, b, oracle) for a, b in zip(one, other, strict=True))


def _same_set(one: tuple[Form, ...], other: tuple[Form, ...], oracle: Oracle) -> bool | None:
    rest = [part for part in one if part not in other], [part for part in other if part not in one]
    if (len(rest[0]) + len(rest[1])) * max(len(one), len(other)) > MAX_PAIRS:
        return _too_many(oracle)
    return all_of(
        any_of(compare(part, candidate, oracle) for candidate in candidates)
        for parts, candidates in ((rest[0], other), (rest[1], one))
        for part in parts
    )


def _same_values(one: tuple[Form, ...], other: tuple[Form, ...], oracle: Oracle) -> bool | None:
    """As often on one side as on the other. Takes the first equal partner: equality is transitive."""
    if len(one) != len(other):
        return False
    ours, theirs = list(one), list(other)
    for part in one:
        if part in theirs:
            ours.remove(part)
            theirs.remove(part)
    if len(ours) ** 2 > MAX_PAIRS:
        return _too_many(oracle)
    is_known = True
    for part in ours:
        verdicts = []
        for candidate in theirs:
            verdicts.append(compare(part, candidate, oracle))
            if verdicts[-1]:
                break
        if verdicts and verdicts[-1]:
            theirs.pop(len(verdicts) - 1)
        elif None in verdicts:
            is_known = False
        else:
            return False
    return True if is_known else None


def _too_many(oracle: Oracle) -> bool:
    oracle.note = "too many values to compare"
    return False


def _unions(one: Union, other: Union, oracle: Oracle) -> bool | None:
    return _same_values(one.parts, other.parts, oracle)


def _differences(one: Without, other: Without, oracle: Oracle) -> bool | None:
    return all_of((compare(one.whole, other.whole, oracle), compare(one.part, other.part, oracle)))


def _matrices(one: Matrix, other: Matrix, oracle: Oracle) -> bool | None:
    if one.is_determinant != other.is_determinant or [len(r) for r in one.rows] != [len(r) for r in other.rows]:
        return False
    return all_of(_in_order(a, b, oracle) for a, b in zip(one.rows, other.rows, strict=True))


def _ratios(one: Ratio, other: Ratio, oracle: Oracle) -> bool | None:
    if one.text == other.text:
        return True
    if len(one.parts) != len(other.parts) or (_is_time(one.text) and _is_time(other.text)):
        return False
    first, *rest = zip(one.parts, other.parts, strict=True)
    return all_of(
        oracle.is_equal(("*", first[0].tree, theirs.tree), ("*", first[1].tree, ours.tree)) for ours, theirs in rest
    )


def _is_time(text: str) -> bool:
    hours, _, minutes = text.partition(":")
    return hours.isdecimal() and minutes.isdecimal() and len(minutes) == 2 and int(minutes) < 60 and len(hours) < 3


def _as_fraction(form: Form) -> Form:
    if isinstance(form, Ratio) and len(form.parts) == 2 and not _is_time(form.text):
        return Expression(("/", form.parts[0].tree, form.parts[1].tree))
    return form


def _interval(relation: Relation) -> Form | None:
    """(a, b) of a < x < b, x > a and the like; two intervals for x != a."""
    if not all(isinstance(side, Expression) and side.unit is None for side in relation.sides):
        return None
    trees, signs = [side.tree for side in relation.sides], list(relation.signs)
    if signs[0] in (">", ">="):
        trees, signs = trees[::-1], [TURNED.get(sign, sign) for sign in signs[::-1]]
    if signs == ["!="] and any(_is_name(tree) for tree in trees):
        bound = Expression(trees[1] if _is_name(trees[0]) else trees[0])
        return None if symbols(bound.tree) else _all_but(bound)
    if not set(signs) <= {"<", "<="} or len(signs) > 2:
        return None
    places = [place for place, tree in enumerate(trees) if _is_name(tree)]
    if len(places) != 1 or (len(signs) == 2 and places != [1]):
        return None
    place = places[0]
    bounds = [tree for index, tree in enumerate(trees) if index != place]
    if any(symbols(bound) for bound in bounds):
        return None
    low = Expression(trees[place - 1]) if place else ALL_NUMBERS.parts[0]
    high = Expression(trees[place + 1]) if place < len(trees) - 1 else ALL_NUMBERS.parts[1]
    opening = "[" if place and signs[place - 1] == "<=" else "("
    closing = "]" if place < len(signs) and signs[place] == "<=" else ")"
    return Group(opening + closing, (low, high))


def _is_name(tree: Tree) -> bool:
    return isinstance(tree, tuple) and tree[0] == "symbol"


def _assigned(relation: Relation) -> tuple[Tree | None, Form] | None:
    """(name, value) of x = 5, f(x) = x^2 or x = 2 + 3 = 5; the name is null in 2 + 3 = 5."""
    if set(relation.signs) != {"="}:
        return None
    first, *_, last = relation.sides
    if isinstance(first, Group):
        is_point = all(isinstance(part, Expression) and _is_name(part.tree) for part in first.parts)
        return (None, last) if is_point else None
    if not isinstance(first, Expression):
        return (None, last) if isinstance(first, Words) and NAME.fullmatch(first.text) else None
    names = symbols(first.tree)
    if not names:
        return (None, last) if not isinstance(last, Expression) or not symbols(last.tree) else None
    is_name = _is_name(first.tree)
    is_application = isinstance(first.tree, tuple) and first.tree[0] == "*" and all(map(_is_name, first.tree[1:]))
    if is_application and len(first.tree) == 3 and FUNCTION_NAME.fullmatch(first.tree[1][1]):
        return first.tree, last
    if is_application and all(part[1].isupper() for part in first.tree[1:] if isinstance(part, tuple)):
        return first.tree, last  # AB is a segment
    if _is_derivative(first.tree):
        return first.tree, last
    if is_name and not (isinstance(last, Expression) and names & symbols(last.tree)):
        return first.tree, last
    return None


def _is_derivative(tree: Tree) -> bool:
    """dy/dx, which reads as a quotient of products with d."""
    if not isinstance(tree, tuple) or tree[0] != "/":
        return False
    return all(isinstance(part, tuple) and part[0] == "*" and part[1] == ("symbol", "d") for part in tree[1:])


def _relation_and_value(relation: Relation, value: Form, oracle: Oracle) -> bool | None:
    assigned = _assigned(relation)
    if assigned is None and relation.signs == ("=",):
        assigned = _assigned(Relation(relation.sides[::-1], relation.signs))
    if assigned is None:
        return False
    name, assigned_value = assigned
    if name is None and not _is_consistent(relation, oracle):
        return False
    if isinstance(value, Expression) and name is not None and _is_name(name) and name[1] in symbols(value.tree):
        return False
    return compare(assigned_value, value, oracle)


def _is_consistent(relation: Relation, oracle: Oracle) -> bool:
    """No side of a chain of constants contradicts the last."""
    *others, last = relation.sides
    return all(compare(side, last, oracle) is not False for side in others if isinstance(side, Expression))


def _relations(one: Relation, other: Relation, oracle: Oracle) -> bool | None:
    assigned = _assigned(one), _assigned(other)
    if assigned[0] and assigned[1] and assigned[0][0] == assigned[1][0]:
        return compare(assigned[0][1], assigned[1][1], oracle)
    if one.signs == other.signs and _in_order(one.sides, other.sides, oracle):
        return True
    forms = _difference(one), _difference(other)
    if forms[0] is None or forms[1] is None:
        return False
    (left, sign), (right, other_sign) = forms
    if sign != other_sign:
        return False
    ratio = oracle.ratio(left, right)
    if ratio is not None:
        return sign in ("=", "!=") or ratio > 0
    if symbols(left) != symbols(right):
        return False
    has_opaque = any((form := oracle.reduced(tree)) is None or form.is_opaque for tree in (left, right))
    if not has_opaque:
        return False
    return any_of(
        oracle.is_equal(left, ("*", Fraction(factor), right)) for factor in ((1, -1) if sign == "=" else (1,))
    )


def _difference(relation: Relation) -> tuple[Tree, str] | None:
    """(f, sign) of f = 0, f != 0, f > 0 or f >= 0."""
    if len(relation.signs) != 1 or not all(isinstance(side, Expression) for side in relation.sides):
        return None
    left, right = (side.tree for side in relation.sides)
    sign = relation.signs[0]
    if sign in ("<", "<="):
        left, right, sign = right, left, TURNED[sign]
    return ("+", left, ("*", Fraction(-1), right)), sign


TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
FUNCTION_NAME = re.compile(r"[fghpqPQFG]'*(?:_.*)?")
NAME = re.compile(r"[\\A-Za-z{}()'_ ]+")  # of something that we cannot read: area, \\angle ABC
RULES: dict[type, Callable[[Any, Any, Oracle], bool | None]] = {
    Expression: _expressions,
    Group: _groups,
    Union: _unions,
    Without: _differences,
    Matrix: _matrices,
    Ratio: _ratios,
    Relation: _relations,
}
