"""Per-step metrics against numbers worked out by hand from the sample run's rule."""

from __future__ import annotations

import time

import pytest

from flows.inspect import metrics_of, open_run
from tests.flows.sample_run import build_sample_run

# The sample run: 4 steps, prompts 0 and 1, 4 completions each; completion i of prompt p is right at step s when
# (7 p + 3 i) mod 10 < 2 + 1.5 s. Prompt 0 has 0, 3, 6, 9 and prompt 1 has 7, 0, 3, 6 to stay below the threshold.
# Step 1 (3.5): p0 right at 0, 1; p1 right at 1, 2. Completion 1 is unscored in both, so 1, 0, 0 and 0, 1, 0.
# Step 2 (5): p0 right at 0, 1; p1 right at 1, 2.     Step 3 (6.5): p0 at 0, 1, 2; p1 at 1, 2, 3.
# Step 4 (8): p0 at 0, 1, 2; p1 at all four.


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    made = build_sample_run(tmp_path_factory.mktemp("metrics"), has_kl=True)
    return metrics_of(open_run(made.root, made.name)).to_pydict()


def test_reward_mean_std_and_unscored(metrics):
    assert metrics["step"] == [1, 2, 3, 4]
    assert metrics["reward"] == pytest.approx([2 / 6, 4 / 8, 6 / 8, 7 / 8])
    # Step 2: four ones and four zeros; sum of squares 8 * 0.25 = 2, over 7.
    assert metrics["reward_std"][1] == pytest.approx((2 / 7) ** 0.5)
    assert metrics["rewards/exact_match/mean"] == metrics["reward"]
    assert metrics["frac_unscored"] == [0.25, 0, 0, 0]


def test_completions(metrics):
    # Right completions have 4 tokens, wrong ones 3. Step 2: 4 of 8 are right.
    assert metrics["completions/mean_length"][1] == 3.5
    assert metrics["completions/min_length"] == [3] * 4
    assert metrics["completions/max_length"] == [4] * 4
    # The last completion of each group is cut: 2 of 8.
    assert metrics["completions/clipped_ratio"] == [0.25] * 4
    # Step 4 without the cut ones: p0 has 0, 1, 2 and p1 has 0, 1, 2, all right.
    assert metrics["completions/mean_terminated_length"][3] == 4
    # 3 prompt tokens for each of 8, and 28, 28, 30, 31 completion tokens.
    assert metrics["num_tokens"] == [52, 104, 158, 213]


def test_groups_without_signal(metrics):
    # Only prompt 1 at step 4 has equal rewards.
    assert metrics["frac_reward_zero_std"] == [0, 0, 0, 0.5]


def test_updates_and_kl_only_if_present(metrics, tmp_path):
    assert metrics["entropy"] == pytest.approx([2, 1, 2 / 3, 0.5])
    assert metrics["kl"] == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert "effective_sample_size" not in metrics
    made = build_sample_run(tmp_path, steps=2, is_off_policy=True)
    other = metrics_of(open_run(made.root, made.name)).to_pydict()
    assert "kl" not in other
    assert other["effective_sample_size"] == pytest.approx([0.9 / 1.01, 0.9 / 1.02])


def test_time_of_a_step_is_the_sum_of_its_stages(metrics):
    # prompts 0.01, rollouts 4.1, rewards 0.2, advantages 0.05, update 3; no evaluation at step 1.
    assert metrics["timing/rollouts"][0] == pytest.approx(4.1)
    assert metrics["step_time"][0] == pytest.approx(7.36)
    # Step 2 also evaluates: two rounds of 2.0 and 0.1, and 0.05.
    assert metrics["step_time"][1] == pytest.approx(7.46 + 4.25)


def test_a_run_without_steps_has_no_rows(tmp_path):
    made = build_sample_run(tmp_path, steps=0)
    assert metrics_of(open_run(made.root, made.name)).num_rows == 0


@pytest.mark.slow
def test_a_hundred_steps_take_seconds(tmp_path):
    made = build_sample_run(tmp_path, steps=100, prompts=8, group_size=8, evaluate_every=50)
    began = time.process_time()
    assert metrics_of(open_run(made.root, made.name)).num_rows == 100
    assert time.process_time() - began < 5
