"""One spelling for the many ways to write the same LaTeX, plain text and Unicode.

The result is LaTeX without layout: no dollar signs, no \\left, one name per operator, \\text{...} for words.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARACTERS = 4000  # of one answer; a longer one is compared as text only


def plain_latex(text: str) -> str:
    r"""
    >>> plain_latex(r"$\left(2,\ \dfrac{9}{2}\right)$."), plain_latex("½ π²")
    ('(2, \\frac{9}{2})', '\\frac{1}{2} \\pi ^{2}')
    """
    text = without_dollars(_without_unicode(text))
    if "\\" in text:
        text = STYLE.sub(" ", LAYOUT.sub("", text))
        text = TEXT.sub(lambda match: _worded(match[1], match[2], match[0] == match.string.strip()), text)
        text = ROMAN.sub(lambda match: _roman(match[1]), text)
        text = MATH_FONT.sub(" ", text)  # around what holds braces, or around none
    if "," in text:
        text = GROUPED.sub(lambda match: match[0].replace("{,}", "").replace("\\,", "").replace("\\!", ""), text)
    text = SPACES.sub(" ", text)
    if "\\" in text:
        text = COMMAND.sub(lambda match: RENAMED.get(match[0], match[0]), text)
    text = OPERATOR_NAME.sub(r"\\\1 ", text)
    text = SPACED_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)
    text = CHOOSE.sub(r"\\binom{\1}{\2}", text) if "\\choose" in text else text
    text = TIMES_TEN.sub(r"\1*10^", text)
    return text.strip().rstrip(".;,").strip() if not text.endswith("\\.") else text.strip()


def without_dollars(text: str) -> str:
    """Without the delimiters of formulas; \\$ and a dollar sign before a number stay as \\$."""
    text = text.strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.replace(opening, " ").replace(closing, " ") if opening in text else text
    if "$" not in text:
        return text
    is_paired = len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    text = text.replace("\\$", "\\dollar ")
    text = text.replace("$", " ") if is_paired else text.replace("$", "\\dollar ")
    return text.replace("\\dollar", "\\$")


def _without_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = SUPERSCRIPTS.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = SUBSCRIPTS.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = "".join(_character(character) for character in text)
    return text.replace("\u2212", "-")


def _character(character: str) -> str:
    if character.isascii():
        return character
    if character in SIGNS:
        return SIGNS[character]
    plain = unicodedata.normalize("NFKC", character)
    if "\u2044" in plain:  # a vulgar fraction
        top, _, bottom = plain.partition("\u2044")
        return f"\\frac{{{top}}}{{{bottom}}}"
    if plain in SIGNS:
        return SIGNS[plain]
    if len(plain) == 1 and (name := unicodedata.name(plain, "")).startswith("GREEK SMALL LETTER ") and name.isascii():
        return f"\\{name.rsplit(' ', 1)[1].lower()} "
    return plain


def _worded(font: str, content: str, is_all: bool) -> str:
    """Words as \\text; a formula that stands in another font as itself. A lone letter may be an option or a set."""
    is_formula = NUMBER.fullmatch(content) if font.startswith("text") else FORMULA.fullmatch(content)
    is_formula = is_formula and (not is_all or any(map(str.isdigit, content)))
    return f"{{{content}}}" if is_formula else f"\\text{{{content}}}"


def _roman(content: str) -> str:
    content = content.strip()
    if with_unit := NUMBER_AND_WORDS.fullmatch(content):
        return f"{with_unit[1]}\\text{{{with_unit[2]}}}" if with_unit[2] else with_unit[1]
    if content in ("e", "i", "d"):
        return content
    return f"\\{content} " if content in FUNCTIONS else f"\\text{{{content}}}"


FUNCTIONS = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("log", "ln", "exp", "lim", "max", "min", "gcd", "lcm", "det"),
)
RENAMED = {
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\dbinom", "\\tbinom"), "\\binom"),
    **dict.fromkeys(("\\cdot", "\\times", "\\ast"), "*"),
    "\\div": "/",
    **dict.fromkeys(("\\leq", "\\leqslant", "\\leqq"), "\\le"),
    **dict.fromkeys(("\\geq", "\\geqslant", "\\geqq"), "\\ge"),
    **dict.fromkeys(("\\neq",), "\\ne"),
    **dict.fromkeys(("\\lt",), "<"),
    **dict.fromkeys(("\\gt",), ">"),
    **dict.fromkeys(("\\lbrace", "\\lbrack"), "\\{"),
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    **dict.fromkeys(("\\dots", "\\cdots", "\\ldotp"), "\\ldots"),
    **dict.fromkeys(("\\varnothing",), "\\emptyset"),
    "\\degree": "^\\circ",
    **dict.fromkeys(("\\mid", "\\vert", "\\lvert", "\\rvert"), "|"),
    **dict.fromkeys(("\\smallsetminus", "\\backslash"), "\\setminus"),
    **dict.fromkeys(("\\approx", "\\equiv", "\\coloneqq"), "="),
    "\\colon": ":",
    "\\land": ",",
    "\\lor": ",",
    "\\infin": "\\infty",
    "\\varepsilon": "\\epsilon",
    "\\varphi": "\\phi",
    "\\vartheta": "\\theta",
}
SIGNS = {
    "π": "\\pi ",
    "∞": "\\infty ",
    "√": "\\sqrt ",
    "×": "*",
    "·": "*",
    "⋅": "*",
    "∙": "*",
    "÷": "/",
    "∗": "*",
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "‑": "-",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "≈": "=",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "°": "^\\circ ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "…": "\\ldots ",
    "′": "'",
    "⟨": "\\langle ",
    "⟩": "\\rangle ",
    "\u2044": "/",
    "∕": "/",
    "∖": "\\setminus ",
    "“": '"',
    "”": '"',
    "’": "'",
    "₀": "_0",
    "№": "",
    "\u00a0": " ",
    "\u202f": " ",
    "\u2009": " ",
    "\u200b": "",
    "\ufeff": "",
}
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
TEXT_FONTS = "text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|emph"
MATH_FONTS = "boldsymbol|mathbf|mathit|mathsf|mathtt|mathnormal|bm|pmb"
TEXT = re.compile(rf"\\({TEXT_FONTS}|{MATH_FONTS})\s*\{{([^{{}}]*)\}}")
MATH_FONT = re.compile(rf"\\(?:{MATH_FONTS}|mathrm)(?![A-Za-z])")
NUMBER = re.compile(r"\s*[-+]?\d[\d.,/]*\s*")
NUMBER_AND_WORDS = re.compile(r"([-+]?\d[\d.,]*)((?:\\[,;: ]|[\sA-Za-z/^%])*)")
FORMULA = re.compile(r"(?:\\(?:[A-Za-z]++|[^A-Za-z])|[A-Za-z](?![A-Za-z])|[^A-Za-z\\])++")  # no words in it
STYLE = re.compile(  # switches of font, size and colour, and lines around
    r"\\(?:bf|it|sf|tt|sl|bfseries|itshape|tiny|small|normalsize|large|Large|LARGE|huge|Huge|underline|uline)"
    r"(?![A-Za-z])|\\(?:text)?color\s*\{[^{}]*\}|\\colorbox\s*\{[^{}]*\}"
)
ROMAN = re.compile(r"\\(?:mathrm|operatorname\*?|rm)\s*\{([^{}]*)\}")
LAYOUT = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits|nolimits|strut)"
    r"(?![A-Za-z])\.?|\\!|\\label\{[^{}]*\}|\\tag\{[^{}]*\}"
)
GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!|\\,)\d{3})+(?!\d)")
SPACES = re.compile(r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|\\(?:h|v)space\*?\{[^{}]*\}|~|\\thinspace|\s)+")
COMMAND = re.compile(r"\\[A-Za-z]+")
OPERATOR_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join([*FUNCTIONS, 'sqrt', 'pi', 'infty'])})(?![A-Za-z])")
SPACED_GROUPS = re.compile(r"(?<![\d.,/^_])\d{1,3}(?: \d{3})+(?![\d.,/])")
CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
TIMES_TEN = re.compile(r"(\d)\s*[xX]\s*10\s*\^")
