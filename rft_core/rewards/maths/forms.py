r"""An answer's text as what it is: an expression with unit or percent sign, a collection, an interval, a union, a
matrix, a relation, a ratio, or words.

A reading is exact about brackets: (1, 2) is an open interval or a point, [1, 2] is neither, {1, 2} has no order; values
without brackets (1, 2; 1 and 2) are taken as either. \pm stands for both values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rft_core.rewards.maths.parser import Tree, parse
from rft_core.rewards.maths.text import MAX_CHARACTERS, plain_latex
from rft_core.rewards.maths.tokens import NoExpression
from rft_core.rewards.maths.units import Unit, split_unit

MAX_PARTS = 200
MAX_NESTING = 12


@dataclass(frozen=True, slots=True)
class Expression:
    tree: Tree
    unit: Unit | None = None
    is_percent: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """`brackets`: "()", "[]", "(]", "[)", "{}" or "" for values side by side."""

    brackets: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Union:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Without:
    """A set but for the elements of another."""

    whole: Any
    part: Any


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Any, ...], ...]
    is_determinant: bool = False


@dataclass(frozen=True, slots=True)
class Relation:
    """a < b <= c: `sides` has one more than `signs`."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    parts: tuple[Expression, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Text without mathematics, folded; `is_formula` where it looks like mathematics that we cannot read."""

    text: str
    is_formula: bool = False
    problem: str = ""


Form = Any


