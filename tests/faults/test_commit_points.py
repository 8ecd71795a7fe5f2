"""A run that is killed at each of its commit points ends with the bits of one that was not."""

import pytest

from tests.faults.harness import assert_same, commit_points

pytestmark = [pytest.mark.faults, pytest.mark.slow]
MIN_COMMIT_POINTS = 40


def test_killed_at_every_commit_point(recipe, undisturbed, runs, tmp_path):
    kills, reached = 0, 0
    while runs.kill_when(
        lambda reached=reached: commit_points(tmp_path) > reached, "run", recipe, "--name", "x", root=tmp_path
    ):
        kills, reached = kills + 1, commit_points(tmp_path)
    assert kills >= MIN_COMMIT_POINTS
    assert_same(tmp_path, undisturbed, kills)
