"""Attention over packed segments that may share a prefix: matrix products and a softmax over tiles of like segments.

Tokens stand one behind another without padding. A segment attends to itself, causally, and to all of its prefix, an
earlier segment:

    tokens     p0 p1 p2 | a0 a1 | b0 b1 b2 | q0 q1
    segments   3, None    2, 0    3, 0       2, None      a and b complete the prompt p; q is alone

Nothing of size N x N is made: a tile is a few segments padded to the longest of them, and what crosses between packed
and padded is a gather in both directions, so that every sum has one order. The backward pass computes the scores again.
On a CPU torch's fused attention takes several times longer for its backward pass.

Shapes: N packed tokens; H query heads, G key heads, R = H / G; D head dimension; B segments of a tile, Q its longest,
P its longest prefix, K = P + Q.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 20  # of scores at once: 4 MiB in float32 stay near the caches
# A segment joins a tile whose longest is at most so much longer, or where padding is too little to count.
LEAST_FILLED, UNCOUNTED_TOKENS = 0.75, 8

Segment = tuple[int, int | None]  # length, and the number of the segment that is its prefix


def attention_plan(segments: Sequence[Segment]) -> Tensor:
    """The layout as one int64 vector, which a compiled graph hands on without knowing what is in it."""
    starts = np.concatenate([[0], np.cumsum([length for length, _ in segments])]).astype(np.int64)
    tiles = _tiles(segments)
    prefixes = sorted({prefix for _, prefix in segments if prefix is not None})
    number = {segment: index for index, segment in enumerate(prefixes)}
    widest = max((segments[prefix][0] for prefix in prefixes), default=0)
    slots = np.zeros((5, starts[-1]), np.int64)
    parts, before = [], 0
    for tile in tiles:
        width = segments[tile[0]][0]
        own = [(starts[index], segments[index][0]) for index in tile]
        of_rows = [segments[index][1] for index in tile]
        shared = list(dict.fromkeys(prefix for prefix in of_rows if prefix is not None))
        prefix_width = max((segments[prefix][0] for prefix in shared), default=0)
        heads = [(0, 0) if prefix is None else (starts[prefix], segments[prefix][0]) for prefix in of_rows]
        parts.append([len(tile), width, prefix_width, len(shared)])
        parts += [_padded(own, width), _padded(heads, prefix_width)]
        parts += [[length for _, length in own], [length for _, length in heads]]
        parts.append([shared.index(prefix) if prefix is not None else -1 for prefix in of_rows])
        parts.append([number[prefix] for prefix in shared])
        for row, (start, length) in enumerate(own):
            slots[:4, start : start + length] = np.array([before, len(tile), width, row])[:, None]
            slots[4, start : start + length] = np.arange(length)
        before += len(tile) * width
    in_prefix = [(starts[prefix] + i, number[prefix], i) for prefix in prefixes for i in range(segments[prefix][0])]
    first = [starts[-1], len(tiles), len(prefixes), widest, len(in_prefix)]
    inverse = np.array(in_prefix, np.int64).reshape(-1, 3).T.ravel()
    flat = [np.asarray(part, np.int64) for part in (first, slots.ravel(), inverse, *parts)]
    return torch.from_numpy(np.concatenate(flat))


def _tiles(segments: Sequence[Segment]) -> list[list[int]]:
    """Numbers of segments of like length, with prefixes of like length or none; longest first."""

    def lengths(index: int) -> tuple[int, int]:
        length, prefix = segments[index]
        return (0 if prefix is None else segments[prefix][0]), length

    made: list[list[int]] = []
    filled = [index for index, (length, _) in enumerate(segments) if length]
    for index in sorted(filled, key=lambda index: (segments[index][1] is None, *(-x for x in lengths(index)[::-1]))):
        opened = made[-1] if made else None
        if opened is not None and _is_alike(lengths(opened[0]), lengths(index)):
            opened.append(index)
        else:
            made.append([index])
    return made


def _is_alike(opened: tuple[int, int], other: tuple[int, int]) -> bool:
    if (opened[0] == 0) != (other[0] == 0):
        return False
    lower, upper = sorted((opened[0], other[0]))
    return all(
        short >= LEAST_FILLED * long - UNCOUNTED_TOKENS for short, long in ((lower, upper), (other[1], opened[1]))
    )


def _padded(spans: list[tuple[Any, int]], width: int) -> np.ndarray:
    """Token numbers [spans, width], flat; padding repeats a real token, whose value is read and thrown away."""
    numbers = np.zeros((len(spans), width), np.int64)
    for row, (start, length) in zip(numbers, spans, strict=True):
        row[:length] = np.arange(start, start + length)
    return numbers.ravel()


@dataclass(frozen=True)
class Tile:
    """Token numbers, and for each row which of the tile's prefixes is its own, -1 for none."""

    query_BQ: Tensor
    prefix_BP: Tensor
    length_B: Tensor
    prefix_length_B: Tensor
    prefix_B: Tensor
    prefixes: Tensor  # their numbers among all

    @property
    def is_padding_BQ(self) -> Tensor | None:
        return _is_padding(self.query_BQ, self.length_B)

    @property
    def is_prefix_padding_BP(self) -> Tensor | None:
        return _is_padding(self.prefix_BP, self.prefix_length_B)


