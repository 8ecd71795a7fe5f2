"""Prepared linear layers against `F.linear`, and when they are prepared anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from rft_core.engines import prepared_linears
from rft_core.engines.prepared_linears import PreparedLinears, linears_to_prepare

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU or build of torch prepares no weights",
)


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


@pytest.fixture
def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 50, bias=False)).to(torch.bfloat16).requires_grad_(False)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("given", [inputs(1, 40), inputs(6, 1, 40), inputs(3, 9, 40), inputs(3, 9, 40)[:, -1:]])
def test_products_are_those_of_linear(module: nn.Sequential, given: torch.Tensor) -> None:
    expected = [layer(given) for layer in module[:1]] + [module(given)]
    with PreparedLinears().used_by(module):
        found = [layer(given) for layer in module[:1]] + [module(given)]
        assert all("forward" in vars(layer) for layer in module)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, rtol=0.01, atol=0.01)


def test_the_module_is_itself_again_also_after_an_error(module: nn.Sequential) -> None:
    with pytest.raises(KeyError), PreparedLinears().used_by(module):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in module)


def test_weights_are_prepared_once_and_again_when_they_change(module: nn.Sequential) -> None:
    prepared, given = PreparedLinears(), inputs(4, 40)

    def weights() -> list[int]:
        with prepared.used_by(module):
            torch.testing.assert_close(module[0](given), linear(given, module[0].weight, module[0].bias))
            return [id(weight) for _, weight in prepared._prepared.values()]

    first = weights()
    assert weights() == first
    module[0].weight.mul_(-2)  # as an optimizer does
    second = weights()
    assert len(set(first) & set(second)) == 1
    module[0].weight.data = module[0].weight.float().mul(3).to(torch.bfloat16)  # another tensor
    third = weights()
    assert len(set(second) & set(third)) == 1
    module[0].bias.mul_(5)  # read as it is
    assert set(weights()) == set(third)


def test_what_keeps_its_own_way(module: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linears_to_prepare(module) == set(module)
    assert linears_to_prepare(nn.Sequential(nn.Linear(4, 4))) == set()  # float32
    odd = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
    odd[1].forward = lambda inputs: inputs  # type: ignore[method-assign]  # as hooks of accelerate do
    assert linears_to_prepare(odd) == set()
    monkeypatch.setattr(prepared_linears, "MOST_BYTES", 2 * (40 * 70 + 70 * 50))
    assert linears_to_prepare(module) == set(module)
    monkeypatch.setattr(prepared_linears, "MOST_BYTES", 2 * (40 * 70 + 70 * 50) - 1)
    assert linears_to_prepare(module) == set()


def test_weights_of_layers_that_went_are_freed(module: nn.Sequential) -> None:
    prepared = PreparedLinears()
    with prepared.used_by(module):
        assert len(prepared._prepared) == 2
    with prepared.used_by(module[:1]):
        assert len(prepared._prepared) == 1
