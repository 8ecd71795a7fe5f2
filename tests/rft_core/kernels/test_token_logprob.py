import math

import pytest
import torch

from rft_core.kernels import token_logprob as kernel
from rft_core.kernels.token_logprob import token_logprob, token_logprob_reference

# 1 x 1: the smallest; 7 x 11: one chunk, odd sizes; 130 x 37 with a small buffer: several chunks, a ragged last.
SHAPES = [(1, 1), (7, 11), (130, 37)]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # bfloat16: the gradient is rounded to 8 bits


def _inputs(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens + vocabulary)
    logits_TV = (torch.randn(num_tokens, vocabulary, generator=generator) * 3).to(dtype)
    return logits_TV, torch.randint(0, vocabulary, (num_tokens,), generator=generator)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_matches_the_reference(shape, dtype, entropy_gradient, monkeypatch):
    monkeypatch.setitem(kernel.BUFFER_ELEMENTS, "cpu", 37 * 32)
    logits_TV, targets_T = _inputs(*shape, dtype)
    results = []
    for function in (token_logprob, token_logprob_reference):
        leaf = logits_TV.clone().requires_grad_()
        options = {"entropy_gradient": entropy_gradient} if function is token_logprob else {}
        logprob_T, entropy_T = function(leaf, targets_T, 0.7, **options)
        weights_T = torch.linspace(-1, 2, shape[0])
        loss = (logprob_T * weights_T).sum() + ((entropy_T * weights_T.flip(0)).sum() if entropy_gradient else 0)
        loss.backward()
        results.append((logprob_T.detach(), entropy_T.detach(), leaf.grad.float()))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCES[dtype] * max(1.0, theirs.abs().max())


def test_values_by_hand():
    # Logits 0 and ln 3 at temperature 1: p = 1/4, 3/4. At temperature 2: ln 3 / 2 = ln sqrt(3): p = 1/(1 + sqrt 3).
    logits_TV = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    logprob_T, entropy_T = token_logprob(logits_TV, torch.tensor([0, 1]), 1.0)
    assert logprob_T.tolist() == pytest.approx([math.log(0.25), math.log(0.75)], abs=1e-6)
    assert entropy_T.tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75)] * 2, abs=1e-6)
    logprob_T, _ = token_logprob(logits_TV, torch.tensor([0, 0]), 2.0)
    assert logprob_T.tolist() == pytest.approx([-math.log(1 + math.sqrt(3))] * 2, abs=1e-6)


def test_extreme_logits_stay_finite():
    # 1e4 apart: the likely token has logprob 0, the other -1e4. -inf: a token that cannot be chosen, so p = 1/2, 1/2.
    logits_TV = torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, -math.inf]], requires_grad=True)
    logprob_T, entropy_T = token_logprob(logits_TV, torch.tensor([1, 0]), entropy_gradient=True)
    assert logprob_T.tolist() == pytest.approx([-1e4, math.log(0.5)])
    assert entropy_T.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    (logprob_T.sum() + entropy_T.sum()).backward()
    assert torch.isfinite(logits_TV.grad).all()


def test_entropy_carries_no_gradient_unless_asked():
    logits_TV, targets_T = _inputs(3, 5, torch.float32)
    assert not token_logprob(logits_TV.requires_grad_(), targets_T)[1].requires_grad


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must fit"):
        token_logprob(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
