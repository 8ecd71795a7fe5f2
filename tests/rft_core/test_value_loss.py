"""The loss of values: by hand, against the float64 oracle with ragged rows and gaps, and what makes it safe."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rft_core.losses import Denominators, denominators_of
from rft_core.terms import ValueTerm
from rft_core.value_loss import ValueBatch, value_loss, value_metrics
from tests.oracle import gae as oracle

LENGTHS = [4, 1, 6, 3, 5]
WEIGHTS = [1.0, 2.0, 1.0, 1.0, 1.0]


def step(seed: int = 0) -> tuple[list[dict[str, np.ndarray]], Denominators]:
    """Rows with gaps, one of weight 2, one without a trained token; NaN and infinity where none is trained."""
    generator = np.random.default_rng(seed)
    rows = []
    for number, (length, weight) in enumerate(zip(LENGTHS, WEIGHTS, strict=True)):
        mask = (generator.random(length) < 0.7) & (number != 3)
        mask[0] |= number != 3
        row = {name: generator.normal(size=length) for name in ("values", "old", "returns")}
        row = {name: np.where(mask, values.astype(np.float32), np.nan) for name, values in row.items()}
        row["values"][~mask] = np.inf
        rows.append({**row, "mask": mask, "weight": np.full(length, weight)})
    tokens = [int(row["mask"].sum()) for row in rows]
    return rows, denominators_of(tokens, [0, 0, 1, 1, 2], 12, WEIGHTS)


def ours(term: ValueTerm, rows, over: Denominators, has_old: bool = True):
    """(loss, gradient per row, metrics), over micro-batches of the rows as they are grouped."""
    total, gradients, sums = 0.0, [], {}
    for part in rows:
        flat = {name: torch.from_numpy(np.concatenate([row[name] for row in part])) for name in part[0]}
        values = flat["values"].float().requires_grad_()
        old = flat["old"].float() if has_old else None
        batch = ValueBatch(values, flat["returns"].float(), flat["mask"], flat["weight"].float(), old)
        parts = value_loss(term, batch, over)
        parts.loss.backward()
        total += parts.loss.item()
        gradients.append(values.grad)
        sums = {name: sums.get(name, 0.0) + value for name, value in parts.sums.items()}
    return total, torch.cat(gradients), value_metrics(sums)


def expected(rows, clip: float | None):
    flat = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    kept = np.flatnonzero(flat["mask"])
    values = torch.tensor(flat["values"][kept], requires_grad=True)
    old, returns, weights = (flat[name][kept] for name in ("old", "returns", "weight"))
    loss = oracle.value_loss(list(values), old, returns, clip, weights)
    loss.backward()
    gradient = np.zeros(len(flat["mask"]))
    gradient[kept] = values.grad.numpy()
    return loss.item(), gradient, oracle.explained_variance(values.detach().numpy(), returns)


def test_by_hand():
    # value_clip of the handed cases: V .5 1.5 -.2, old .4, returns 1, c .2: larger errors .25 .25 1.44, halves of them.
    # The second is clipped to .6, whose error .16 is smaller; no error of a clipped value is the larger one.
    values = torch.tensor([0.5, 1.5, -0.2], requires_grad=True)
    batch = ValueBatch(values, torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(3), torch.full((3,), 0.4))
    parts = value_loss(ValueTerm(0.2), batch, denominators_of([3], [0], 8))
    assert parts.loss.item() == pytest.approx((0.125 + 0.125 + 0.72) / 3)
    parts.loss.backward()
    assert values.grad.tolist() == pytest.approx([-0.5 / 3, 0.5 / 3, -1.2 / 3])
    # value_loss_clip: V 2 0, old 1 0, returns 3 1, c .5: 2 is clipped to 1.5, error 2.25 above 1; then 1. Halves, mean.
    values = torch.tensor([2.0, 0.0], requires_grad=True)
    batch = ValueBatch(
        values, torch.tensor([3.0, 1.0]), torch.ones(2, dtype=torch.bool), torch.ones(2), torch.tensor([1.0, 0.0])
    )
    parts = value_loss(ValueTerm(0.5), batch, denominators_of([2], [0], 8))
    assert parts.loss.item() == pytest.approx(0.8125)
    parts.loss.backward()
    assert values.grad.tolist() == [0.0, -0.5]  # beyond its bound a value has no pull
    assert value_metrics(parts.sums)["value_clip_ratio"] == 0.5


@pytest.mark.parametrize("clip", [None, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_oracle(clip, seed):
    rows, over = step(seed)
    wanted_loss, wanted, explained = expected(rows, clip)
    loss, gradient, metrics = ours(ValueTerm(clip), [rows], over)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert np.abs(gradient.numpy() - wanted).max() <= 1e-6 * np.abs(wanted).max()
    assert metrics["explained_variance"] == pytest.approx(explained, rel=1e-6)
    for splits in ([[0], [1, 2], [3, 4]], [[4, 3], [2, 1, 0]]):
        parts = [[rows[number] for number in numbers] for numbers in splits]
        other, other_gradient, other_metrics = ours(ValueTerm(clip), parts, over)
        order = np.concatenate([np.arange(len(gradient)).reshape(-1)[_span(number)] for s in splits for number in s])
        assert other == pytest.approx(loss, rel=1e-12)
        assert (other_gradient - gradient[order]).abs().max() <= 1e-9
        assert other_metrics == pytest.approx(metrics, rel=1e-9)


def _span(number: int) -> slice:
    start = sum(LENGTHS[:number])
    return slice(start, start + LENGTHS[number])


def test_without_values_from_before_nothing_is_clipped():
    rows, over = step()
    assert ours(ValueTerm(0.01), [rows], over, has_old=False)[0] == ours(ValueTerm(None), [rows], over)[0]


def test_the_coefficient_weighs_the_loss_and_not_its_metric():
    rows, over = step()
    once, gradient, metrics = ours(ValueTerm(0.2), [rows], over)
    half, half_gradient, half_metrics = ours(ValueTerm(0.2, 0.5), [rows], over)
    assert half == pytest.approx(once / 2)
    assert (half_gradient - gradient / 2).abs().max() <= 1e-7
    assert half_metrics["value_loss"] == pytest.approx(metrics["value_loss"]) == pytest.approx(once)


def test_nothing_trained_is_zero_and_equal_returns_explain_nothing():
    rows, over = step()
    for row in rows:
        row["mask"] = np.zeros_like(row["mask"])
    loss, gradient, metrics = ours(ValueTerm(0.2), [rows], over)
    assert loss == 0.0 and not gradient.any()
    assert set(metrics.values()) == {None}
    flat = ValueBatch(torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(3))
    sums = value_loss(ValueTerm(), flat, denominators_of([3], [0], 8)).sums
    assert value_metrics(sums)["explained_variance"] is None


def test_a_nan_that_is_trained_stays_visible():
    batch = ValueBatch(torch.tensor([math.nan]), torch.ones(1), torch.ones(1, dtype=torch.bool), torch.ones(1))
    assert math.isnan(value_loss(ValueTerm(), batch, denominators_of([1], [0], 8)).loss.item())
