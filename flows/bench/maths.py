"""How many maths pairs are judged in a second: completions of mixed kinds, half of them right, of random numbers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

from rft_core.rewards.math_equivalence import MathScorer
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction

COUNT = 100_000
Made = tuple[str, str, str]  # right answer, wrong answer, gold


def integers(a: int, b: int) -> Made:
    return str(a * b), str(a * b + 1), str(a * b)


def fractions(a: int, b: int) -> Made:
    return f"\\dfrac{{{2 * a}}}{{{2 * b}}}", f"\\frac{{{a + 1}}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}"


def decimals(a: int, b: int) -> Made:
    return f"{a}.{b}0", f"{a}.{b}1", f"\\frac{{{a * 1000 + b}}}{{1000}}" if b > 99 else f"{a}.{b}"


def percents(a: int, b: int) -> Made:
    return f"{a}.5\\%", f"{b}.25\\%", f"0.{a:05d}5" if a > 9999 else f"{a}.5\\%"


def units(a: int, b: int) -> Made:
    return f"{a}\\text{{ cm}}^2", f"{b + a}\\text{{ cm}}", str(a)


def sets(a: int, b: int) -> Made:
    return f"\\{{{b}, -{a}\\}}", f"\\{{{b}, {a}\\}}", f"\\{{-{a}, {b}\\}}"


def intervals(a: int, b: int) -> Made:
    return f"x \\in [{a}, \\infty)", f"({a}, \\infty)", f"x \\ge {a}"


def matrices(a: int, b: int) -> Made:
    spelled = "\\begin{{{0}matrix}} {1} & {2} \\\\ {2} & 1 \\end{{{0}matrix}}"
    return spelled.format("b", a, b), spelled.format("p", b, a + b), spelled.format("p", a, b)


def options(a: int, b: int) -> Made:
    letter, other = "ABCD"[a % 4], "ABCD"[(a + 1) % 4]
    return f"\\text{{({letter})}}\\ {b}", f"\\textbf{{({other})}}", letter


def polynomials(a: int, b: int) -> Made:
    return f"(x+{a})(x-{b})", f"(x-{a})(x+{b + 1000})", f"x^2 + {a}x - {b}x - {a * b}"


def roots(a: int, b: int) -> Made:
    return f"\\sqrt{{{a * a * 3}}}", f"{a}\\sqrt{{{b + 3}}}", f"{a}\\sqrt{{3}}"


def equations(a: int, b: int) -> Made:
    return f"{a}x + y = {b}", f"y = {a}x + {b}", f"y = -{a}x + {b}"


def identities(a: int, b: int) -> Made:
    return f"{a}\\sin 2x + {b}", f"{a}\\cos 2x + {b}", f"{2 * a}\\sin x \\cos x + {b}"


def nested_roots(a: int, b: int) -> Made:
    return f"\\sqrt{{{a + b} + 2\\sqrt{{{a * b}}}}}", f"\\sqrt{{{a + b}}}", f"\\sqrt{{{a}}} + \\sqrt{{{b}}}"


EASY: list[Callable[[int, int], Made]] = [
    *(integers, fractions, decimals, percents, units, sets, intervals, matrices, options, polynomials, roots, equations)
]
HARD: list[Callable[[int, int], Made]] = [identities, nested_roots]
HARD_SHARE = 0.04
FORMS = (
    "So \\boxed{{{}}}.",
    "We add them up.\n\nThe final answer is ${}$.",
    "<think>Let me see.</think>\n**Answer:** \\({}\\)",
)


def rows(count: int) -> list[RewardRow]:
    """Rows whose metadata says whether they are right."""
    draw = random.Random(0)
    made = []
    for number in range(count):
        kind = draw.choice(HARD if draw.random() < HARD_SHARE else EASY)
        right, wrong, gold = kind(draw.randrange(1, 1000), draw.randrange(1, 1000))
        is_right = draw.random() < 0.5
        text = draw.choice(FORMS).format(right if is_right else wrong)
        made.append(
            RewardRow(str(number), str(number), [], text, gold, {"kind": kind.__name__, "right": is_right}, "stop")
        )
    return made


def measure() -> list[tuple[str, str, float, str]]:
    """(name, metric, value, unit)."""
    asked = rows(COUNT)
    scorer = MathScorer(RewardFunction(name="math_equivalence"))
    began = time.perf_counter()
    scores = scorer.score(asked)
    seconds = time.perf_counter() - began
    scorer.pool.close()
    stages = Counter(verdict.stage for verdict in scorer.judged.values())
    rights = sum(_is_right(row, scored) for row, scored in zip(asked, scores, strict=True))
    name = f"{COUNT:,} maths pairs"
    return [
        (name, "time", seconds, "s"),
        (name, "speed", COUNT / seconds, "pairs/s"),
        (name, "as expected", 100 * rights / COUNT, "%"),
        (name, "distinct", float(stages.total()), "pairs"),
        *((name, f"decided by {stage}", 100 * count / stages.total(), "%") for stage, count in stages.most_common()),
    ]


def _is_right(row: RewardRow, scored: Scored) -> bool:
    return scored.value == float(row.metadata["right"])
