"""Triton's kernels on its interpreter, which runs them on a CPU: what they compute, not how fast."""

import math

import pytest
import torch

from rft_core.kernels import implementation as choice
from rft_core.kernels import linear_logprob as linear
from rft_core.kernels.implementation import implementation
from rft_core.kernels.linear_logprob import HeadForm, linear_logprob, linear_logprob_reference
from rft_core.kernels.token_logprob import token_logprob, token_logprob_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from rft_core.kernels import linear_logprob_triton, token_logprob_triton  # noqa: E402

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (linear_logprob_triton, token_logprob_triton):
        monkeypatch.setattr(module, "BLOCK", 16)  # several, the last ragged
    monkeypatch.setattr(choice, "forced", "triton")
    monkeypatch.setitem(linear.PIECE_ELEMENTS, DEVICE, 9 * 40)
    monkeypatch.setattr(linear, "LEAST_PIECE", 8)


def test_one_rule_decides(monkeypatch):
    monkeypatch.setattr(choice, "forced", None)
    assert implementation(torch.device("cpu")) == "torch"
    assert implementation(torch.device("cuda")) == "triton"
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert implementation(torch.device("cuda")) == "torch"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_token_logprob_matches_the_reference(dtype, entropy_gradient, is_transposed):
    generator = torch.Generator().manual_seed(0)
    logits_TV = (torch.randn(7, 37, generator=generator) * 3).to(DEVICE, dtype)
    if is_transposed:
        logits_TV = logits_TV.t().contiguous().t()
    targets_T = torch.randint(0, 37, (7,), generator=generator).to(DEVICE)
    results = []
    for function, options in (
        (token_logprob, {"entropy_gradient": entropy_gradient}),
        (token_logprob_reference, {}),
    ):
        leaf = logits_TV.detach().requires_grad_()
        logprob_T, entropy_T = function(leaf, targets_T, 0.7, **options)
        weights_T = torch.linspace(-1, 2, 7, device=DEVICE)
        loss = (logprob_T * weights_T).sum() + ((entropy_T * weights_T.flip(0)).sum() if entropy_gradient else 0)
        results.append((logprob_T.detach(), entropy_T.detach(), torch.autograd.grad(loss, leaf)[0].float()))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCES[dtype] * max(1.0, theirs.abs().max())


def test_extreme_logits_stay_finite():
    # As in test_token_logprob.py: 1e4 apart; -inf is a token that cannot be chosen, here a whole block of them first.
    row = [-math.inf] * 16 + [0.0, 0.0, -math.inf]
    logits_TV = torch.tensor([row, [1e4] + [0.0] * 18], device=DEVICE, requires_grad=True)
    logprob_T, entropy_T = token_logprob(logits_TV, torch.tensor([16, 1], device=DEVICE), entropy_gradient=True)
    assert logprob_T.tolist() == pytest.approx([math.log(0.5), -1e4])
    assert entropy_T.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    (logprob_T.sum() + entropy_T.sum()).backward()
    assert torch.isfinite(logits_TV.grad).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("form", [HeadForm(), HeadForm(softcap=3.0, scale=0.4)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_logprob_is_that_of_torch(dtype, has_bias, form, entropy_gradient, monkeypatch):
    """Against the reference in float32; in bfloat16 against torch's own path, which rounds at the same places."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(9, 6), (101, 6), *([(101,)] if has_bias else [])]
    tensors = [torch.randn(size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in sizes]
    targets_T = torch.randint(0, 101, (9,), generator=generator).to(DEVICE)
    results = []
    for forced in ("triton", "torch"):
        monkeypatch.setattr(choice, "forced", forced)
        is_exact = forced == "torch" and dtype == torch.float32
        options = {} if is_exact else {"entropy_gradient": entropy_gradient}
        function = linear_logprob_reference if is_exact else linear_logprob
        bias_V = tensors[2] if has_bias else None
        logprob_T, entropy_T = function(*tensors[:2], targets_T, 0.7, bias_V=bias_V, form=form, **options)
        weights_T = torch.linspace(-1, 2, 9, device=DEVICE)
        loss = (logprob_T * weights_T).sum() + ((entropy_T * weights_T.flip(0)).sum() if entropy_gradient else 0)
        results.append(
            [logprob_T.detach(), entropy_T.detach(), *(g.float() for g in torch.autograd.grad(loss, tensors))]
        )
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCES[dtype] * max(1.0, theirs.abs().max())
