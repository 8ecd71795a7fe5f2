"""The loss of a micro-batch as a whole: masks, splits, terms, anchors, metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rft_core.algorithms import POLICY_GRADIENT_ALGORITHMS as ALGORITHMS
from rft_core.errors import ContractError
from rft_core.losses import AGGREGATIONS, denominators_of
from rft_core.objective import finish_metrics, step_kept
from rft_core.terms import Term
from tests.oracle.steps import example_step
from tests.rft_core.loss_batches import EXTRAS, algorithm_of, assert_close, hand_batch, ours


def loss_of(algorithm, batch, over, step=1) -> float:
    return algorithm.loss(batch, over, step).loss.item()


def test_a_row_of_weight_two_is_two_equal_rows():
    rows = example_step(off_policy=True, several_steps=True)
    twice = [*rows[:3], replace(rows[3], weight=1.0), replace(rows[3], weight=1.0), *rows[4:]]
    for aggregation in AGGREGATIONS:
        algorithm = algorithm_of({"aggregation": aggregation, "kl_coefficient": 0.1, "entropy_coefficient": 0.1})
        assert_close(*ours(algorithm, rows)[:2], *ours(algorithm, twice)[:2])


def test_on_policy_ratio_is_exactly_one_and_carries_the_gradient():
    # A = 2, one token: loss -2 rho, d/dlp = -2 rho = -2, both exact; the behaviour logprob is not read.
    batch = hand_batch([-1.7], [2.0], behaviour_logprobs_T=[-9.0])
    parts = algorithm_of({}).loss(batch, denominators_of([1], [0], 8), 1)
    parts.loss.backward()
    assert parts.loss.item() == -2.0
    assert batch.logprobs_T.grad.tolist() == [-2.0]
    metrics = finish_metrics([parts.sums])
    assert metrics["ratio_max"] == 1.0
    assert metrics["effective_sample_size"] is None  # on-policy rows are not corrected
    assert metrics["sampling_logp_difference_mean"] == pytest.approx(7.3)


def test_null_behaviour_has_weight_one_and_is_counted():
    rows = [
        replace(row, behaviour=np.full(len(row.mask), np.nan), is_off_policy=True)
        for row in example_step(off_policy=True, several_steps=True)
    ]
    loss, gradient, metrics = ours(algorithm_of({}), rows)
    plain_loss, plain_gradient, _ = ours(algorithm_of({"correction": "none"}), rows)
    assert loss == plain_loss
    assert torch.equal(gradient, plain_gradient)
    assert metrics["uncorrected_tokens"] == sum(int(row.trained.sum()) for row in rows)
    assert metrics["effective_sample_size"] is None
    assert metrics["sampling_logp_difference_max"] is None


@pytest.mark.parametrize("name", [*EXTRAS, *AGGREGATIONS])
def test_nan_and_infinity_where_masked_give_finite_loss_and_gradient(name):
    bad = [-1.2, math.nan, math.inf, -2.1]
    batch = hand_batch(
        [-1.0, math.nan, -math.inf, -2.0],
        [1.0, math.nan, math.inf, -1.0],
        mask=[True, False, False, True],
        rows=[0, 0, 1, 1],
        off_policy=True,
        old_logprobs_T=bad,
        behaviour_logprobs_T=bad,
        reference_logprobs_T=bad,
        entropy_T=bad,
    )
    spec = EXTRAS.get(name, {"aggregation": name})
    algorithm = algorithm_of({"kl_coefficient": 0.1, "entropy_coefficient": 0.1, **spec})
    if algorithm.step_gate is not None:
        (kept,) = step_kept(algorithm, [batch], [torch.rand(4, dtype=torch.float64)])
        batch = replace(batch, step_kept_T=kept)
    parts = algorithm.loss(batch, denominators_of([1, 1], [0, 0], 8), 1)
    parts.loss.backward()
    assert math.isfinite(parts.loss.item())
    assert torch.isfinite(batch.logprobs_T.grad).all()
    assert batch.logprobs_T.grad[1:3].tolist() == [0.0, 0.0]
    assert all(math.isfinite(value) for value in parts.sums.values())


def test_a_nan_that_is_trained_stays_visible():
    loss = loss_of(algorithm_of({}), hand_batch([-1.0, math.nan], [1.0, 1.0]), denominators_of([2], [0], 8))
    assert math.isnan(loss)


def test_a_fully_masked_micro_batch_adds_nothing():  # tr-07, case 1
    rows = example_step(off_policy=False, several_steps=True)
    algorithm = algorithm_of({})
    masked = [number for number, row in enumerate(rows) if not row.trained.any()]
    others = [number for number in range(len(rows)) if number not in masked]
    assert masked
    alone = ours(algorithm, [rows[number] for number in others])
    assert_close(*ours(algorithm, rows, [masked, others])[:2], *alone[:2], tolerance=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_trained_tokens_has_loss_zero_and_zero_gradient(aggregation):  # tr-07, case 2
    rows = [replace(row, is_trained=False) for row in example_step(off_policy=True, several_steps=True)]
    loss, gradient, metrics = ours(algorithm_of({"aggregation": aggregation, "kl_coefficient": 0.1}), rows)
    assert loss == 0.0
    assert gradient.abs().max() == 0.0
    assert metrics["entropy"] is None
    assert metrics["kl"] is None
    assert all(value is None or math.isfinite(value) for value in metrics.values())


def test_accumulation_is_over_the_step_not_over_micro_batches():  # tr-03
    # Losses 8 (one token) and 1 x 9, in two micro-batches. Token mean 17 / 10 = 1.7; sequence mean (8 + 1) / 2 = 4.5.
    over = denominators_of([1, 9], [0, 1], 16)
    first, second = hand_batch([-1.0], [-8.0], groups=[0]), hand_batch([-1.0] * 9, [-1.0] * 9, groups=[1])
    for aggregation, wanted in (("token_mean", 1.7), ("sequence_mean", 4.5)):
        algorithm = algorithm_of({"aggregation": aggregation})
        assert loss_of(algorithm, first, over) + loss_of(algorithm, second, over) == pytest.approx(wanted)


def test_rows_of_advantage_zero_may_be_left_out_when_nothing_else_reads_them():
    rows = example_step(off_policy=False, several_steps=True, has_nulls=False)
    needed = [number for number, row in enumerate(rows) if row.advantage != 0]
    for name in (*EXTRAS, *ALGORITHMS):
        algorithm = ALGORITHMS.get(name) or algorithm_of(EXTRAS[name])
        whole, part = ours(algorithm, rows), ours(algorithm, rows, [needed])
        is_same = bool((whole[1] - part[1]).abs().max() <= 1e-6 * whole[1].abs().max())
        if name in ("clip_cov", "kl_cov", "ppo"):
            # They need them for their means, but in this step the same token is chosen without them; a critic learns
            # from them.
            continue
        assert is_same != algorithm.needs_all_rows(), name


def test_terms_of_other_rows_have_their_own_denominator_and_schedule():
    # Two own tokens with A = 1 and one expert token with A = 1, on-policy. Own: -1 x .75. Expert: -A lp = 3, x .25 at
    # step 1 and x .5 at step 2. Loss -.75 + .75 = 0, then -.75 + 1.5.
    batch = hand_batch([-1.0, -2.0, -3.0], [1.0] * 3, rows=[0, 0, 1], groups=[0, 1], term_R=[0, 1])
    expert = Term(rows="expert", surrogate="logprob", coefficient=lambda step: 0.25 * step)
    algorithm = replace(algorithm_of({}), terms=(Term(coefficient=0.75), expert))
    over = denominators_of([2, 1], [0, 1], 8, term_N=["own", "expert"])
    assert loss_of(algorithm, batch, over, step=1) == pytest.approx(0.0)
    assert loss_of(algorithm, batch, over, step=2) == pytest.approx(0.75)


def test_a_behaviour_anchor_is_used_and_required():
    # rho = exp(-1 - -1.5) = 1.6487, A = 1, unclipped: loss -1.6487; no correction on top.
    algorithm = replace(algorithm_of({}), terms=(Term(anchor="behaviour", surrogate="unclipped"),))
    over = denominators_of([1], [0], 8)
    batch = hand_batch([-1.0], [1.0], off_policy=True, behaviour_logprobs_T=[-1.5])
    assert loss_of(algorithm, batch, over) == pytest.approx(-math.exp(0.5))
    with pytest.raises(ContractError, match="behaviour_logprobs"):
        loss_of(algorithm, hand_batch([-1.0], [1.0], behaviour_logprobs_T=[math.nan]), over)


def test_a_correction_starts_where_the_gradient_holds_no_ratio_from_the_current_policy():
    # lp -1, old -1.2, behaviour -1.5, A = 1. clipped: -e^.2, held at 1.2, x old / behaviour e^.3. capped: -w lp = e^.2,
    # x current / behaviour e^.5.
    batch = hand_batch([-1.0], [1.0], off_policy=True, old_logprobs_T=[-1.2], behaviour_logprobs_T=[-1.5])
    over = denominators_of([1], [0], 8)
    assert loss_of(algorithm_of({}), batch, over) == pytest.approx(-1.2 * math.exp(0.3))
    assert loss_of(ALGORITHMS["cispo"], batch, over) == pytest.approx(math.exp(0.2 + 0.5))


@pytest.mark.parametrize("name", ["opmd", "asymre", "rec", "topr"])
def test_objectives_for_data_of_any_policy_are_not_corrected_on_top(name):
    given = {"old_logprobs_T": [-1.1], "behaviour_logprobs_T": [-3.0]}
    over = denominators_of([1], [0], 8)
    losses = [
        loss_of(ALGORITHMS[name], hand_batch([-1.0], [1.0], off_policy=is_off_policy, **given), over)
        for is_off_policy in (False, True)
    ]
    assert losses[0] == losses[1] == pytest.approx(0.5 if name == "opmd" else 1.0)


def test_what_a_term_needs_and_lacks_is_named():
    batch, over = hand_batch([-1.0], [1.0]), denominators_of([1], [0], 8)
    with pytest.raises(ContractError, match="reference_logprobs_T"):
        loss_of(algorithm_of({"kl_coefficient": 0.1}), batch, over)
    with pytest.raises(ContractError, match="entropy_T"):
        loss_of(algorithm_of({"entropy_coefficient": 0.1}), batch, over)


def test_metrics_by_hand():
    # Two off-policy rows, A = -1 then +1. old - behaviour: ln 4, 0 | ln .5, 0. Truncated at 2: weights 2 1 .5 1.
    # ESS (4.5)^2 / (4 x 6.25) = .81. Ratios lp / old: .5, 4 | 1.5, 1: row 1 clips low once, row 2 high once.
    old, gaps = [-1.0, -2.0, -3.0, -1.0], [math.log(weight) for weight in (4.0, 1.0, 0.5, 1.0)]
    batch = hand_batch(
        [value + math.log(ratio) for value, ratio in zip(old, (0.5, 4.0, 1.5, 1.0), strict=True)],
        [-1.0, -1.0, 1.0, 1.0],
        rows=[0, 0, 1, 1],
        off_policy=True,
        old_logprobs_T=old,
        behaviour_logprobs_T=[value - gap for value, gap in zip(old, gaps, strict=True)],
        entropy_T=[1.0, 2.0, 3.0, 4.0],
    )
    # Denominator 8: a third row of four tokens, advantage 0, is not run.
    parts = algorithm_of({"dual_clip": 3.0}).loss(batch, denominators_of([2, 2, 4], [0, 0, 1], 8), 1)
    metrics = finish_metrics([parts.sums])
    # Token losses: A=-1: rho .5 is clipped to .8, rho 4 bounded at 3; A=+1: -1.2, -1. Weighted 1.6 + 3 - .6 - 1 = 3.
    assert metrics["loss"] == metrics["policy_loss"] == pytest.approx(3.0 / 8)
    assert metrics["clip_ratio_low"] == metrics["clip_ratio_high"] == metrics["clip_ratio_dual"] == 1 / 8
    assert metrics["clip_ratio_region"] == 2 / 8
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["entropy"] == 2.5
    assert metrics["sampling_ratio_mean"] == pytest.approx(4.5 / 4)
    assert (metrics["sampling_ratio_min"], metrics["sampling_ratio_max"]) == pytest.approx((0.5, 2.0))
    assert metrics["correction_kept"] == 3 / 4
    assert metrics["effective_sample_size"] == pytest.approx(0.81)
    assert metrics["sampling_logp_difference_mean"] == pytest.approx((math.log(4) + math.log(2)) / 4, rel=1e-6)
    assert metrics["sampling_logp_difference_max"] == pytest.approx(math.log(4), rel=1e-6)
    assert metrics["kl"] is None
    assert metrics["gate_kept"] is None


def test_a_weight_shared_by_a_row_is_one_sample():
    # Rows of 3 and 1 tokens, weights of their mean log ratios: ln 2 -> 2, ln .5 -> .5. ESS 2.5^2 / (2 x 4.25).
    old, gaps = [-1.0] * 4, [math.log(2.0)] * 3 + [math.log(0.5)]
    behaviour = [value - gap for value, gap in zip(old, gaps, strict=True)]
    batch = hand_batch(old, [1.0] * 4, rows=[0, 0, 0, 1], off_policy=True, behaviour_logprobs_T=behaviour)
    parts = algorithm_of({"correction_level": "sequence_geometric"}).loss(batch, denominators_of([3, 1], [0, 0], 8), 1)
    metrics = finish_metrics([parts.sums])
    assert metrics["effective_sample_size"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["sampling_ratio_mean"] == pytest.approx(1.25)


def test_share_kept_by_gate_and_mask():
    # Ratios 1 and 2, gate .8 .. 1.2 keeps one of two; weights 1 and 10, mask .5 .. 5 keeps one.
    batch = hand_batch(
        [-1.0, -1.0],
        [1.0, 1.0],
        off_policy=True,
        old_logprobs_T=[-1.0, -1.0 - math.log(2.0)],
        behaviour_logprobs_T=[-1.0, -1.0 - math.log(20.0)],
    )
    algorithm = algorithm_of({"surrogate": "unclipped", "gate": "two_side", "correction": "mask"})
    metrics = finish_metrics([algorithm.loss(batch, denominators_of([2], [0], 8), 1).sums])
    assert metrics["gate_kept"] == 0.5
    assert metrics["correction_kept"] == 0.5
    assert metrics["loss"] == -0.5


def test_metrics_are_not_clamped():
    batch = hand_batch([0.0], [1.0], old_logprobs_T=[-100.0], reference_logprobs_T=[-100.0])
    parts = algorithm_of({"kl_coefficient": 0.1}).loss(batch, denominators_of([1], [0], 8), 1)
    metrics = finish_metrics([parts.sums])
    assert metrics["ratio_max"] == pytest.approx(math.exp(100.0))
    assert metrics["kl_k1"] == 100.0
    assert metrics["kl"] == pytest.approx(99.0)


def test_metrics_are_columns_of_updates():
    from data_contracts.schemas import RECORDS

    assert set(finish_metrics([])) <= set(RECORDS["updates"].schema.names)
