"""Rows -> questions -> scores, one function per mode.

score, rubric: each row alone. A rubric's score is the weighted mean of its criteria, each as its place in its own
range, put into the judge's range.
pairwise: the share of comparisons that a row wins, a tie counting half, put into the judge's range. Two completions are
compared in both orders, and count only if both verdicts are there: what the order does cancels out. Equal completions
tie unasked, which alone is no score where other comparisons failed. Against an anchor, the anchor ties with itself, and
so does a row that is alone in its group.
ranking: scores of a group's completions relative to each other (after RULER). The order shown follows from a digest of
the texts, so it says nothing. Larger groups are divided into parts, each ranked by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rft_core.rewards.judge.asking import Verdict
from rft_core.rewards.judge.prompts import Question, Questions, candidate_text, labels
from rft_core.rewards.judge_settings import JudgeSettings
from rft_core.rewards.rows import RewardRow, Scored, shortened

Ask = Callable[[list[Question]], list[Verdict]]
WINS = {"A": 1.0, "tie": 0.5, "B": 0.0}  # of the candidate that stands first


@dataclass
class _Bill:
    """What one row cost, and the verdicts that decide its score."""

    paid: list[Verdict] = field(default_factory=list)
    decisive: list[Verdict] = field(default_factory=list)


def judge_alone(rows: Sequence[RewardRow], questions: Questions, ask: Ask) -> list[Scored]:
    settings = questions.settings
    scores = []
    for verdict in ask([questions.about([row]) for row in rows]):
        metrics = _metrics(_Bill([verdict], [verdict]), settings)
        if verdict.value is None:
            scores.append(Scored(None, _reason([verdict]), metrics))
            continue
        value = verdict.value
        if settings.mode == "rubric":
            metrics |= {f"criteria/{name}": score for name, score in value.items()}
            value = _in_range(rubric_mean(value, settings), settings)
        scores.append(Scored(value, shortened(verdict.reason) if verdict.reason else None, metrics))
    return scores


def rubric_mean(scores: dict[str, float], settings: JudgeSettings) -> float:
    """In [0, 1]."""
    parts = []
    for criterion in settings.criteria:
        low, high = settings.ranges[criterion.name]
        parts.append(criterion.weight * (scores[criterion.name] - low) / (high - low))
    return math.fsum(parts) / math.fsum(criterion.weight for criterion in settings.criteria)


def judge_pairs(rows: Sequence[RewardRow], questions: Questions, ask: Ask) -> list[Scored]:
    settings, groups = questions.settings, _groups(rows)
    pairs = [pair for group in groups for pair in _pairs(group, settings.opponents)]
    asked = [(i, j) for i, j in pairs if _text(rows[i]) != _text(rows[j])]
    orders = [order for i, j in asked for order in ((i, j), (j, i))]
    verdicts = dict(zip(orders, ask([questions.about([rows[i], rows[j]]) for i, j in orders]), strict=True))
    bills = [_Bill() for _ in rows]
    wins: list[list[float]] = [[] for _ in rows]
    has_evidence = [False] * len(rows)
    for i, j in pairs:
        both = [verdicts[order] for order in ((i, j), (j, i)) if order in verdicts]
        bills[i].paid += both[:1]
        bills[j].paid += both[1:]
        share = _share(both)
        for index, won in ((i, share), (j, 1 - share)):
            bills[index].decisive += both
            if not math.isnan(won):
                wins[index].append(won)
                has_evidence[index] |= bool(both)
    alone = {group[0] for group in groups if len(group) == 1}
    anchors = {group[0] for group in groups} if settings.opponents == "anchor" else alone
    scores = []
    for index, (bill, won) in enumerate(zip(bills, wins, strict=True)):
        metrics = {**_metrics(bill, settings), "comparisons": float(len(won))}
        if bill.decisive and not has_evidence[index]:
            scores.append(Scored(None, _reason(bill.decisive), metrics))
            continue
        share = 0.5 if index in anchors else math.fsum(won) / len(won)
        scores.append(Scored(_in_range(share, settings), "alone in its group" if index in alone else None, metrics))
    return scores


def _share(both: Sequence[Verdict]) -> float:
    """What the first of a pair wins by the verdicts in both orders: half where none was needed, NaN where one lacks."""
    if not both:
        return 0.5
    if any(verdict.value is None for verdict in both):
        return math.nan
    return (WINS[both[0].value] + 1 - WINS[both[1].value]) / 2


def judge_groups(rows: Sequence[RewardRow], questions: Questions, ask: Ask) -> list[Scored]:
    parts = []  # each: for every distinct text the rows that have it
    for group in _groups(rows):
        equal: dict[str, list[int]] = defaultdict(list)
        for index in group:
            equal[_text(rows[index])].append(index)
        shuffled = sorted(equal.values(), key=lambda indices: _place(rows[indices[0]]))
        parts += _divided(shuffled, questions.settings.at_once)
    verdicts = ask([questions.about([rows[indices[0]] for indices in part]) for part in parts])
    scores: dict[int, Scored] = {}
    for part, verdict in zip(parts, verdicts, strict=True):
        payer = min(index for indices in part for index in indices)
        for label, indices in zip(labels(len(part)), part, strict=True):
            for index in indices:
                metrics = _metrics(_Bill([verdict] if index == payer else [], [verdict]), questions.settings)
                if verdict.value is None:
                    scores[index] = Scored(None, _reason([verdict]), metrics)
                else:
                    scores[index] = Scored(verdict.value[label], None, metrics)
    return [scores[index] for index in range(len(rows))]


def _groups(rows: Sequence[RewardRow]) -> list[list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.group_id or row.prompt_id].append(index)
    return list(groups.values())


def _pairs(group: list[int], opponents: str) -> list[tuple[int, int]]:
    if opponents == "anchor":
        return [(group[0], index) for index in group[1:]]
    return list(itertools.combinations(group, 2))


def _divided(items: list[list[int]], at_once: int) -> list[list[list[int]]]:
    """As even as can be, so that no part is left with one. at_once is 3 or more."""
    num_parts = -(-len(items) // at_once)
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def _text(row: RewardRow) -> str:
    """All that the policy may have written: of several turns, the earlier ones too."""
    return candidate_text(row, 0)


def _place(row: RewardRow) -> bytes:
    return hashlib.sha256(_text(row).encode(errors="backslashreplace")).digest()


def _in_range(share: float, settings: JudgeSettings) -> float:
    return settings.low + (settings.high - settings.low) * share


def _reason(verdicts: Sequence[Verdict]) -> str:
    reasons = dict.fromkeys(shortened(verdict.reason or "") for verdict in verdicts if verdict.value is None)
    return "; ".join(list(reasons)[:2])


def _metrics(bill: _Bill, settings: JudgeSettings) -> dict[str, float | None]:
    """prompt_tokens, completion_tokens, cost: of what this row paid for, so that a table's sums are right."""
    counts = [
        _total([verdict.prompt_tokens for verdict in bill.paid]),
        _total([verdict.completion_tokens for verdict in bill.paid]),
    ]
    metrics = dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))
    if settings.prices is not None:
        parts = [None if n is None else n * price / 1e6 for n, price in zip(counts, settings.prices, strict=True)]
        metrics["cost"] = _total(parts)
    return metrics


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


MODES = {"score": judge_alone, "rubric": judge_alone, "pairwise": judge_pairs, "ranking": judge_groups}