def _is_padding(token_BQ: Tensor, length_B: Tensor) -> Tensor | None:
    """None where nothing is."""
    is_padding_BQ = torch.arange(token_BQ.shape[1], device=length_B.device) >= length_B[:, None]
    return is_padding_BQ if bool(is_padding_BQ.any()) else None


@dataclass(frozen=True)
class Layout:
    """A plan taken apart."""

    slots: Tensor  # int64[5, N]: places of earlier tiles, B and Q of the token's tile, its row and place there
    num_prefixes: int
    widest_prefix: int
    in_prefix: Tensor  # int64[3, M]: token, number of the prefix, place in it
    tiles: list[Tile]

    @classmethod
    def of(cls, plan: Tensor) -> "Layout":
        num_tokens, num_tiles, num_prefixes, widest, num_in_prefix = plan[:5].tolist()
        at = 5

        def take(*shape: int) -> Tensor:
            nonlocal at
            size = int(np.prod(shape))
            at += size
            return plan[at - size : at].view(shape)

        slots, in_prefix, tiles = take(5, num_tokens), take(3, num_in_prefix), []
        for _ in range(num_tiles):
            size, width, prefix_width, num_shared = take(4).tolist()
            tiles.append(
                Tile(take(size, width), take(size, prefix_width), take(size), take(size), take(size), take(num_shared))
            )
        return cls(slots, num_prefixes, widest, in_prefix, tiles)

    def places(self, num_key_heads: int, repeats: int) -> Tensor:
        """Where each (token, head) lies in the tiles' outputs [key heads, B, repeats, Q], one behind another."""
        before, size, width, row, place = self.slots
        group = torch.arange(num_key_heads, device=before.device).view(1, -1, 1)
        repeat = torch.arange(repeats, device=before.device).view(1, 1, -1)
        first = num_key_heads * repeats * before + row * repeats * width + place
        return (
            first[:, None, None] + group * (size * repeats * width)[:, None, None] + repeat * width[:, None, None]
        ).view(-1)


def _head_rows(token_BQ: Tensor, num_key_heads: int, repeats: int) -> Tensor:
    """Rows of (token, head) in the order [key heads, B, repeats, Q]."""
    head = torch.arange(num_key_heads * repeats, device=token_BQ.device).view(num_key_heads, 1, repeats, 1)
    return (token_BQ[None, :, None] * (num_key_heads * repeats) + head).view(-1)


