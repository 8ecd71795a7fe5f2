"""Units behind a number: 24 cm^2, 3\\text{ hours}, \\$5. Words that are no known unit (5 apples) count as one of their
own. A unit that only one side has is ignored; 1 m is 100 cm; other units of one kind differ, and so do kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    """`kind` of two units must agree; `factor` times the number is in the kind's first unit."""

    kind: str
    factor: Fraction = Fraction(1)


def split_unit(text: str, is_known: bool = False) -> tuple[str, Unit | None]:
    r"""(number, unit) of plain LaTeX that ends in a unit or begins with a currency sign; else the text and null.

    `is_known`: only if the unit is in our list.

    >>> split_unit(r"24 \text{cm}^2"), split_unit(r"\$5")
    (('24', Unit(kind='length^2', factor=Fraction(1, 1))), ('5', Unit(kind='dollar', factor=Fraction(1, 1))))
    """
    currency = CURRENCY.match(text)
    if currency:
        return (currency["sign"] + text[currency.end() :]).strip(), Unit(CURRENCIES[currency["currency"]])
    match = WORDS.search(text) or PLAIN_WORDS.search(text)
    if match is None or not match.start():
        return text, None
    number = text[: match.start()].strip()
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", match[0])
    if STOP_WORDS & set(words.casefold().split()):
        return text, None
    if large := LARGE.match(words):
        number, words = f"({number})*{POWERS[large[1].casefold()]}", words[large.end() :]
        if not words.strip():
            return number, Unit("")
    unit = unit_named(words)
    is_listed = all(re.sub(r"\^-?\d+$", "", kind) in {*UNITS, ""} for kind in unit.kind.split("/"))
    return (text, None) if is_known and not is_listed else (number, unit)


def unit_named(words: str) -> Unit:
    text = re.sub(r"[{}.*]", " ", words).casefold() if len(words.strip()) > 2 else re.sub(r"[{}.*]", " ", words)
    text = re.sub(r"\s*\^\s*(-?)\s*(\d)", r"^\1\2", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\b(?:per)\b|/", " / ", text)
    top, _, bottom = text.partition(" / ")
    unit = _product(top.strip())
    if not bottom.strip():
        return unit
    divisor = _product(bottom.strip())
    return Unit(f"{unit.kind}/{divisor.kind}", unit.factor / divisor.factor)


def _product(text: str) -> Unit:
    power = 1
    for word, value in (("square", 2), ("sq", 2), ("cubic", 3), ("cu", 3)):
        if text.startswith(f"{word} "):
            power, text = value, text.removeprefix(f"{word} ").strip()
    if match := re.fullmatch(r"(.*\S)\s*\^(-?\d)", text):
        text, power = match[1].strip(), int(match[2])
    if match := re.fullmatch(r"(.*\S)\s+(squared|cubed)", text):
        text, power = match[1], 2 if match[2] == "squared" else 3
    kind, factor = KNOWN.get(text) or KNOWN.get(text.casefold()) or (_singular(text.casefold()), Fraction(1))
    return Unit(kind if power == 1 else f"{kind}^{power}", factor**power)


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 3 else word


def _known() -> dict[str, tuple[str, Fraction]]:
    known = {}
    for kind, units in UNITS.items():
        for names, factor in units.items():
            for name in names.split():
                known[name] = (kind, Fraction(factor))
                if len(name) > 3:
                    known[f"{name}s"] = (kind, Fraction(factor))
    return known


UNITS: dict[str, dict[str, str | int]] = {
    "length": {
        "cm centimeter centimetre": 1,
        "mm millimeter millimetre": "1/10",
        "m meter metre": 100,
        "km kilometer kilometre": 100_000,
        "in inch inches": "127/50",
        "ft foot feet": "762/25",
        "yd yard": "2286/25",
        "mi mile": "804672/5",
    },
    "mass": {"g gram": 1, "mg milligram": "1/1000", "kg kilogram": 1000, "lb lbs pound": "45359237/100000"},
    "time": {
        "s sec second": 1,
        "ms millisecond": "1/1000",
        "min minute": 60,
        "h hr hrs hour": 3600,
        "day": 86400,
        "week": 604800,
    },
    "year": {"yr year": 1},
    "month": {"month": 1},
    "volume": {"L l liter litre": 1, "mL ml milliliter millilitre": "1/1000"},
    "angle": {"deg degree": 1},
    "unit": {"unit": 1},
    "dollar": {"dollar usd": 1, "cent": "1/100"},
    "euro": {"euro eur": 1},
    "force": {"N newton": 1},
    "energy": {"J joule": 1, "kJ": 1000},
    "power": {"W watt": 1, "kW": 1000},
    "speed": {"mph": 1},
    "clock": {"am a.m.": 1},
    "afternoon": {"pm p.m.": 1},
}
KNOWN = _known()
CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
CURRENCY = re.compile(r"(?P<sign>-?)\s*(?P<currency>\\\$|[€£¥])\s*(?=[-\d.])")
# \text{...} behind a number, with its power; or plain words of two letters and more, or one letter behind a space.
STOP_WORDS = {
    "and",
    "are",
    "because",
    "but",
    "for",
    "if",
    "is",
    "not",
    "or",
    "since",
    "so",
    "the",
    "then",
    "to",
    "with",
}
LARGE = re.compile(r"\s*(thousand|million|billion|trillion)s?\b", re.IGNORECASE)
POWERS = {"thousand": "10^3", "million": "10^6", "billion": "10^9", "trillion": "10^12"}
WORDS = re.compile(
    r"\s*(?:\\text\s*\{\s*[^{}]*\}\s*(?:\^\s*\{?\s*-?\d\s*\}?)?\s*[/*]?\s*)+$",
)
PLAIN_WORDS = re.compile(
    r"(?:(?<=\d)\s*(?:[A-Za-z]{2,}|(?<=\s)[msghLJNWV](?![A-Za-z]))|(?<=[\d}\])])\s+[A-Za-z]{3,})"
    r"(?:\s*\^\s*\{?\s*\d\s*\}?)?(?:(?:\s*/\s*|\s+)[A-Za-z]+\.?(?:\s*\^\s*\{?\s*\d\s*\}?)?){0,3}$"
)
