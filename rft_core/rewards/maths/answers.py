r"""Where a completion states its answer.

1. Text inside <think> does not count; where it is never closed, there is no answer. <answer>...</answer> narrows down.
2. The last \boxed{...}; one that is never closed was cut off, and there is no answer. A line `Answer: ...` or
   `#### ...` behind the box goes before it.
3. Else the last line `Answer: ...` or `#### ...`, else the last "the answer is ...".
4. Else, if lenient: the last line if it is a formula, else the last formula or number; for multiple choice the last
   option that is spoken of.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rft_core.rewards.extract import tagged
from rft_core.rewards.maths.forms import Expression, Form, Group, Matrix, Ratio, Relation, Union, Without, Words, read
from rft_core.rewards.numeric_answer import Number, find_last_number
from rft_core.rewards.options import is_option, option_in, options_in

Kind = Literal["option", "number", "other"]

MAX_STATEMENT = 1000  # characters behind "the answer is" that are looked at
MAX_STATEMENTS = 20  # of those, from the last
MAX_WORDS = 6  # an answer of more words is prose


@dataclass(frozen=True, slots=True)
class NoAnswer:
    reason: str


def find_answer(completion: str, kind: Kind, is_lenient: bool = True, is_cut: bool = False) -> str | NoAnswer:
    r"""The text of the answer. `kind` is that of the gold answer; `is_cut`: the completion met its limit.

    >>> find_answer(r"So \boxed{12}, no, \boxed{-12}.", "number"), find_answer("The answer is 96, I think", "number")
    ('-12', '96')
    """
    text = visible(completion)
    if isinstance(text, NoAnswer):
        return text
    inner = tagged(text, "answer")
    if inner is not None:
        text = inner
    elif "<answer>" in text:
        if is_cut:
            return NoAnswer("no answer: the completion ends inside <answer>")
        text = inner = text[text.rfind("<answer>") + len("<answer>") :].strip()
    box = last_box(text)
    if isinstance(box, NoAnswer):
        return box
    if box is not None:
        content, end = box
        rest = text[end - 1 :]  # from the brace, for what follows it is not the start of a line
        stated = None if "\\text" in content else _phrased(content, kind)
        return _labelled(rest, kind, needs_sense=True) or stated or content
    found = _labelled(text, kind) or _phrased(text, kind)
    if found is None and inner is not None and len(inner) <= MAX_STATEMENT:
        return inner or NoAnswer("no answer: <answer> is empty")
    if found is not None:
        return found
    return _lenient(text, kind) if is_lenient else NoAnswer("no answer: no box, and none is stated")


def gold_answer(gold: str) -> str | NoAnswer:
    """The answer in a gold text, which may be a whole solution."""
    text = gold.strip()
    box = last_box(text)
    if box is not None:
        return box if isinstance(box, NoAnswer) else box[0]
    if "####" in text:
        return text[text.rfind("####") + 4 :].strip()
    return _labelled(text, "other") or _phrased(text, "other") or text


def visible(completion: str) -> str | NoAnswer:
    """What follows the reasoning."""
    closed = [match.end() for match in THINK_END.finditer(completion)]
    rest = completion[closed[-1] :] if closed else completion
    opened = THINK.search(rest)
    if opened is None:
        return rest
    before = rest[: opened.start()].strip()
    return before if last_box(before) else NoAnswer("no answer: the completion ends inside its reasoning")


def last_box(text: str) -> tuple[str, int] | NoAnswer | None:
    r"""(content, end) of the last outermost \boxed, without boxes within it; NoAnswer when it is never closed."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces: list[int | None] = []  # the content's start for a box, null for other braces
    found: tuple[int, int] | None = None
    num_open = 0
    for match in BOX.finditer(text):
        mark = match[0]
        if mark == "}":
            if open_braces and (start := open_braces.pop()) is not None:
                num_open -= 1
                found = (start, match.end()) if not num_open else found
        elif mark == "{":
            open_braces.append(None)
        elif mark.endswith("{") and len(mark) > 2:
            open_braces.append(match.end())
            num_open += 1
        elif match["bare"] and not num_open:
            found = (match.start("bare"), match.end() + 1)
    if num_open:
        return NoAnswer("no answer: the last box is not closed")
    if found is None:
        return None
    content = INNER_BOX.sub("", text[found[0] : found[1] - 1]).strip()
    return (content, found[1]) if content else NoAnswer("no answer: the box is empty")


