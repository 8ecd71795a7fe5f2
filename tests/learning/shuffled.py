"""The control: true scores, dealt out to the wrong completions."""

import hashlib
from fractions import Fraction

from rft_core.rewards.numeric_answer import numeric_answer


def shuffled(rows):
    """Each row gets the score of another one, by the order of a hash of their ids: the same scores, no information."""
    scores = [numeric_answer(row, Fraction(0)).value for row in rows]
    return dealt_out(scores, rows)


def shuffled_json(rows):
    """Of json_answers: the sum of its components, dealt out in the same way."""
    weights = {"format": 0.2, "number": 0.5, "accuracy": 1.0}
    scores = [sum(weight * (row.earlier[name] or 0.0) for name, weight in weights.items()) for row in rows]
    return dealt_out(scores, rows)


def dealt_out(scores, rows):
    order = sorted(range(len(rows)), key=lambda index: hashlib.sha256(rows[index].rollout_id.encode()).digest())
    return [scores[index] for index in order]
