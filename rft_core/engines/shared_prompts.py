"""Decoding where a prompt's keys and values are held once, however many rows continue it.

A token attends to two stores: its prompt's, which the rows of a group read together in one matrix product, and its own
row's, which grows in place. Attention comes in by transformers' table of attention functions, so that this serves any
model that looks its attention up there and asks nothing else of it; `find_sharing` finds that out on a few tokens.

R rows, G prompts, N the most rows of one prompt, H key-value heads, Q query heads of each, P prompt length
(left-padded), T own tokens so far, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from rft_core.engines.cached_forward import CachedForward

ATTENTION = "rft_shared_prompts"
FIRST_CAPACITY = 64  # own tokens for which a row has space at first; doubled when they are used up
# What may be passed to attention beside queries, keys and values without changing what it must compute here.
UNREAD = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache"})


class UnsupportedAttention(Exception):
    """The model asks something of attention that is not done here."""


class OwnTokens(CacheLayerMixin):
    """A layer's keys and values [R, H, T, D] of the tokens drawn so far, in buffers that grow by doubling."""

    is_sliding = False

    def __init__(self, prompt_keys: Tensor, prompt_values: Tensor) -> None:
        super().__init__()
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], FIRST_CAPACITY, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.length == self.keys.shape[2]:
            self.keys, self.values = (pad(buffer, (0, 0, 0, self.length)) for buffer in (self.keys, self.values))
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def pick(self, rows: Tensor, prompts: Tensor | None) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        if prompts is not None:
            self.prompt_keys = self.prompt_keys.index_select(0, prompts)
            self.prompt_values = self.prompt_values.index_select(0, prompts)

    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[2] + self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SharedPrompts:
    """Rows that continue prompts already run. Stands where a CachedForward does after its `prefill`."""

    can_pick = True

    def __init__(self, prefilled: CachedForward, prompt_of_row: list[int]) -> None:
        """`prefilled` holds each distinct prompt once; row r continues prompt `prompt_of_row[r]`, in rising order."""
        self.model = prefilled
        mask_GP = prefilled.mask[:, : prefilled.length]
        self.is_padding_GP = None if bool(mask_GP.all()) else mask_GP == 0
        self.layers = [OwnTokens(layer.keys, layer.values) for layer in prefilled.cache.layers]
        self.cache = Cache(layers=self.layers)
        self.prompt_of_row = prompt_of_row
        self.next_position_R = prefilled.next_position_R[torch.tensor(prompt_of_row, device=prefilled.device)]
        self.shortest_window: int | None = None  # that attention was called with
        self.num_calls = 0
        self._place()

    def step(self, token_R: Tensor) -> Tensor:
        """Appends one token to every row; logits [R, V] of the next."""
        position_R1 = self.next_position_R[:, None]
        self.next_position_R = self.next_position_R + 1
        active = _ACTIVE.set(self)
        try:
            output = self.model.module(
                input_ids=token_R[:, None],
                position_ids=position_R1,
                use_cache=True,
                **{self.model.cache_name: self.cache},
                **self.model.last_only,
            )
        finally:
            _ACTIVE.reset(active)
        return output.logits[:, -1]

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """What `step` needs around it."""
        with attention_of(self.model.module, ATTENTION):
            yield

    def pick(self, rows: Tensor) -> None:
        """The batch becomes these rows of the present one, in rising order."""
        kept = [self.prompt_of_row[row] for row in rows.tolist()]
        living = sorted(set(kept))
        prompts = None
        if len(living) < self.num_prompts:
            prompts = torch.tensor(living, device=self.model.device)
            if self.is_padding_GP is not None:
                self.is_padding_GP = self.is_padding_GP.index_select(0, prompts)
        for layer in self.layers:
            layer.pick(rows, prompts)
        self.prompt_of_row = [living.index(prompt) for prompt in kept]
        self.next_position_R = self.next_position_R.index_select(0, rows)
        self._place()

    def to_slots(self, values_R: Tensor) -> Tensor:
        """[R, H, Q, X] -> [G * H, N * Q, X]: the rows of a prompt side by side, spare slots filled with any row."""
        if self.row_of_slot is not None:
            values_R = values_R.index_select(0, self.row_of_slot)
        heads, queries, size = values_R.shape[1:]
        slots = values_R.reshape(self.num_prompts, self.most_rows, heads, queries, size).transpose(1, 2)
        return slots.reshape(self.num_prompts * heads, self.most_rows * queries, size)

    def to_rows(self, slots: Tensor, heads: int) -> Tensor:
        """The inverse of `to_slots`."""
        slots = slots.reshape(self.num_prompts, heads, self.most_rows, -1, slots.shape[-1]).transpose(1, 2)
        values = slots.reshape(self.num_prompts * self.most_rows, heads, -1, slots.shape[-1])
        return values if self.slot_of_row is None else values.index_select(0, self.slot_of_row)

    def _place(self) -> None:
        """Slots: N for every prompt, of which the first ones are its rows."""
        self.num_prompts = self.prompt_of_row[-1] + 1
        counts = [0] * self.num_prompts
        places = []
        for prompt in self.prompt_of_row:
            places.append((prompt, counts[prompt]))
            counts[prompt] += 1
        self.most_rows = max(counts)
        self.row_of_slot: Tensor | None = None
        self.slot_of_row: Tensor | None = None
        if min(counts) == self.most_rows:
            return
        slot_of_row = [prompt * self.most_rows + member for prompt, member in places]
        row_of_slot = [0] * (self.num_prompts * self.most_rows)
        for row, slot in enumerate(slot_of_row):
            row_of_slot[slot] = row
        self.row_of_slot = torch.tensor(row_of_slot, device=self.model.device)
        self.slot_of_row = torch.tensor(slot_of_row, device=self.model.device)


