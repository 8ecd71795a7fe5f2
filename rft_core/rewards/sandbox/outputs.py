"""Whether a program printed what is expected."""

from __future__ import annotations

from itertools import zip_longest

SHOWN_CHARACTERS = 60


def difference(printed: str, expected: str, tolerance: float) -> str | None:
    """Null when equal, else what differs first.

    Lines are compared without white space at their ends, and without empty lines at the end. Lines that differ are
    compared word by word: words are equal as texts, or as numbers of which the expected one has a fraction or an
    exponent, within the tolerance (absolute or relative, whichever is larger). Whole numbers are compared exactly.

    >>> difference("0.333333 yes\\n\\n", "0.3333333333 yes", 1e-6), difference("3", "4", 1e-6)
    (None, "line 1 is '3', expected '4'")
    """
    ours, theirs = _lines(printed), _lines(expected)
    for number, (line, wanted) in enumerate(zip_longest(ours, theirs), start=1):
        if line is None or wanted is None:
            return f"line {number} is {_shown(line)}, expected {_shown(wanted)}"
        if line != wanted and not _is_close(line.split(), wanted.split(), tolerance):
            return f"line {number} is {_shown(line)}, expected {_shown(wanted)}"
    return None


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_close(words: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(
        word == want or _is_number_close(word, want, tolerance) for word, want in zip(words, wanted, strict=True)
    )


def _is_number_close(word: str, want: str, tolerance: float) -> bool:
    number, wanted = _number(word), _number(want)
    if number is None or wanted is None or want.lstrip("+-").isdigit():
        return number is not None and number == wanted
    return abs(number - wanted) <= tolerance * max(1.0, abs(wanted))


def _number(word: str) -> float | int | None:
    """A number as programs print it: no inf, no nan, no underscores."""
    plain = word.lstrip("+-")
    if not plain.isascii() or not plain.startswith(tuple("0123456789.")) or "_" in plain:
        return None
    try:
        number = int(word) if plain.isdigit() and len(plain) < 4000 else float(word)
    except ValueError:
        return None
    return number if abs(number) != float("inf") else None


def _shown(line: str | None) -> str:
    if line is None:
        return "missing"
    return repr(line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "...")
