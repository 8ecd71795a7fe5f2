"""Letters of multiple choice in a text."""

from __future__ import annotations

import re

LETTER = r"[A-Za-z]"


def option_in(text: str) -> str | None:
    r"""The letter that a short answer names: B, (B), B), B., **B**, B: its text, option B, \text{(B)} its text.

    >>> option_in("(d)"), option_in(r"\textbf{(E)} 12"), option_in("C: the mass doubles"), option_in("I don't know")
    ('D', 'E', 'C', None)
    """
    plain = _plain(text)
    if SEVERAL.match(plain):
        return None
    match = NAMED.match(plain)
    return str(match[match.lastgroup or 0]).upper() if match else None


def options_in(text: str) -> list[str]:
    """Letters that prose speaks of as options, in order, each time it does: option B, choose B, (B), a line of its own.
    Where there are none, capital letters that stand alone, but for A and I, which are words."""
    plain = _plain(text)
    found = [str(match[match.lastgroup or 0]).upper() for match in SPOKEN.finditer(plain)]
    return found or [match[0] for match in ALONE.finditer(plain)]


def is_option(text: str) -> bool:
    r"""Whether an answer is one capital letter, plain or as (B), \text{B}, B., or a small one in brackets."""
    return re.fullmatch(r"\(?[A-Z]\)?[.:]?|\([a-z]\)", _plain(text).strip()) is not None


def names_several(text: str) -> bool:
    return SEVERAL.match(_plain(text)) is not None


def _plain(text: str) -> str:
    text = re.sub(
        r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm|rm|bf)(?![A-Za-z])\s*(?:\{([^{}]*)\})?", r"\1 ", text
    )
    text = re.sub(r"\\[,;:! ]|~|\\quad|\*\*|__|[`$]|\\[()\[\]]|[{}]", " ", text)
    return re.sub(r"[ \t]+", " ", text).strip()


END = r"(?=$|\s*[.:,;!?](?!\d)|\s*\)|\s+[-–—]|\s*\n|\s+(?:because|since|as|which)\b|\s+\()"
NAMED = re.compile(
    r"\W*(?i:(?:the\s+)?(?:correct\s+|final\s+)?(?:option|choice|answer|letter)(?:\s+is)?\s*:?\s*)?"
    rf"(?:[(\[]\s*(?P<wrapped>{LETTER})\s*[)\]]|(?P<plain>[A-Z])\)|(?P<bare>[A-Z]){END}|(?P<small>[a-z])\W*$)",
)
SEVERAL = re.compile(
    rf"\W*(?:either\s+|both\s+|options?\s+)?[(\[]?{LETTER}[)\]]?\s*(?:,|/|&|\bor\b|\band\b)\s*(?:or\s+|and\s+)?[(\[]?[A-Z]\b[)\]]?",
    re.IGNORECASE,
)
SPOKEN = re.compile(
    r"(?:\b(?:option|choice|letter)s?\s+(?:is\s+)?[(\[]?(?P<said>[A-Z])\b"
    r"|\b(?:go(?:es|ing)?\s+(?:for|with)|choose|chose|choosing|pick|select|answer\s+is)\s+(?:option\s+)?[(\[]?(?P<chosen>[A-Z])(?![\w'])"
    r"|\((?P<wrapped>[A-Z])\)|(?:^|\n)[ \t]*(?P<line>[A-Z])[ \t]*[.)]?[ \t]*(?=\n|$))"
)
ALONE = re.compile(r"(?<![\w'’-])[B-HJ-Z](?![\w'’-])")
