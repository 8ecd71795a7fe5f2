"""Draws against numpy, against transformers' own truncation, and against softmax by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rft_core.engines import Sampling
from rft_core.engines.sampling import BLOCK, NUCLEUS_CANDIDATES, draw, invert

LAST_UNIFORM = 1 - 2**-53  # the largest that a generator returns
SIZES = [1, 7, BLOCK, BLOCK + 1, 1000]  # below, at and above one block; no multiple of it


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    return Sampling(temperature, top_p, top_k, max_completion_tokens=1)


def random_logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, size)).astype(np.float32))


def random_uniforms(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(rows))


@pytest.mark.parametrize(
    ("uniform", "index"), [(0.0, 0), (0.249, 0), (0.25, 2), (0.749, 2), (0.75, 3), (0.99, 3), (LAST_UNIFORM, 3)]
)
def test_invert_by_hand(uniform: float, index: int) -> None:
    # Weights 1 0 2 1 0 cumulate to 1 1 3 4 4. u = 0.25 aims at 1.0: the first sum above it belongs to index 2.
    found, total = invert(torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.0]]), torch.tensor([uniform], dtype=torch.float64))
    assert (found.item(), total.item()) == (index, 4.0)


@pytest.mark.parametrize("size", SIZES)
def test_invert_equals_one_cumulated_sum(size: int) -> None:
    # Integer weights, so that both sums are exact; half of them are 0.
    weights = np.random.default_rng(2).integers(0, 9, (300, size)) * (
        np.random.default_rng(3).random((300, size)) < 0.5
    )
    weights[:, size // 2] += 1
    uniform = np.random.default_rng(4).random(300)
    uniform[:2] = 0.0, LAST_UNIFORM
    cumulated = weights.cumsum(axis=1)
    expected = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cumulated, uniform, strict=True)]
    found, total = invert(torch.from_numpy(weights.astype(np.float32)), torch.from_numpy(uniform))
    assert total.tolist() == cumulated[:, -1].tolist()
    last = [np.flatnonzero(row)[-1] for row in weights]  # u * total may round up to total
    assert found.tolist() == np.minimum(expected, last).tolist()


def test_weight_zero_is_never_drawn_at_the_ends() -> None:
    weights = torch.zeros(1, 3 * BLOCK)
    weights[0, BLOCK + 5] = 1e-30
    for uniform in (0.0, 0.5, LAST_UNIFORM):
        assert invert(weights, torch.tensor([uniform], dtype=torch.float64))[0].item() == BLOCK + 5


def chi_square(logits: np.ndarray, temperature: float, draws: np.ndarray) -> float:
    """In standard deviations of its own distribution: mean df, variance 2 df."""
    probability = np.exp(logits.astype(np.float64) / temperature)
    probability /= probability.sum()
    expected = probability * len(draws)
    assert expected.min() > 5
    observed = np.bincount(draws, minlength=len(logits))
    freedom = len(logits) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_draws_follow_the_softmax() -> None:
    logits = random_logits(1, 300)[0].clamp(-2, 2)
    uniform = random_uniforms(200_000)
    drawn = [draw(logits.expand(len(part), -1), part, sampling(0.8))[0] for part in uniform.split(20_000)]
    tokens = torch.cat(drawn).numpy()
    assert abs(chi_square(logits.numpy(), 0.8, tokens)) < 4
    assert chi_square(logits.numpy(), 0.85, tokens) > 10  # the test tells a slightly wrong temperature


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("size", SIZES)
def test_logprob_is_log_softmax_at_the_temperature(temperature: float, size: int) -> None:
    logits = random_logits(64, size)
    token, logprob, is_finite = draw(logits, random_uniforms(64), sampling(temperature))
    scaled = logits.numpy().astype(np.float64) / temperature
    expected = scaled[np.arange(64), token] - np.log(np.exp(scaled).sum(axis=1))
    assert logprob.dtype == torch.float32
    assert is_finite.all()
    np.testing.assert_allclose(logprob.numpy(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("how", [sampling(), sampling(0.7), sampling(0.9, 0.8, 50), Sampling(0.0, 1.0, 0, 1)])
def test_bfloat16_logits_are_drawn_as_their_float32_values(how: Sampling) -> None:
    logits = random_logits(64, 1000).to(torch.bfloat16)
    for found, expected in zip(
        draw(logits, random_uniforms(64), how), draw(logits.float(), random_uniforms(64), how), strict=True
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_greedy_takes_the_largest_with_logprobs_at_temperature_1() -> None:
    # softmax of log(1, 5, 2) is 1/8, 5/8, 1/4
    logits = torch.tensor([[1.0, 5.0, 2.0]]).log()
    token, logprob, _ = draw(logits, random_uniforms(1), Sampling(0.0, 0.1, 1, 1))
    assert token.tolist() == [1]
    assert logprob.item() == pytest.approx(np.log(5 / 8), abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.7, 0, {2: 5 / 8, 0: 3 / 8}),  # 0.5 is short of 0.7, 0.5 + 0.3 is not
        (0.4, 0, {2: 1.0}),  # the likeliest is always kept
        (1.0, 3, {2: 50 / 95, 0: 30 / 95, 1: 15 / 95}),
        (0.8, 3, {2: 5 / 8, 0: 3 / 8}),  # of what top_k left: 50/95 = 0.53 is short, 80/95 = 0.84 is not
        (1.0, 99, {2: 0.5, 0: 0.3, 1: 0.15, 3: 0.05}),  # more than the vocabulary
    ],
)
def test_truncation_by_hand(top_p: float, top_k: int, kept: dict[int, float]) -> None:
    logits = torch.tensor([0.3, 0.15, 0.5, 0.05]).log().expand(2000, -1)
    token, logprob, _ = draw(logits, random_uniforms(2000), sampling(1.0, top_p, top_k))
    assert set(token.tolist()) == set(kept)
    expected = np.log([kept[index] for index in token.tolist()])
    np.testing.assert_allclose(logprob.numpy(), expected, atol=1e-6)
    for index, probability in kept.items():  # five standard deviations of a share
        share = (token == index).float().mean().item()
        assert abs(share - probability) < 5 * np.sqrt(probability * (1 - probability) / 2000) + 1e-9


@pytest.mark.parametrize(
    ("top_p", "top_k", "temperature"), [(0.9, 0, 1.0), (0.9, 0, 3.0), (1.0, 50, 0.7), (0.8, 40, 1.3)]
)
def test_truncation_equals_transformers(top_p: float, top_k: int, temperature: float) -> None:
    """At temperature 3 and 5000 tokens the nucleus outgrows the candidates, and rows are sorted whole."""
    logits = random_logits(40, 5000)
    token, logprob, _ = draw(logits, random_uniforms(40), sampling(temperature, top_p, top_k))
    scores = logits.double() / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if temperature == 3.0:
        assert (scores > -torch.inf).sum(dim=-1).min() > NUCLEUS_CANDIDATES
    expected = scores.log_softmax(dim=-1).gather(1, token[:, None])[:, 0]
    assert torch.isfinite(expected).all()
    np.testing.assert_allclose(logprob.numpy(), expected.numpy(), atol=5e-6)


@pytest.mark.parametrize("how", [sampling(), sampling(0.0), sampling(1.0, 0.9), sampling(1.0, 1.0, 5)])
def test_rows_do_not_change_each_other(how: Sampling) -> None:
    logits, uniform = random_logits(12, 3000), random_uniforms(12)
    broken = logits.clone()
    broken[3, 17] = torch.nan
    broken[5, 0] = torch.inf
    broken[7] = -torch.inf
    token, logprob, is_finite = draw(broken, uniform, how)
    sound = [row for row in range(12) if row not in (3, 5, 7)]
    assert is_finite.tolist() == [row in sound for row in range(12)]
    for row in sound:
        alone = draw(logits[row : row + 1], uniform[row : row + 1], how)
        assert (token[row].item(), logprob[row].item()) == (alone[0].item(), alone[1].item())


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((500, 600), -torch.inf)
    logits[:, 300:310] = 0.0
    token, logprob, is_finite = draw(logits, random_uniforms(500), sampling())
    assert is_finite.all()
    assert set(token.tolist()) == set(range(300, 310))
    np.testing.assert_allclose(logprob.numpy(), np.log(0.1), atol=1e-6)
