import pytest
import torch

from rft_core.kernels import packed_attention as kernel
from rft_core.kernels.packed_attention import (
    Layout,
    attention_plan,
    packed_attention,
    packed_attention_reference,
    segment_mask,
)

# As drawn in the module. Ragged prompts and completions, one of no token, several lengths that share a tile and some
# that do not. Long ones: several slices of queries. A single token.
LAYOUTS = {
    "drawn": [(3, None), (2, 0), (3, 0), (2, None)],
    "ragged": [(5, None), (7, None), (2, 0), (9, 1), (30, 1), (0, 1), (1, 0), (12, 0), (40, None), (11, 0)],
    "long": [(150, None), (90, 0), (120, 0), (9, 0), (10, 0)],
    "one": [(1, None)],
}


def _inputs(segments, heads=(4, 2), dtype=torch.float32, dims=(8, 6)):
    num_tokens = sum(length for length, _ in segments)
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    return [torch.randn(num_tokens, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _results(function, tensors, *args):
    made = function(*tensors, *args)
    weights = torch.linspace(-1, 2, made.numel()).view(made.shape)
    return [made.detach().float(), *(g.float() for g in torch.autograd.grad((made * weights).sum(), tensors))]


def test_mask_by_hand():
    assert segment_mask(LAYOUTS["drawn"]).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("tile_elements", [1 << 20, 500])  # 500: a few queries at a time
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_the_reference(name, heads, softcap, tile_elements, monkeypatch):
    monkeypatch.setattr(kernel, "TILE_ELEMENTS", tile_elements)
    segments = LAYOUTS[name]
    ours = _results(packed_attention, _inputs(segments, heads), attention_plan(segments), 0.3, softcap)
    theirs = _results(packed_attention_reference, _inputs(segments, heads), segments, 0.3, softcap)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_bfloat16_is_rounded_and_no_more():
    segments = LAYOUTS["ragged"]
    ours = _results(packed_attention, _inputs(segments, dtype=torch.bfloat16), attention_plan(segments), 0.3)
    theirs = _results(packed_attention_reference, _inputs(segments), segments, 0.3)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).norm() <= 2e-2 * expected.norm()


def test_equal_inputs_give_equal_bits():
    segments = LAYOUTS["ragged"]
    once, again = (
        _results(packed_attention, _inputs(segments, dtype=torch.bfloat16), attention_plan(segments), 0.3)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_segments_of_like_length_share_a_tile():
    # Lengths 40, 7 and 5 without a prefix: 40 alone, 7 and 5 within 8 tokens. 30 alone; 12, 11 and 9 within 8 tokens,
    # 2 and 1 with them: 2 >= 0.75 x 12 - 8. The empty one is nowhere.
    tiles = Layout.of(attention_plan(LAYOUTS["ragged"])).tiles
    assert sorted(tuple(tile.length_B.tolist()) for tile in tiles) == [(7, 5), (12, 11, 9, 2, 1), (30,), (40,)]


def test_the_operation_is_what_autograd_and_compilers_expect():
    segments = LAYOUTS["drawn"]
    torch.library.opcheck(
        kernel.packed_attention_op, (*_inputs(segments), attention_plan(segments), 0.3, 0.0), raise_exception=True
    )
