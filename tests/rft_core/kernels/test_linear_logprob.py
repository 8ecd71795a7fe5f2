import math
import os
import subprocess
import sys

import pytest
import torch

from rft_core.kernels import linear_logprob as kernel
from rft_core.kernels.linear_logprob import HeadForm, linear_logprob, linear_logprob_reference

# 1 x 1 x 1: the smallest. 5 x 11: one piece. 70 x 300: many pieces, the last ragged; with blocks of 32, three blocks.
SHAPES = [(1, 1, 1), (5, 11, 4), (70, 300, 16)]
FORMS = [HeadForm(), HeadForm(softcap=2.0), HeadForm(softcap=3.0, scale=0.4)]
# bfloat16: logits and gradients are rounded to 8 bits, sums are not.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setitem(kernel.PIECE_ELEMENTS, "cpu", 70 * 64)
    monkeypatch.setattr(kernel, "LEAST_PIECE", 8)


def _inputs(shape, dtype, has_bias):
    num_tokens, vocabulary, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(num_tokens, dim), (vocabulary, dim), *([(vocabulary,)] if has_bias else [])]
    tensors = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    return tensors, torch.randint(0, vocabulary, (num_tokens,), generator=generator)


def _results(function, tensors, targets_T, form, has_entropy_gradient):
    hidden_TD, weight_VD, *bias = tensors
    options = {"entropy_gradient": has_entropy_gradient} if function is linear_logprob else {}
    logprob_T, entropy_T = function(
        hidden_TD, weight_VD, targets_T, 0.7, bias_V=bias[0] if bias else None, form=form, **options
    )
    weights_T = torch.linspace(-1, 2, len(targets_T))
    loss = (logprob_T * weights_T).sum() + ((entropy_T * weights_T.flip(0)).sum() if has_entropy_gradient else 0)
    return [logprob_T.detach(), entropy_T.detach(), *(g.float() for g in torch.autograd.grad(loss, tensors))]


@pytest.mark.parametrize("block", [8192, 32])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(shape, form, has_bias, entropy_gradient, block, monkeypatch):
    monkeypatch.setitem(kernel.MAX_BLOCK, "cpu", block)
    tensors, targets_T = _inputs(shape, torch.float32, has_bias)
    ours, theirs = (
        _results(function, tensors, targets_T, form, entropy_gradient)
        for function in (linear_logprob, linear_logprob_reference)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).abs().max() <= TOLERANCES[torch.float32] * max(1.0, expected.abs().max())


def test_bfloat16_is_rounded_and_no_more():
    """Against float32 of the same rounded inputs."""
    tensors, targets_T = _inputs((70, 300, 16), torch.bfloat16, True)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    ours = _results(linear_logprob, tensors, targets_T, HeadForm(), True)
    theirs = _results(linear_logprob_reference, exact, targets_T, HeadForm(), True)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).norm() <= TOLERANCES[torch.bfloat16] * expected.norm()


@pytest.mark.parametrize("kept_logits", [70 * 64, 70 * 150, 70 * 300])  # one piece, two, all
def test_kept_logits_change_no_bit(kept_logits):
    """A second backward pass finds them as the first did."""
    (hidden_TD, weight_VD), targets_T = _inputs((70, 300, 16), torch.bfloat16, False)
    results = []
    for kept in (0, kept_logits):
        logprob_T, _ = linear_logprob(hidden_TD, weight_VD, targets_T, kept_logits=kept)
        for retain in (True, False):
            gradients = torch.autograd.grad(logprob_T.sum(), (hidden_TD, weight_VD), retain_graph=retain)
            results.append([logprob_T.detach(), *gradients])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_values_by_hand():
    # hidden 1, weights 0 and ln 3: logits 0 and ln 3, p = 1/4 and 3/4. d logprob of token 0 = (3/4, -3/4) by logits, so
    # by hidden -3/4 ln 3, by the weights the same (3/4, -3/4).
    hidden_TD, weight_VD = (
        torch.ones(1, 1, requires_grad=True),
        torch.tensor([[0.0], [math.log(3)]], requires_grad=True),
    )
    logprob_T, entropy_T = linear_logprob(hidden_TD, weight_VD, torch.tensor([0]))
    assert logprob_T.tolist() == pytest.approx([math.log(0.25)])
    assert entropy_T.tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75)])
    logprob_T.sum().backward()
    assert hidden_TD.grad.tolist() == [pytest.approx([-0.75 * math.log(3)])]
    assert weight_VD.grad.flatten().tolist() == pytest.approx([0.75, -0.75])


def test_a_tied_weight_gets_both_gradients():
    """The head's and the embedding's: as from the reference."""
    gradients = []
    for function in (linear_logprob, linear_logprob_reference):
        (_, weight_VD), targets_T = _inputs((5, 11, 4), torch.float32, False)
        hidden_TD = torch.nn.functional.embedding(targets_T.flip(0), weight_VD).tanh()
        gradients += torch.autograd.grad(function(hidden_TD, weight_VD, targets_T)[0].sum(), weight_VD)
    assert torch.allclose(*gradients, atol=1e-6)


def test_no_gradient_is_made_for_what_wants_none():
    tensors, targets_T = _inputs((5, 11, 4), torch.float32, False)
    hidden_TD, weight_VD = tensors[0], tensors[1].detach()
    logprob_T, entropy_T = linear_logprob(hidden_TD, weight_VD, targets_T)
    assert not entropy_T.requires_grad
    (expected,) = torch.autograd.grad(linear_logprob_reference(hidden_TD, weight_VD, targets_T)[0].sum(), hidden_TD)
    (found,) = torch.autograd.grad(logprob_T.sum(), hidden_TD)
    assert torch.allclose(found, expected, atol=1e-6)


def test_extreme_logits_stay_finite():
    hidden_TD = torch.tensor([[1e4]], requires_grad=True)
    weight_VD = torch.tensor([[1.0], [-1.0], [0.0]])
    logprob_T, entropy_T = linear_logprob(hidden_TD, weight_VD, torch.tensor([2]), entropy_gradient=True)
    assert logprob_T.tolist() == [-1e4] and entropy_T.tolist() == pytest.approx([0.0])
    (logprob_T + entropy_T).sum().backward()
    assert torch.isfinite(hidden_TD.grad).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must fit"):
        linear_logprob(torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(2, dtype=torch.int64))


MEMORY = """
import resource, sys, torch
from rft_core.kernels.linear_logprob import linear_logprob
torch.set_num_threads(1)
hidden = torch.randn(4096, 8, requires_grad=True)
weight = torch.randn(32768, 8, requires_grad=True)
targets = torch.zeros(4096, dtype=torch.int64)
linear_logprob(hidden[:64], weight[:64], targets[:64])[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_logprob(hidden, weight, targets)[0].sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_logits_are_never_kept():
    """At most a twentieth of the logits of 4,096 tokens x 32,768 in float32, which are 512 MiB."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=environment)
    assert int(ended.stdout) <= 4096 * 32768 * 4 / 20