def is_mathematical(form: Form) -> bool:
    """Read to its last part, not as words."""
    if isinstance(form, Words):
        return form.text in ("\\ldots", "...")
    if isinstance(form, Group | Union):
        return all(is_mathematical(part) for part in form.parts)
    if isinstance(form, Relation):
        return all(is_mathematical(side) for side in form.sides)
    if isinstance(form, Without):
        return is_mathematical(form.whole) and is_mathematical(form.part)
    if isinstance(form, Matrix):
        return all(is_mathematical(cell) for row in form.rows for cell in row)
    return isinstance(form, Expression | Ratio)


def _labelled(text: str, kind: Kind, needs_sense: bool = False) -> str | None:
    """What the last line with a label says. `needs_sense`: only if it is mathematics or an option."""
    for match in _last(LABEL_LINE, text):
        found = _statement(text[match.end() : match.end() + MAX_STATEMENT], kind)
        makes_sense = found is not None and (option_in(found) is not None or is_mathematical(read(found)))
        if found is not None and (makes_sense or not (needs_sense or match["marker"])):
            return found
    return None


def _phrased(text: str, kind: Kind) -> str | None:
    for match in _last(PHRASE, text):
        found = _statement(text[match.end() : match.end() + MAX_STATEMENT], kind)
        if found is not None:
            return found
    return None


