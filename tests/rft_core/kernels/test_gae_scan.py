"""The backward scan of GAE: by hand, against the oracle's sums, and the Triton kernel against the reference."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

from rft_core.kernels.gae_scan import gae_scan, gae_scan_reference
from tests.oracle.gae import gae

# 1 x 1: the smallest; 3 x 7: less than a block; 4 x 16: a whole block; 5 x 53: several blocks, a ragged first one.
SHAPES = [(1, 1), (3, 7), (4, 16), (5, 53)]
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is an extra: pip install rft-pipeline[triton]"
)
IN_INTERPRETER = """
import torch
from rft_core.kernels import gae_scan_triton
from rft_core.kernels.gae_scan import gae_scan_reference
from tests.rft_core.kernels.test_gae_scan import SHAPES, inputs
gae_scan_triton.BLOCK_TOKENS = 16
for shape in SHAPES:
    for factors in ((1.0, 0.95), (0.9, 0.8), (0.99, 0.0)):
        given = (*inputs(*shape), *factors)
        found, wanted = gae_scan_triton.gae_scan(*given), gae_scan_reference(*given)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 1e-12, (shape, factors, found, wanted)
assert gae_scan_triton.gae_scan(*inputs(2, 0), 1.0, 0.9).shape == (2, 0)
print("equal")
"""


def inputs(num_rows: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values, mask and values behind the last token: ragged rows with gaps, one without any token; what
    stands in a gap is NaN or infinite."""
    generator = np.random.default_rng(num_rows * 100 + num_tokens)
    rewards, values = generator.normal(size=(2, num_rows, num_tokens))
    mask = generator.random((num_rows, num_tokens)) < 0.7
    for row in range(num_rows):
        mask[row, num_tokens - row :] = False
    mask[num_rows // 2] &= num_rows < 3
    rewards[~mask], values[~mask] = np.nan, np.inf
    after = np.where(np.arange(num_rows) % 2, generator.normal(size=num_rows), 0.0)
    return tuple(torch.from_numpy(array) for array in (rewards, values, mask, after))


def test_by_hand():
    # Rewards 0 0 1 and values .5 .6 .7, lam .95: deltas .1 .1 .3; A .3, .1 + .95 x .3 = .385, .1 + .95 x .385 = .46575.
    # The gap between the second and the third is as if it were not there.
    rewards = torch.tensor([[0.0, 0.0, 9.0, 1.0]])
    values = torch.tensor([[0.5, 0.6, 9.0, 0.7]])
    mask = torch.tensor([[True, True, False, True]])
    found = gae_scan(rewards, values, mask, torch.zeros(1), 1.0, 0.95)
    assert found[0].tolist() == pytest.approx([0.46575, 0.385, 0.0, 0.3], abs=1e-7)
    # A row that was cut goes on with the value behind it: delta 1 + .8 - .7 at its end.
    found = gae_scan(rewards, values, mask, torch.full((1,), 0.8), 1.0, 0.0)
    assert found[0].tolist() == pytest.approx([0.1, 0.1, 0.0, 1.1], abs=1e-7)


@pytest.mark.parametrize("factors", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_oracle(shape, factors):
    given = inputs(*shape)
    found = gae_scan(*given, *factors)
    wanted = np.stack([gae(*row, *factors) for row in zip(*(array.numpy() for array in given), strict=True)])
    assert found.dtype == torch.float64
    assert np.abs(found.numpy() - wanted).max() <= 1e-12
    assert torch.equal(found, gae_scan_reference(*given, *factors))


def test_shapes_must_fit():
    rewards, values, mask, after = inputs(3, 7)
    with pytest.raises(ValueError, match="must fit"):
        gae_scan(rewards, values[:2], mask, after, 1.0, 1.0)
    with pytest.raises(ValueError, match="must fit"):
        gae_scan(rewards, values, mask, after[:2], 1.0, 1.0)


@NEEDS_TRITON
def test_the_triton_kernel_equals_the_reference_in_its_interpreter():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    ended = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, "-c", IN_INTERPRETER], capture_output=True, text=True, check=False
    )
    assert ended.stdout.strip() == "equal", ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@NEEDS_TRITON
@pytest.mark.parametrize("shape", [*SHAPES, (64, 5000)])
def test_the_triton_kernel_equals_the_reference_on_the_device(shape):
    given = inputs(*shape)
    found = gae_scan(*(tensor.cuda() for tensor in given), 0.99, 0.95)
    assert (found.cpu() - gae_scan_reference(*given, 0.99, 0.95)).abs().max() <= 1e-10
