"""The reward of the task, and its control."""

from shuffled import dealt_out


def matches(rows):
    """The share of the answer's characters that the completion has at their places; 0 for one of another length."""
    return [_share(row.completion_text, row.answer) for row in rows]


def matches_dealt_out(rows):
    return dealt_out(matches(rows), rows)


def _share(completion, answer):
    if len(completion) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)
