"""The lines of a run that is piped: one per step, with every round told apart."""

from __future__ import annotations

import re

from flows.live import LiveWatcher


def lines(capsys, *finished: tuple[str, dict]) -> list[str]:
    watcher = LiveWatcher("x", {"main": 3})
    for stage, summary in finished:
        watcher.finished(stage, summary)
    return [re.sub(r"  [0-9.]+ s$", "", line) for line in capsys.readouterr().out.splitlines()]


def test_a_step_is_one_line(capsys):
    assert lines(
        capsys,
        ("data-00000", {"train prompts": 5}),
        ("evaluation-rollouts-00000-1", {"tokens": 9}),
        ("evaluation-00000", {"greedy_accuracy": 0.25}),
        ("prompts-00001", {"prompts": 2}),
        ("rollouts-00001", {"tokens": 7, "truncated": 1}),
        ("rewards-00001", {"reward": 0.5}),
        ("token-scores-00001", {"rows": 4}),
        ("update-00001", {"loss": 0.125}),
        ("replay-00001", {}),
        ("data", {}),
    ) == [
        "data  train prompts 5",
        "evaluation after step 0  greedy_accuracy 0.25",
        "step 1/3  tokens 7  truncated 1  reward 0.5  loss 0.125",
    ]


def test_rounds_are_told_apart(capsys):
    (line,) = lines(
        capsys,
        ("rollouts-00002", {"tokens": 7}),
        ("rewards-00002", {"reward": 0.0}),
        ("rollouts-00002-1", {"tokens": 8}),
        ("rewards-00002-1", {"reward": 0.5}),
        ("rewards-00002-100", {"reward": 1.0}),
        ("rollouts-00002-200", {"tokens": 9}),
        ("update-00002", {"loss": 0.5}),
    )
    assert line == (
        "step 2/3  tokens 7  reward 0  round 1 tokens 8  round 1 reward 0.5  greedy reward 1  expert tokens 9  loss 0.5"
    )


def test_rollouts_made_ahead_stand_in_the_line_of_their_step(capsys):
    first, second = lines(
        capsys,
        ("rollouts-00001", {"tokens": 1}),
        ("rollouts-00002", {"tokens": 2}),
        ("update-00001", {"loss": 0.5}),
        ("update-00002", {"loss": 0.25}),
    )
    assert (first, second) == ("step 1/3  tokens 1  loss 0.5", "step 2/3  tokens 2  loss 0.25")