@lru_cache(maxsize=20_000)
def read(text: str) -> Form:
    """The form of an answer. Never raises: what cannot be read is Words."""
    if len(text) > MAX_CHARACTERS:
        return Words(text, True, f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
    if NUMBER.fullmatch(text):  # most answers are
        return Expression(Fraction(text))
    return read_plain(plain_latex(text))


def read_plain(text: str, depth: int = 0) -> Form:
    text = text.strip().lstrip("= ")
    if depth > MAX_NESTING or not text:
        return Words(text, bool(text), "it is nested too deep" if text else "it is empty")
    for reader in READERS:
        form = reader(text, depth)
        if form is not None:
            return form
    return _expression(text)


def as_listed(text: str) -> Form | None:
    """12,345 as the values 12 and 345: the other reading of thousands."""
    plain = plain_latex(text) if len(text) <= MAX_CHARACTERS else ""
    if not re.fullmatch(r"\d{1,3}(,\d{3})+", plain):
        return None
    return Group("", tuple(_expression(part) for part in plain.split(",")))


def top_level(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """(part, the separator behind it) where the separator stands outside all brackets."""
    parts, start, depth, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\" and text[position + 1 : position + 2] in ("{", "}", "|", "\\"):
            depth += {"{": 1, "}": -1}.get(text[position + 1], 0)
            position += 2
            continue
        depth += (character in "([{") - (character in ")]}")
        match = separator.match(text, position) if depth == 0 else None
        if match and match.end() > position:
            parts.append((text[start:position], match[0]))
            position = start = match.end()
        else:
            position += 1
    return [*parts, (text[start:], "")]


def _both_signs(text: str, depth: int) -> Form | None:
    if "\\pm" not in text and "\\mp" not in text:
        return None
    one = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    other = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    if "\\pm" in one:
        return None
    forms = [read_plain(side, depth + 1) for side in (one, other)]
    return Group("{}", tuple(forms))


def _membership(text: str, depth: int) -> Form | None:
    match = MEMBERSHIP.match(text)
    return read_plain(text[match.end() :], depth + 1) if match else None


def _named_set(text: str, depth: int) -> Form | None:
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Group("{}", ())
    if text in ("\\mathbb{R}", "\\mathbf{R}", "\\text{R}") or ALL_REALS.fullmatch(text):
        return read_plain("(-\\infty, \\infty)", depth + 1)
    return None


def _union(text: str, depth: int) -> Form | None:
    if "\\cup" in text and len(parts := top_level(text, UNION)) > 1:
        return Union(tuple(read_plain(part, depth + 1) for part, _ in parts[:MAX_PARTS]))
    if "\\setminus" in text and len(parts := top_level(text, SETMINUS)) == 2:
        return Without(read_plain(parts[0][0], depth + 1), read_plain(parts[1][0], depth + 1))
    return None


def _matrix(text: str, depth: int) -> Form | None:
    match = MATRIX.fullmatch(text)
    if match is None:
        return None
    content = re.sub(r"^\{[lcr|]*\}", "", match["content"].strip()) if match["kind"] == "array" else match["content"]
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", content) if row.strip()]
    if len(rows) > MAX_PARTS or "\\begin" in content:
        return None
    cells = tuple(tuple(read_plain(cell, depth + 1) for cell in row.split("&")) for row in rows)
    return Matrix(cells, match["kind"] == "vmatrix")


def _values(text: str, depth: int) -> Form | None:
    parts = _split_values(text)
    if parts is None:
        return None
    return Group("", tuple(read_plain(part, depth + 1) for part in parts))


def _split_values(text: str, inside: bool = False) -> list[str] | None:
    """The values of a list, or null for one value. A comma with three digits behind it is no separator where others
    have a space, or outside brackets."""
    if not any(mark in text for mark in (",", ";", "\\text", " and ", " or ")):
        return None
    parts = [part.strip() for part, _ in top_level(text, SEPARATOR_SPACED)]
    is_grouped = all(GROUPED.fullmatch(part) for part in parts if "," in part)
    if not (is_grouped and (len(parts) > 1 or not inside)) or any("," in part and not is_grouped for part in parts):
        parts = [part.strip() for part, _ in top_level(text, SEPARATOR)]
    parts = [part for part in parts if part]
    return parts if 1 < len(parts) <= MAX_PARTS else None


def _relation(text: str, depth: int) -> Form | None:
    if not any(mark in text for mark in RELATION_MARKS):
        return None
    parts = top_level(text, RELATION)
    if not 1 < len(parts) <= 6 or not all(part.strip() for part, _ in parts):
        return None
    sides = tuple(read_plain(part, depth + 1) for part, _ in parts)
    return Relation(sides, tuple(SIGNS.get(sign.strip(), sign.strip()) for _, sign in parts[:-1]))


def _bracketed(text: str, depth: int) -> Form | None:
    kinds = (kind for kind in BRACKETS if text.startswith(kind[0]) and text.endswith(kind[1]) and len(text) > 1)
    opening, closing, brackets = next(kinds, ("", "", ""))
    if not brackets or len(text) < len(opening) + len(closing):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    if not _is_balanced(inner):
        return None
    if brackets == "{}" and (builder := SET_BUILDER.match(inner)):
        return read_plain(inner[builder.end() :], depth + 1)
    parts = _split_values(inner, inside=True)
    if parts is not None:
        return Group(brackets, tuple(read_plain(part, depth + 1) for part in parts))
    if opening == "\\{":
        return Group("{}", (read_plain(inner, depth + 1),))
    return read_plain(inner, depth + 1) if brackets in ("()", "{}") else None


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _ratio(text: str, depth: int) -> Form | None:
    text = TO.sub(":", text)
    if ":" not in text or "\\text" in text:
        return None
    parts = [part for part, _ in top_level(text, COLON)]
    forms = [_expression(part.strip()) for part in parts]
    if len(parts) < 2 or not all(isinstance(form, Expression) and form.unit is None for form in forms):
        return None
    return Ratio(tuple(forms), re.sub(r"\s", "", text))


def _expression(text: str) -> Form:
    stripped = REMARK.sub("", LABEL.sub("", text)).strip() or text
    percent = PERCENT.search(stripped)
    number, unit = (stripped[: percent.start()].strip(), None) if percent else (stripped, None)
    if number and (known := split_unit(number, is_known=True))[1] is not None:
        number, unit = known
    if number:
        try:
            return Expression(parse(number), unit if unit and unit.kind else None, percent is not None)
        except NoExpression as error:
            problem = str(error)
        number, unit = split_unit(number)
        if unit is not None:
            try:
                return Expression(parse(number), unit if unit.kind else None, percent is not None)
            except NoExpression:
                pass
    else:
        problem = "it is empty"
    return words(text, problem)


def words(text: str, problem: str = "") -> Words:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", lambda match: match[1].casefold(), text)
    plain = re.sub(r"\s+", " ", plain.replace("\\ ", " ").replace("\\%", "%")).strip()
    is_formula = not WORDLIKE.fullmatch(plain)
    folded = plain.casefold().strip(" .,;:!?'\"") if not is_formula else plain.replace(" ", "")
    return Words(folded, is_formula, problem)


NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?", re.ASCII)
ALL_REALS = re.compile(r"(?:\\text\s*\{)?\s*all real(?:s| numbers)\s*\}?", re.IGNORECASE)
MEMBERSHIP = re.compile(r"[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])")
SET_BUILDER = re.compile(r"\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?[:|](?=[^|:]*[<>=]|[^|:]*\\[gl]e)")
UNION = re.compile(r"\\cup(?![A-Za-z])|\\text\{\s*or\s*\}(?=\s*[(\[])")
SETMINUS = re.compile(r"\\setminus(?![A-Za-z])")
MATRIX = re.compile(
    r"\\begin\s*\{(?P<kind>[pbBvV]?(?:small)?matrix|array)\}(?P<content>.*)\\end\s*\{(?P=kind)\}", re.DOTALL
)
JOINED = r"\s*\\text\s*\{\s*,?\s*(?:and|or|und|et)\s*\}\s*|\s+(?:and|or)\s+"
SEPARATOR_SPACED = re.compile(rf",\s*(?:\\text\s*\{{\s*(?:and|or)\s*\}}|(?:and|or)\b)\s*|,(?=\s)|;|{JOINED}")
SEPARATOR = re.compile(rf",\s*(?:\\text\s*\{{\s*(?:and|or)\s*\}}|(?:and|or)\b)\s*|,|;|{JOINED}")
GROUPED = re.compile(r"[-+]?(?:\\\$\s*)?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*(?:\\?%|\\text\{[^{}]*\}|[A-Za-z ]+))?")
RELATION_MARKS = ("=", "<", ">", "\\le", "\\ge", "\\ne")
RELATION = re.compile(r"<=|>=|!=|=|<|>|\\(?:le|ge|ne)(?![A-Za-z])")
SIGNS = {"\\le": "<=", "\\ge": ">=", "\\ne": "!="}
BRACKETS = [
    ("\\{", "\\}", "{}"),
    ("\\langle", "\\rangle", "()"),
    ("<", ">", "()"),
    ("(", ")", "()"),
    ("[", "]", "[]"),
    ("(", "]", "(]"),
    ("[", ")", "[)"),
    ("{", "}", "{}"),
]
COLON = re.compile(r":")
TO = re.compile(r"\\text\s*\{\s*to\s*\}|(?<=\d) to (?=\d)")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|%)\s*\}|(?<=\d)\s*percent)$")
LABEL = re.compile(r"^\\text\s*\{[^{}]*(?:[:=]|\b(?:is|are))\s*\}")
REMARK = re.compile(r",?\s*\\text\s*\{\s*(?:\(|(?:since|because|where)\b)[^{}]*\}$")  # behind an expression
WORDLIKE = re.compile(r"[^\W\d_][^\\^_={}<>|*/+]*")
READERS = (_named_set, _both_signs, _membership, _union, _matrix, _bracketed, _values, _relation, _ratio)