def _last(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return reversed(deque(pattern.finditer(text), maxlen=MAX_STATEMENTS))


def _statement(text: str, kind: Kind) -> str | None:
    """The answer at the beginning of what follows "the answer is"."""
    text = LEAD.sub("", text.lstrip(" \t:=*_\n"), count=1).lstrip(" \t:*_\n")
    if formula := DISPLAY_FIRST.match(text):
        return next(part for part in formula.groups() if part is not None).strip()
    sentence = text[: match.start()] if (match := SENTENCE_END.search(text)) else text
    sentence = sentence[: match.start()] if (match := REASON.search(sentence)) else sentence
    sentence = sentence.strip().strip("*_\"'").strip()
    if not sentence or NEGATED.match(sentence):
        return None
    if kind == "option" and option_in(sentence):
        return sentence
    for candidate in (sentence, *_shorter(sentence)):
        if is_mathematical(read(candidate)):
            return candidate
    if formula := FORMULA_FIRST.match(text):
        return next(part for part in formula.groups() if part is not None)
    if kind != "option" and (number := LEADING_NUMBER.match(sentence)):
        return number[0]
    return sentence


def _shorter(sentence: str) -> list[str]:
    """The sentence up to its first subordinate part."""
    cuts = [match.start() for match in CUT.finditer(sentence)][:8]
    return [sentence[:cut].strip().strip("*_") for cut in reversed(cuts) if sentence[:cut].strip()]


def _lenient(text: str, kind: Kind) -> str | NoAnswer:
    if kind == "option":
        options = options_in(text)
        return options[-1] if options else NoAnswer("no answer: no option is named")
    tail = text[-MAX_STATEMENT * 4 :]
    last_line = tail.rstrip().rpartition("\n")[2].strip()
    if FORMULA_SIGN.search(last_line) and is_mathematical(read(last_line)):
        return last_line
    formulas = list(FORMULA.finditer(tail))
    number = find_last_number(tail)
    if formulas:
        last = formulas[-1]
        rest = tail[last.end() :]
        if not any(digit in rest for digit in "0123456789"):
            return next(part for part in last.groups() if part is not None).strip()
    if not isinstance(number, Number):
        return NoAnswer("no answer: no box, and no number")
    before = tail[: tail.rfind(number.text)]
    if NEGATION_BEFORE.search(before):
        return NoAnswer("no answer: the last number is denied")
    return number.text


def unreadable_gold(text: str) -> str | None:
    """Why a gold answer (gold_answer) can't be compared with anything, or null."""
    form = read(text)
    if is_mathematical(form) or is_option(text):
        return None
    if isinstance(form, Words) and not form.is_formula:
        if not form.text:
            return "it is empty"
        words = form.text.split()
        is_sentence = len(words) > 3 and (text.rstrip().endswith((".", "!", "?")) or PROOF.search(form.text))
        if len(words) > MAX_WORDS or is_sentence:
            return "it reads as prose, not as an answer"
        return None
    if isinstance(form, Words) and len(form.problem) and len(text) > 200:
        return f"it is no formula that can be read: {form.problem}"
    if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", text))) > MAX_WORDS:
        return "it reads as prose, not as an answer"
    if text.count("{") != text.count("}"):
        return "its braces are not balanced"
    return None


THINK = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
THINK_END = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\.,;]+|\\frac\s*\{[^{}]*\}\{[^{}]*\}))|\\\\|\\[{}]|[{}]")
INNER_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
LABEL_LINE = re.compile(
    r"(?:^|\n)[ \t>*_#-]*(?:(?P<marker>\#{4})(?!\#)|(?:the\s+)?(?:final\s+|correct\s+)?answer\s*[*_]*\s*[:=])",
    re.IGNORECASE,
)
PHRASE = re.compile(
    r"\b(?:answers?|correct (?:option|choice))(?:\s+(?:to|of|for)\s[^.\n]{0,60}?)?\s*"
    r"(?:is|are|equals|would be|must be|should be|will be|:|=)(?![A-Za-z])(?!\s+not\b)",
    re.IGNORECASE,
)
LEAD = re.compile(
    r"\A(?:(?:(?:the\s+)?(?:final\s+|correct\s+)?answer\s+is|is|are|equals?|equal to|therefore|thus|hence|simply"
    r"|just|exactly|approximately|about|given by|option)\b\s*)+",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$|\*|\")(?<!\\[.!?])")
REASON = re.compile(r"\s(?:because|since|which|where)\s", re.IGNORECASE)
CUT = re.compile(r",\s|\s\(|;|\s[-–—]\s|\s(?:as|so|when|for|in|after|but|that|with|if)\s", re.IGNORECASE)
NEGATED = re.compile(r"not\b", re.IGNORECASE)
NEGATION_BEFORE = re.compile(r"\b(?:not|n't|never)\s+(?:be\s+|equal\s+(?:to\s+)?)?\\?\$?$", re.IGNORECASE)
FORMULA_PATTERN = (
    r"\$\$(.{1,500}?)\$\$|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]|(?<!\\)\$(?=\S)([^$\n]{1,500}?)(?<=[^\s\\])\$(?!\d)"
)
FORMULA = re.compile(FORMULA_PATTERN, re.DOTALL)
FORMULA_FIRST = re.compile(rf"[\s*]*(?:{FORMULA_PATTERN})", re.DOTALL)
DISPLAY_FIRST = re.compile(r"\$\$(.{1,500}?)\$\$|\\\[(.{1,500}?)\\\]", re.DOTALL)
FORMULA_SIGN = re.compile(r"[\d\\]")
LEADING_NUMBER = re.compile(
    r"-?\s*(?:\\?[$€£¥]\s?)?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:\s?/\s?\d+|\s?\\?%)?(?![\w.^*/+(\\-])"
)
PROOF = re.compile(r"\b(?:proof|prove[dns]?|q\.?e\.?d|claim|follows?|induction|hence|therefore|see|because|shown?)\b")
