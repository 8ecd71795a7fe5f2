"""The divergence kernel: against its reference, against the definition in float64 by plain loops, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rft_core.kernels import divergence as kernel
from rft_core.kernels.divergence import token_divergence, token_divergence_reference

# 1 x 2: the smallest; 7 x 11: one chunk, odd sizes; 61 x 37 with a small buffer: several chunks, a ragged last.
SHAPES = [(1, 2), (7, 11), (61, 37)]
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1e-2}  # bfloat16: the gradient is rounded to 8 bits


def logits(num_tokens: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + num_tokens + vocabulary)
    return (torch.randn(num_tokens, vocabulary, generator=generator) * 2).to(dtype)


def by_loops(student: torch.Tensor, teacher: torch.Tensor, beta: float, top_k: int | None) -> torch.Tensor:
    """float64[T], from the definition, class by class."""
    found = []
    for x, y in zip(student, teacher, strict=True):
        s, t = x.exp() / x.exp().sum(), y.exp() / y.exp().sum()
        best = sorted(range(len(y)), key=lambda v: -float(y[v]))[: top_k or len(y)]
        rest = [v for v in range(len(y)) if v not in best]
        pairs = [(s[v], t[v]) for v in best] + ([(s[rest].sum(), t[rest].sum())] if rest else [])
        total = torch.zeros((), dtype=torch.float64)
        for p, q in pairs:
            mixed = beta * q + (1 - beta) * p
            if beta in (0.0, 1.0):
                total = total + (q * (q / p).log() if beta == 0 else p * (p / q).log())
            else:
                total = total + beta * q * (q / mixed).log() + (1 - beta) * p * (p / mixed).log()
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [None, 1, 5])
def test_matches_reference_and_definition(shape, dtype, beta, top_k, monkeypatch):
    monkeypatch.setitem(kernel.BUFFER_ELEMENTS, "cpu", 37 * 8 * kernel.NUM_BUFFERS)
    student, teacher = logits(*shape, dtype), logits(*shape, dtype, seed=100)
    weights = torch.linspace(-1, 2, shape[0])
    exact = student.double().requires_grad_()
    wanted = by_loops(exact / 0.7, teacher.double() / 0.7, beta, top_k)
    (wanted * weights).sum().backward()
    for function in (token_divergence, token_divergence_reference):
        leaf = student.clone().requires_grad_()
        found = function(leaf, teacher, 0.7, beta, top_k)
        (found * weights).sum().backward()
        assert (found - wanted).abs().max() <= TOLERANCES[dtype] * max(1.0, wanted.abs().max())
        assert (leaf.grad - exact.grad).abs().max() <= TOLERANCES[dtype] * max(1.0, exact.grad.abs().max())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [None, 3])
def test_equal_distributions_give_exactly_0(beta, top_k):
    student = logits(5, 300, torch.float32).requires_grad_()
    found = token_divergence(student, student.detach().clone(), 0.9, beta, top_k)
    found.sum().backward()
    assert not found.any() and not student.grad.any()


def test_values_by_hand():
    # s = 1/4 3/4, t = 3/4 1/4: KL either way 1/2 ln 3; m = 1/2 1/2: KL(t|m) = KL(s|m) = ln 2 - H(1/4).
    student, teacher = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[math.log(3), 0.0]])
    half = math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)
    for beta, wanted in ((0.0, 0.5 * math.log(3)), (1.0, 0.5 * math.log(3)), (0.5, half)):
        assert token_divergence(student, teacher, 1.0, beta).item() == pytest.approx(wanted, abs=1e-6)
    # The best token and the rest: two classes are the whole vocabulary of two.
    assert token_divergence(student, teacher, 1.0, 0.5, 1).item() == pytest.approx(half, abs=1e-6)


def test_a_wider_teacher_is_cut_and_a_narrower_one_refused():
    student, teacher = logits(4, 9, torch.float32), logits(4, 9, torch.float32, seed=1)
    wider = torch.cat([teacher, torch.full((4, 2), 50.0)], 1)
    assert torch.equal(token_divergence(student, wider, 1.0, 0.5), token_divergence(student, teacher, 1.0, 0.5))
    with pytest.raises(ValueError, match="the teacher must have at least 9 logits, got 8"):
        token_divergence(student, teacher[:, :8], 1.0, 0.5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_far_apart_distributions_stay_finite(beta, top_k):
    student = torch.tensor([[1e4, 0.0, 0.0, -1e4], [0.0, -math.inf, 3.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1e4, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]])
    found = token_divergence(student, teacher, 1.0, beta, top_k)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(student.grad).all() and (found > 0).all()
