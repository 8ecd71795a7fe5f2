"""From token logprobs to the preference loss of a step and its gradient: by the oracle, by hand, and by invariance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rft_core.algorithms import ALGORITHMS
from rft_core.batching import TrainRow
from rft_core.errors import ContractError
from rft_core.pairing import CHOSEN, REJECTED
from rft_core.preference import LABEL_LOSSES, PREFERENCE_LOSSES
from rft_core.preference_options import SORTED_LOSSES, Preference
from rft_core.preference_step import (
    RunningShift,
    mean_log_ratio,
    mismatched_rows,
    preference_gradient,
    preference_metrics,
)
from tests.oracle import preference as oracle
from tests.oracle.preference import Completion, mpf
from tests.rft_core.preference_rows import Step, example_labels, example_pairs

LN2 = math.log(2)
NEEDED = {"exo": {"label_smoothing": 1e-3}, "robust": {"label_smoothing": 0.1}}


def of(name: str, **settings) -> Preference:
    unit = "labels" if name in LABEL_LOSSES else "pairs"
    return replace(Preference(((name, 1.0),), unit), **NEEDED.get(name, {}) | settings)


def solve(preference: Preference, step: Step, shift: RunningShift | None = None, kl: float = 0.0):
    return preference_gradient(preference, step.rows, step.current, step.reference, shift or RunningShift(), kl)


def example_of(name: str) -> Step:
    return example_labels() if name in LABEL_LOSSES else example_pairs()


def oracle_sides(step: Step) -> tuple[list[Completion], list[Completion]]:
    sides = {CHOSEN: [], REJECTED: []}
    for row in step.rows:
        sums = [sum(mpf(v) for v in scores[row.key].tolist() if v == v) for scores in (step.current, step.reference)]
        sides[row.pair_role].append(Completion(*sums, int(row.trained_mask.sum())))
    return sides[CHOSEN], sides[REJECTED]


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_loss_and_gradient_of_a_step_equal_the_oracle(name):
    step = example_of(name)
    settings = NEEDED.get(name, {}) | {"beta": 0.4}
    found = solve(of(name, beta=0.4, running_shift=False), step, RunningShift(0.3, 5.0), kl=0.2)
    sides = oracle_sides(step)
    values = oracle.values(name, *sides, settings, {"kl": 0.2, "shift": 0.3})
    slopes = oracle.gradients(name, *sides, settings, {"kl": 0.2, "shift": 0.3})
    assert found.loss == pytest.approx(sum(values) / len(values), rel=1e-9)
    left = {CHOSEN: iter(slopes[0]), REJECTED: iter(slopes[1])}
    assert found.coefficients.keys() == {row.key for row in step.rows}
    for row in step.rows:
        slope = next(left[row.pair_role]) / len(values)
        assert found.coefficients[row.key].tolist() == pytest.approx((slope * row.trained_mask).tolist(), rel=1e-9)


def test_several_losses_add_up_by_weight():
    step = example_pairs()
    mixed = ALGORITHMS["mpo"].preference
    assert mixed.losses == (("dpo", 0.8), ("bco_pair", 0.2), ("nll", 1.0)) and not mixed.running_shift
    parts = {name: solve(of(name, running_shift=False), step) for name in ("dpo", "bco_pair", "nll")}
    found = solve(mixed, step)
    weights = {"dpo": 0.8, "bco_pair": 0.2, "nll": 1.0}
    assert found.loss == pytest.approx(sum(weights[name] * part.loss for name, part in parts.items()), rel=1e-12)
    for key, coefficients in found.coefficients.items():
        wanted = sum(weights[name] * part.coefficients[key] for name, part in parts.items())
        torch.testing.assert_close(coefficients, wanted, rtol=1e-12, atol=1e-15)
    unused = replace(mixed, losses=(*mixed.losses, ("ipo", 0.0)))
    assert solve(unused, step).loss == found.loss


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_order_of_rows_changes_nothing(name):
    step = example_of(name)
    first = solve(of(name), step, kl=0.1)
    largest = max(float(values.abs().max()) for values in first.coefficients.values())
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(step.rows))
        other = solve(of(name), replace(step, rows=[step.rows[place] for place in order]), kl=0.1)
        assert other.loss == pytest.approx(first.loss, rel=1e-12)
        assert other.shift.mean == pytest.approx(first.shift.mean, rel=1e-12)
        for key, values in first.coefficients.items():
            assert (other.coefficients[key] - values).abs().max() <= 1e-12 * largest


@pytest.mark.parametrize(
    ("name", "tail_weight"), [("dpo", 1.0), ("dpo", 0.3), ("simpo", 0.3), ("aot", 0.3), ("kto", 1.0)]
)
def test_segments_of_a_rollout_are_one_completion(name, tail_weight):
    step, cut = example_of(name), Step()
    for row in step.rows:
        size = len(row.trained_mask)
        spans = [(0, size)] if size < 3 else [(0, size // 2), (size // 2, size)]
        for segment, (start, stop) in enumerate(spans):
            part = replace(
                row,
                segment=segment,
                completion_token_ids=row.completion_token_ids[start:stop],
                trained_mask=row.trained_mask[start:stop],
            )
            if part.num_trained_tokens:  # the others need no forward pass
                cut.rows.append(part)
            cut.current[part.key] = step.current[row.key][start:stop]
            cut.reference[part.key] = step.reference[row.key][start:stop]
    assert len(cut.rows) > len(step.rows)
    whole, parts = (solve(of(name, tail_weight=tail_weight), each) for each in (step, cut))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.sums == pytest.approx(whole.sums, rel=1e-12)
    for part in cut.rows:
        start = 0 if part.segment == 0 else len(step.current[part.rollout_id, 0]) // 2
        wanted = whole.coefficients[part.rollout_id, 0][start : start + len(part.trained_mask)]
        torch.testing.assert_close(parts.coefficients[part.key], wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_row_of_weight_2_counts_like_two_equal_rows(name):
    step = example_of(name)
    doubled = {"p1", "p3"} if name not in LABEL_LOSSES else {"l0", "l4"}
    weighted = replace(step, rows=[replace(row, weight=2.0) if row.group_id in doubled else row for row in step.rows])
    if name in SORTED_LOSSES:
        with pytest.raises(ContractError, match="all must have one weight"):
            solve(of(name), weighted)
        return
    twice = replace(step, rows=list(step.rows), current=dict(step.current), reference=dict(step.reference))
    for row in step.rows:
        if row.group_id in doubled:
            twin = replace(row, rollout_id=f"{row.rollout_id}-twin", pair_id=f"{row.pair_id}-twin")
            twice.rows.append(twin)
            twice.current[twin.key], twice.reference[twin.key] = step.current[row.key], step.reference[row.key]
    found, wanted = solve(of(name), weighted, kl=0.2), solve(of(name), twice, kl=0.2)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
    assert (found.shift.mean, found.shift.count) == pytest.approx((wanted.shift.mean, wanted.shift.count))
    for row in step.rows:
        expected = wanted.coefficients[row.key]
        if row.group_id in doubled:
            expected = expected + wanted.coefficients[f"{row.rollout_id}-twin", 0]
        torch.testing.assert_close(found.coefficients[row.key], expected, rtol=1e-12, atol=1e-15)


def test_without_weight_nothing_is_learned():
    step = example_pairs()
    found = solve(of("dpo"), replace(step, rows=[replace(row, weight=0.0) for row in step.rows]))
    assert found.loss == 0.0 and not any(values.any() for values in found.coefficients.values())


def test_equal_logprobs_give_ln_2_and_a_margin_of_0():
    step = example_pairs()
    found = solve(of("dpo"), replace(step, reference=step.current))
    metrics = preference_metrics(found.sums)
    assert found.loss == pytest.approx(LN2, abs=1e-15)
    assert (metrics["rewards_margin"], metrics["rewards_accuracy"]) == (0.0, 0.0)
    # beta x (1 - sig(0)) / 5 pairs = .01 per trained token
    for row in step.rows:
        sign = -0.01 if row.pair_role == CHOSEN else 0.01
        assert found.coefficients[row.key].tolist() == pytest.approx((sign * row.trained_mask).tolist())


def test_tail_weight_by_hand():
    # Chosen trains 4 tokens, rejected 2: the third and fourth of chosen weigh 1/4. The masked token does not count.
    step = Step()
    step.add("a", CHOSEN, [-1.0, -9.0, -2.0, -4.0, -8.0], [-1.0, 0.0, -2.0, -3.0, -6.0],
             mask=[True, False, True, True, True], pair="p")  # fmt: skip
    step.add("b", REJECTED, [-1.0, -0.5], [-1.5, -0.5], pair="p")
    found = solve(of("dpo", beta=1.0, tail_weight=0.25), step)
    # c = -3 - 12/4 - (-3 - 9/4) = -.75, j = -1.5 + 2 = .5: x = -1.25
    slope = -1 / (1 + math.exp(-1.25))
    assert found.loss == pytest.approx(math.log(1 + math.exp(1.25)))
    assert found.coefficients["a", 0].tolist() == pytest.approx([slope, 0.0, slope, slope / 4, slope / 4])
    assert found.coefficients["b", 0].tolist() == pytest.approx([-slope, -slope])
    assert preference_metrics(found.sums)["logps_chosen"] == -6.0
    # An average is over the same weights: (-3 - 3) / (2 + 2/4).
    assert solve(of("nll", tail_weight=0.25), step).loss == pytest.approx(6.0 / 2.5)
    assert solve(of("nll", tail_weight=0.0), step).loss == pytest.approx(3.0 / 2)


def test_tail_weight_0_trains_on_the_common_length():
    step = example_pairs()
    common = replace(step, rows=[])
    for pair in range(0, len(step.rows), 2):
        both = step.rows[pair : pair + 2]
        shorter = min(row.num_trained_tokens for row in both)
        common.rows += [
            replace(row, trained_mask=row.trained_mask & (row.trained_mask.cumsum() <= shorter)) for row in both
        ]
    for name in ("dpo", "simpo", "ipo", "aot_unpaired"):
        left, right = solve(of(name, tail_weight=0.0), step), solve(of(name), common)
        assert left.loss == pytest.approx(right.loss, rel=1e-12)
        for key, values in left.coefficients.items():
            torch.testing.assert_close(values, right.coefficients[key], rtol=1e-12, atol=1e-15)


def test_the_shift_is_the_mean_of_all_rewards_so_far_with_this_step():
    step = Step()
    step.add("a", CHOSEN, [-1.0], [-3.0])  # reward .5 x 2 = 1
    step.add("b", REJECTED, [-4.0], [-2.0])  # -1
    step.add("c", REJECTED, [-2.0], [-8.0])  # 3
    found = solve(of("bco", beta=0.5), step, RunningShift(4.0, 2.0))
    assert (found.shift.mean, found.shift.count) == (pytest.approx((8.0 + 3.0) / 5), 5.0)
    shift = 2.2
    losses = [
        math.log(1 + math.exp(-(1 - shift))),
        math.log(1 + math.exp(-1 - shift)),
        math.log(1 + math.exp(3 - shift)),
    ]
    assert found.loss == pytest.approx(sum(losses) / 3)
    # A constant: the derivative of a's loss by its logprob is -beta sig(shift - 1) / 3.
    assert float(found.coefficients["a", 0]) == pytest.approx(-0.5 / (1 + math.exp(1 - shift)) / 3)
    kept = solve(of("bco", beta=0.5, running_shift=False), step, RunningShift(4.0, 2.0))
    assert kept.shift == RunningShift(4.0, 2.0)
    other = solve(of("kto"), step, RunningShift(4.0, 2.0))
    assert other.shift == RunningShift(4.0, 2.0)  # no loss reads it


def test_one_side_alone_has_no_metrics_of_the_other():
    found = solve(of("kto"), example_labels(roles="ccc"), kl=0.1)
    metrics = preference_metrics(found.sums)
    assert math.isfinite(found.loss)
    assert metrics["rewards_rejected"] is metrics["rewards_margin"] is metrics["logps_rejected"] is None
    assert metrics["rewards_chosen"] is not None


def test_metrics_by_hand():
    # Rewards beta (policy - reference), beta .1: chosen .1 and -.2, rejected -.1 and -.2; margins .2 and 0.
    step = Step()
    step.add("a", CHOSEN, [-3.0, -1.0], [-4.0, -1.0], pair="p")
    step.add("b", REJECTED, [-6.0], [-5.0], pair="p")
    step.add("c", CHOSEN, [-2.0], [0.0], pair="q")
    step.add("d", REJECTED, [-1.0, -3.0], [-1.0, -1.0], pair="q")
    metrics = preference_metrics(solve(of("dpo"), step).sums)
    assert metrics == {
        "rewards_chosen": pytest.approx(-0.05),
        "rewards_rejected": pytest.approx(-0.15),
        "rewards_margin": pytest.approx(0.1),
        "rewards_accuracy": 0.5,  # a tie is wrong
        "logps_chosen": -3.0,
        "logps_rejected": -5.0,
    }
    labels = Step()
    labels.add("a", CHOSEN, [-3.0], [-4.0])
    labels.add("b", REJECTED, [-6.0], [-5.0])
    labels.add("c", REJECTED, [-6.0], [-2.0])
    metrics = preference_metrics(solve(of("kto"), labels).sums)
    assert metrics["rewards_margin"] == pytest.approx(0.1 - (-0.1 - 0.4) / 2)
    assert metrics["rewards_accuracy"] is None  # nothing is paired
    assert set(preference_metrics({}).values()) == {None}


@pytest.mark.parametrize(
    ("drop", "change", "message"),
    [
        (3, {}, "the first that is not: p1"),
        (None, {"pair_role": CHOSEN}, "the first that is not: p1"),
        (None, {"pair_id": "p0"}, "the first that is not: p1"),
        (None, {"pair_role": None}, "neither for 1/rejected"),
        (None, {"weight": 2.0}, "one weight, the first that have two: p1"),
    ],
)
def test_what_is_no_pair_is_refused(drop, change, message):
    step = example_pairs()
    rows = list(step.rows)
    rows[3] = replace(rows[3], **change)
    if drop is not None:
        del rows[drop]
    with pytest.raises(ContractError, match=message):
        solve(of("dpo"), replace(step, rows=rows))


# kto: completions behind other prompts.


def prompted(*prompts: str, segments: dict[int, str] | None = None) -> list[TrainRow]:
    """One row per prompt; `segments` gives rows a second segment behind that prompt."""
    rows = []
    for number, prompt in enumerate(prompts):
        texts = [prompt, *([segments[number]] if segments and number in segments else [])]
        for segment, text in enumerate(texts):
            ids = np.array([ord(letter) for letter in text])
            completion = np.array([100 + number, segment])
            rows.append(TrainRow(f"r{number}", f"g{number}", ids, completion, completion >= 0, segment=segment))
    return rows


def partners(rows: list[TrainRow]) -> list[str]:
    made = mismatched_rows(rows)
    assert list(made) == [row.key for row in rows]
    for row in rows:
        assert made[row.key].completion_token_ids is row.completion_token_ids
        assert made[row.key].rollout_id != row.rollout_id
    return ["".join(map(chr, made[row.key].prompt_token_ids)) for row in rows]


def test_completions_go_behind_the_next_prompt_that_differs():
    assert partners(prompted("a", "b", "c")) == ["b", "c", "a"]
    assert partners(prompted("a", "a", "b")) == ["b", "b", "a"]
    assert partners(prompted("a", "b", "b", "a", "a")) == ["b", "a", "a", "b", "b"]
    assert partners(prompted("b", "a", "a", "a")) == ["a", "b", "b", "b"]
    assert mismatched_rows([]) == {}


def test_all_segments_go_behind_one_prompt_of_another_completion():
    rows = prompted("a", "b", "c", segments={0: "axb"})
    assert partners(rows) == ["b", "b", "c", "a"]  # not "axb", which holds the completion itself
    assert partners(prompted("a", "b", segments={1: "by"})) == ["b", "a", "a"]


@pytest.mark.parametrize("prompts", ["a", "aaa"])
def test_one_prompt_alone_is_refused(prompts):
    with pytest.raises(ContractError, match=f"at least 2 different prompts in a step, found 1 in {len(prompts)} rows"):
        mismatched_rows(prompted(*prompts))


def test_kl_is_the_weighted_mean_over_completions_of_summed_log_ratios_and_never_negative():
    step = Step()
    step.add("a", CHOSEN, [-1.0, -7.0, -2.0], [-1.5, 0.0, -3.0], mask=[True, False, True])  # 1.5
    step.add("b", REJECTED, [-1.0], [-0.5])  # -.5 and, in the second segment, -.1
    step.add("b", REJECTED, [-1.0], [-0.9], segment=1)
    assert mean_log_ratio(step.rows, step.current, step.reference) == pytest.approx((1.5 - 0.6) / 2)
    rows = [replace(row, weight=3.0) if row.rollout_id == "a" else row for row in step.rows]
    assert mean_log_ratio(rows, step.current, step.reference) == pytest.approx((3 * 1.5 - 0.6) / 4)
    assert mean_log_ratio(step.rows, step.reference, step.current) == 0.0
    assert mean_log_ratio([], {}, {}) == 0.0