@dataclass
class _Gathered:
    """What a tile reads. `keys` and `values` hold prefix, then own."""

    tile: Tile
    queries: Tensor  # [G B, R, Q, D]
    keys: Tensor  # [G B, K, D]
    values: Tensor
    num_prefix: int

    @classmethod
    def of(cls, tile: Tile, query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> "_Gathered":
        num_heads, num_key_heads = query_NHD.shape[1], key_NGD.shape[1]
        repeats = num_heads // num_key_heads
        many, width = num_key_heads * len(tile.query_BQ), tile.query_BQ.shape[1]
        key_BK = torch.cat([tile.prefix_BP, tile.query_BQ], 1)
        key_rows = _head_rows(key_BK, num_key_heads, 1)
        queries = query_NHD.flatten(0, 1).index_select(0, _head_rows(tile.query_BQ, num_key_heads, repeats))
        keys = key_NGD.flatten(0, 1).index_select(0, key_rows)
        values = value_NGD.flatten(0, 1).index_select(0, key_rows)
        return cls(
            tile,
            queries.view(many, repeats, width, -1),
            keys.view(many, key_BK.shape[1], -1),
            values.view(many, key_BK.shape[1], -1),
            tile.prefix_BP.shape[1],
        )

    def probabilities(self, scale: float, softcap: float) -> Iterator[tuple[slice, int, Tensor, Tensor, Tensor | None]]:
        """Slices of queries; for each the number of keys they see, queries [G B, R q, D], float32 probabilities
        [G B, R q, K] and the capped scores, where there is a cap."""
        many, repeats, width, dim = self.queries.shape
        step = max(1, TILE_ELEMENTS // (many * repeats * self.keys.shape[1]))
        for start in range(0, width, step):
            stop = min(start + step, width)
            num_keys = self.num_prefix + stop
            queries = self.queries[:, :, start:stop].reshape(many, -1, dim)
            scores = torch.bmm(queries, self.keys[:, :num_keys].transpose(1, 2)).float()
            capped = None
            if softcap:
                scores.mul_(scale / softcap).tanh_()
                capped = scores.clone()
            future = scores.new_full((stop - start, num_keys), -torch.inf).triu_(self.num_prefix + start + 1)
            seen = scores.view(many, repeats, stop - start, num_keys)
            torch.add(future, seen, alpha=softcap or scale, out=seen)
            is_padding_BP = self.tile.is_prefix_padding_BP
            if is_padding_BP is not None:
                prefix = seen.view(-1, len(is_padding_BP), repeats * (stop - start), num_keys)[..., : self.num_prefix]
                prefix.masked_fill_(is_padding_BP[None, :, None], -torch.inf)
            yield slice(start, stop), num_keys, queries, torch.softmax(scores, -1), capped


def _forward(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, plan: Tensor, scale: float, softcap: float
) -> Tensor:
    num_tokens, num_heads, _ = query_NHD.shape
    num_key_heads, value_dim = value_NGD.shape[1:]
    layout = Layout.of(plan)
    made = []
    for tile in layout.tiles:
        read = _Gathered.of(tile, query_NHD, key_NGD, value_NGD)
        many, repeats, width, _ = read.queries.shape
        out = value_NGD.new_empty(many, repeats, width, value_dim)
        for span, num_keys, _, p, _ in read.probabilities(scale, softcap):
            out[:, :, span] = torch.bmm(p.to(out.dtype), read.values[:, :num_keys]).view(many, repeats, -1, value_dim)
        made.append(out.view(-1, value_dim))
    places = layout.places(num_key_heads, num_heads // num_key_heads)
    return torch.cat(made).index_select(0, places).view(num_tokens, num_heads, value_dim)


def _backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    plan: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout.of(plan)
    num_heads, num_key_heads = query_NHD.shape[1], key_NGD.shape[1]
    repeats = num_heads // num_key_heads
    grad_queries = []
    keys, values = (_KeyGradients.of(layout, x_NGD) for x_NGD in (key_NGD, value_NGD))
    for tile in layout.tiles:
        read = _Gathered.of(tile, query_NHD, key_NGD, value_NGD)
        rows = _head_rows(tile.query_BQ, num_key_heads, repeats)
        grad = grad_NHD.flatten(0, 1).index_select(0, rows).view(*read.queries.shape[:3], -1)
        if tile.is_padding_BQ is not None:
            grad.view(num_key_heads, *tile.is_padding_BQ.shape[:1], repeats, *grad.shape[2:]).masked_fill_(
                tile.is_padding_BQ[None, :, None, :, None], 0
            )
        grad_query, grad_key, grad_value = _tile_gradients(read, grad, scale, softcap)
        grad_queries.append(grad_query.view(-1, query_NHD.shape[2]))
        keys.add(tile, grad_key)
        values.add(tile, grad_value)
    places = layout.places(num_key_heads, repeats)
    grad_query_NHD = torch.cat(grad_queries).index_select(0, places).view(query_NHD.shape)
    return grad_query_NHD, keys.packed(), values.packed()


def _tile_gradients(read: _Gathered, grad: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries [G B, R, Q, D], keys and values [G B, K, D]."""
    many, repeats, _, dim = read.queries.shape
    grad_query = torch.empty_like(read.queries)
    grad_key, grad_value = torch.zeros_like(read.keys), torch.zeros_like(read.values)
    for span, num_keys, queries, p, capped in read.probabilities(scale, softcap):
        grad_out = grad[:, :, span].reshape(many, -1, grad.shape[-1])
        grad_value[:, :num_keys] += torch.bmm(p.to(grad.dtype).transpose(1, 2), grad_out)
        grad_p = torch.bmm(grad_out, read.values[:, :num_keys].transpose(1, 2)).float()
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, torch.float32)
        if capped is not None:
            grad_scores.mul_(1 - capped.square_())
        grad_scores = grad_scores.to(grad.dtype)
        grad_query[:, :, span] = torch.bmm(grad_scores, read.keys[:, :num_keys]).view(many, repeats, -1, dim)
        grad_key[:, :num_keys] += torch.bmm(grad_scores.transpose(1, 2), queries)
    return grad_query.mul_(scale), grad_key.mul_(scale), grad_value


@dataclass
class _KeyGradients:
    """Of keys or values: what segments give to themselves, and what they give to their prefixes."""

    layout: Layout
    like: Tensor  # [N, G, D]
    own: list[Tensor]
    of_prefixes: Tensor  # float32[G, prefixes, their widest, D]

    @classmethod
    def of(cls, layout: Layout, like: Tensor) -> "_KeyGradients":
        _, num_key_heads, dim = like.shape
        shape = (num_key_heads, layout.num_prefixes, layout.widest_prefix, dim)
        return cls(layout, like, [], like.new_zeros(shape, dtype=torch.float32))

    def add(self, tile: Tile, gradient: Tensor) -> None:
        num_prefix = tile.prefix_BP.shape[1]
        self.own.append(gradient[:, num_prefix:].reshape(-1, gradient.shape[-1]))
        if not num_prefix:
            return
        # The sum over a prefix's rows as a matrix product: it has one order, on a GPU too.
        is_of = (tile.prefix_B == torch.arange(len(tile.prefixes), device=gradient.device)[:, None]).to(gradient.dtype)
        num_key_heads, _, _, dim = self.of_prefixes.shape
        rows = gradient[:, :num_prefix].reshape(num_key_heads, len(tile.prefix_B), -1)
        summed = torch.matmul(is_of, rows).view(num_key_heads, -1, num_prefix, dim)
        self.of_prefixes[:, tile.prefixes, :num_prefix] += summed

    def packed(self) -> Tensor:
        places = self.layout.places(self.like.shape[1], 1)
        made = torch.cat(self.own).index_select(0, places).view(self.like.shape)
        token, prefix, place = self.layout.in_prefix
        made[token] += self.of_prefixes[:, prefix, place].transpose(0, 1).to(made.dtype)
        return made


def packed_attention_reference(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    segments: Sequence[Segment],
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """The same by a mask of N x N and torch's own operations: what `packed_attention` must match."""
    repeats = query_NHD.shape[1] // key_NGD.shape[1]
    query, key, value = (
        x.float().transpose(0, 1) for x in (query_NHD, *(x.repeat_interleave(repeats, 1) for x in (key_NGD, value_NGD)))
    )
    scores = query @ key.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    is_seen = segment_mask(segments).to(scores.device)
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ value).transpose(0, 1).to(query_NHD.dtype)


def segment_mask(segments: Sequence[Segment]) -> Tensor:
    """bool[N, N]: which keys each query sees."""
    lengths = torch.tensor([length for length, _ in segments])
    number = torch.repeat_interleave(torch.arange(len(segments)), lengths)
    prefix = torch.repeat_interleave(
        torch.tensor([-1 if prefix is None else prefix for _, prefix in segments]), lengths
    )
    is_own = (number[:, None] == number) & torch.ones(len(number), len(number), dtype=torch.bool).tril()
    return is_own | (prefix[:, None] == number)


def packed_attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, plan: Tensor, scale: float, softcap: float = 0.0
) -> Tensor:
    """[N, H, D of the values]: each token attends to its segment up to itself and to its segment's prefix.

    `plan` is `attention_plan` of the segments. Scores are `scale` q k, then softcap tanh(scores / softcap) where there
    is a cap. Matrix products are in the type of the arguments, the softmax in float32.
    """
    return packed_attention_op(query_NHD, key_NGD, value_NGD, plan, scale, softcap)


# Operations of their own, so that a compiled graph calls them as they are: what a plan holds differs with every batch.
packed_attention_op = torch.library.custom_op("rft::packed_attention", _forward, mutates_args=())
packed_attention_backward_op = torch.library.custom_op("rft::packed_attention_backward", _backward, mutates_args=())


@packed_attention_op.register_fake
def _(query_NHD, key_NGD, value_NGD, plan, scale, softcap):
    return value_NGD.new_empty(query_NHD.shape[0], query_NHD.shape[1], value_NGD.shape[2])


@packed_attention_backward_op.register_fake
def _(grad_NHD, query_NHD, key_NGD, value_NGD, plan, scale, softcap):
    return tuple(x.new_empty(x.shape) for x in (query_NHD, key_NGD, value_NGD))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad_NHD):
    return *packed_attention_backward_op(grad_NHD, *ctx.saved_tensors, ctx.scale, ctx.softcap), None, None, None


packed_attention_op.register_autograd(_differentiate, setup_context=_setup)