_ACTIVE: ContextVar[SharedPrompts] = ContextVar("shared_prompts")


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """[R, 1, H * Q, D]: what transformers' attention functions return. Scores and softmax in float32, as its own do."""
    unknown = [name for name, given in more.items() if given is not None and given is not False and name not in UNREAD]
    if unknown or attention_mask is not None or query.shape[2] != 1:
        what = ", ".join(unknown) or "a mask of its own, or several tokens at once"
        raise UnsupportedAttention(f"its attention is called with {what}")
    shared = _ACTIVE.get()
    shared.num_calls += 1
    if sliding_window is not None:
        shared.shortest_window = min(sliding_window, shared.shortest_window or sliding_window)
    layer = shared.layers[module.layer_idx]
    rows, heads, _, size = key.shape
    if layer.prompt_keys.shape[1] != heads:
        raise UnsupportedAttention(f"keys of {heads} heads, where the cache holds {layer.prompt_keys.shape[1]}")
    query_RHQD = query.reshape(rows, heads, -1, size)
    prompt_length = layer.prompt_keys.shape[2]
    to_prompt = torch.bmm(shared.to_slots(query_RHQD), layer.prompt_keys.flatten(0, 1).transpose(1, 2))
    if shared.is_padding_GP is not None:
        by_prompt = to_prompt.view(shared.num_prompts, -1, prompt_length)
        by_prompt.masked_fill_(shared.is_padding_GP[:, None], -torch.inf)
    scores = torch.cat([shared.to_rows(to_prompt, heads), query_RHQD @ key.transpose(2, 3)], dim=-1).float()
    scale = size**-0.5 if scaling is None else scaling
    weights = scores.mul_(scale).softmax(dim=-1).to(value.dtype)
    from_prompt = torch.bmm(shared.to_slots(weights[..., :prompt_length]), layer.prompt_values.flatten(0, 1))
    output = shared.to_rows(from_prompt, heads) + weights[..., prompt_length:] @ value
    return output.reshape(rows, 1, -1, output.shape[-1]), None


AttentionInterface.register(ATTENTION, attend)


@contextmanager
def attention_of(module: Any, name: str) -> Iterator[None]:
    """Another attention function for a while."""
    before = module.config._attn_implementation
    module.set_attn_implementation(name)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@dataclass(frozen=True)
class Sharing:
    """Whether a model's rows may share their prompts: up to `longest` tokens a row (None is any), and if not, why."""

    refusal: str | None = None
    longest: int | None = None

    def serves(self, num_tokens: int) -> bool:
        return self.refusal is None and (self.longest is None or num_tokens <= self.longest)


# Prompts of unequal length and unequal numbers of rows; then rows leave, and with them a prompt.
PROBE_PROMPTS = ((5, 3), (7, 2), (9, 1))  # (length, rows)
PROBE_STEPS = 4
PROBE_PICK = {2: [0, 2, 3, 4], 3: [1, 2]}  # before which step which rows stay
# Nats that two ways of computing may differ by, on average over what the model would draw and in the median of rows (a
# mixture of experts may send one row elsewhere). Rounding stays far below, another function is far above.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


def find_sharing(module: Any, device: torch.device | str) -> Sharing:
    """Decode a few tokens both ways. Families whose attention is more than a softmax of products, whose layers keep
    another state than keys and values, or that do not look attention up, show here."""
    try:
        return _compare(module, device)
    except torch.OutOfMemoryError:  # says nothing of the model, and another process would find otherwise
        raise
    except (UnsupportedAttention, TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        name = "" if isinstance(error, UnsupportedAttention) else f"{type(error).__name__}: "
        return Sharing(f"{name}{error}".splitlines()[0])


def _compare(module: Any, device: torch.device | str) -> Sharing:
    vocabulary = module.get_input_embeddings().weight.shape[0]
    numbers = ((torch.arange(100) * 7919 + 13) % vocabulary).tolist()
    prompts = [tuple(numbers[10 * index : 10 * index + length]) for index, (length, _) in enumerate(PROBE_PROMPTS)]
    prompt_of_row = [index for index, (_, rows) in enumerate(PROBE_PROMPTS) for _ in range(rows)]
    plain = CachedForward(module, device, PROBE_STEPS)
    plain.prefill([prompts[prompt] for prompt in prompt_of_row])
    prefilled = CachedForward(module, device, PROBE_STEPS)
    prefilled.prefill(prompts)
    refusal = _unlike_plain_cache(prefilled)
    if refusal:
        return Sharing(refusal)
    windows = [window for layer in prefilled.cache.layers if (window := getattr(layer, "sliding_window", None))]
    shared = SharedPrompts(prefilled, prompt_of_row)
    largest = 0.0
    for step in range(PROBE_STEPS):
        if step in PROBE_PICK:
            kept = torch.tensor(PROBE_PICK[step], device=device)
            plain.pick(kept)
            shared.pick(kept)
        token_R = torch.tensor(numbers[50 + 10 * step :][: len(shared.prompt_of_row)], device=device)
        expected = plain.step(token_R).float().log_softmax(dim=-1)
        with shared.decoding():
            found = shared.step(token_R).float().log_softmax(dim=-1)
        gap_R = (expected.exp() * (found - expected)).abs().sum(dim=-1)
        largest = max(largest, float(gap_R.nan_to_num(torch.inf).median()))
    if shared.num_calls != PROBE_STEPS * len(shared.layers):
        return Sharing("its layers do not all look their attention up")
    if largest > PROBE_TOLERANCE.get(module.dtype, PROBE_TOLERANCE[torch.bfloat16]):
        return Sharing(f"logprobs differ by {largest:.2g} nats")
    windows += [shared.shortest_window] if shared.shortest_window is not None else []
    return Sharing(longest=min(windows, default=None))


def _unlike_plain_cache(prefilled: CachedForward) -> str | None:
    if not prefilled.takes_positions:
        return "it takes no positions"
    if not prefilled.module._can_set_attn_implementation():
        return "its attention function cannot be chosen"
    layers = prefilled.cache.layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"its cache has layers of the kind {type(layer).__name__}"
        if layer.keys is None or layer.keys.shape[2] != prefilled.length:
            return f"its attention sees fewer than {prefilled.length} tokens"
    return None
