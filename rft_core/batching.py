"""Rows -> micro-batches of padded sequences under a token budget.

A sequence is one prompt and, where the model allows it, several completions of that prompt: the prompt is computed
once, each completion attends to the prompt and itself, and its positions go on from the prompt's end.

    input      p0 p1 p2 | a0 a1 | b0 b1 b2 | pad        the last token of a completion predicts nothing: it is left out
    branch      0  0  0 |  1  1 |  2  2  2 |  -1
    position    0  1  2 |  3  4 |  3  4  5 |   0

Shapes: S sequences, L their padded length, T completion tokens, flat, row after row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rft_core.kernels.packed_attention import Segment, attention_plan, segment_mask

# Attention is quadratic in a shared sequence's length, and most of what it computes is masked. On a CPU, which stores
# all of it, 512 costs a third more memory per token than 64; fused attention on a GPU stores none.
SHARED_SEQUENCE_TOKENS = {"cpu": 512, "cuda": 4096}
PROMPT_BRANCH = 0
PADDING_BRANCH = -1


@dataclass(frozen=True)
class TrainRow:
    """One segment of a rollout with its credit; C completion tokens.

    >>> TrainRow("r", "g", np.array([5, 6]), np.array([7, 8, 9]), np.array([True, True, False])).num_trained_tokens
    2
    """

    rollout_id: str
    group_id: str
    prompt_token_ids: np.ndarray  # int64
    completion_token_ids: np.ndarray  # int64[C], C > 0 where a forward pass is wanted
    trained_mask: np.ndarray  # bool[C]: completion_mask, all False unless the row is trained
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # float32[C]
    behaviour_logprobs: np.ndarray | None = None  # float32[C]
    returns: np.ndarray | None = None  # float32[C]: what a critic should say
    weight: float = 1.0
    is_off_policy: bool = False
    is_corrected: bool = False  # weighed by old / behaviour: off-policy, or sampled by other code than the trainer's
    term: str = "own"
    segment: int = 0
    pair_id: str | None = None
    pair_role: str | None = None  # chosen | rejected
    pair_margin: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout_id, self.segment

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_mask.sum())

    @property
    def has_signal(self) -> bool:
        """Whether some trained token's advantage is not exactly 0."""
        return bool(self.advantages[self.trained_mask].any())


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass computes. `row_indices` are places in the list of rows that it was built from."""

    row_indices: tuple[int, ...]
    lengths: tuple[int, ...]  # completion tokens of each row; they sum to T
    input_ids_SL: Tensor  # int64
    position_ids_SL: Tensor  # int64
    branch_SL: Tensor  # int64: 0 prompt, k the k-th completion of the sequence, -1 padding
    predicting_T: Tensor  # int64: index into S x L of the position whose logits predict each completion token
    target_T: Tensor  # int64: the completion tokens
    segments: tuple[Segment, ...] | None = None  # of the one sequence, where it is packed (packing.py)

    @cached_property
    def attention_plan(self) -> Tensor | None:
        """Where it is packed: what `packed_attention` reads."""
        return None if self.segments is None else attention_plan(self.segments)

    @property
    def num_tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids_SL.numel()

    @property
    def is_shared(self) -> bool:
        """Whether some sequence holds more than one completion."""
        return bool((self.branch_SL > 1).any())

    def attention_mask(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Shared: additive [S, 1, L, L], 0 or the type's lowest value. Plain: int64 [S, L], from which the model makes
        its own mask. Padding attends to the prompt and earlier padding, nothing attends to it: no row is empty. Packed:
        additive [1, 1, N, N], for a model that does not attend by segments.
        """
        if self.segments is not None:
            is_seen_NN = segment_mask(self.segments).to(device)
            return torch.zeros_like(is_seen_NN, dtype=dtype).masked_fill_(~is_seen_NN, torch.finfo(dtype).min)[
                None, None
            ]
        branch_SL = self.branch_SL.to(device)
        if not self.is_shared:
            return (branch_SL != PADDING_BRANCH).long()
        length = branch_SL.shape[1]
        keys_S1L, queries_SL1 = branch_SL[:, None, :], branch_SL[:, :, None]
        is_seen_SLL = (keys_S1L == PROMPT_BRANCH) | (keys_S1L == queries_SL1)
        is_seen_SLL &= torch.ones(length, length, dtype=torch.bool, device=device).tril()
        mask_SLL = torch.zeros(is_seen_SLL.shape, dtype=dtype, device=device)
        return mask_SLL.masked_fill_(~is_seen_SLL, torch.finfo(dtype).min)[:, None]


def micro_batches(
    rows: Sequence[TrainRow],
    token_budget: int,
    shared_prefix: bool,
    max_shared_tokens: int = SHARED_SEQUENCE_TOKENS["cpu"],
) -> list[MicroBatch]:
    """Every row in exactly one micro-batch of at most `token_budget` positions; a longer row is alone in its own.

    Sequences of like length meet, so that little is padding. A pure function of the rows' order and tokens.
    """
    limit = min(token_budget, max_shared_tokens) if shared_prefix else 0
    sequences = rows_by_prompt(rows, limit)
    sequences.sort(key=lambda sequence: -num_inputs(rows, sequence))  # stable: equal lengths keep their order
    batches: list[MicroBatch] = []
    waiting: list[list[int]] = []
    for sequence in sequences:
        longest = num_inputs(rows, waiting[0]) if waiting else 0
        is_over = longest * (len(waiting) + 1) > token_budget
        # A lone row may be longer than the window of a model that has one: only the plain mask knows of that.
        is_other_mask = longest > limit >= num_inputs(rows, sequence)
        if waiting and (is_over or is_other_mask):
            batches.append(_micro_batch(rows, waiting))
            waiting = []
        waiting.append(sequence)
    if waiting:
        batches.append(_micro_batch(rows, waiting))
    return batches


def rows_by_prompt(rows: Sequence[TrainRow], limit: int) -> list[list[int]]:
    """Row indices by sequence: rows of equal prompts together, up to `limit` inputs; else one row each."""
    made: list[list[int]] = []
    open_by_prompt: dict[bytes, tuple[list[int], int]] = {}
    for index, row in enumerate(rows):
        if not len(row.prompt_token_ids) or not len(row.completion_token_ids):
            raise ValueError(f"a row needs prompt and completion tokens for a forward pass, {row.rollout_id} has none")
        prompt = row.prompt_token_ids.tobytes()
        added = len(row.completion_token_ids) - 1
        sequence, used = open_by_prompt.get(prompt, ([], 0))
        if sequence and used + added <= limit:
            sequence.append(index)
        else:
            sequence, used = [index], len(row.prompt_token_ids)
            made.append(sequence)
        open_by_prompt[prompt] = (sequence, used + added)
    return made


def num_inputs(rows: Sequence[TrainRow], sequence: list[int]) -> int:
    completions = sum(len(rows[index].completion_token_ids) - 1 for index in sequence)
    return len(rows[sequence[0]].prompt_token_ids) + completions


def _micro_batch(rows: Sequence[TrainRow], sequences: list[list[int]]) -> MicroBatch:
    length = max(num_inputs(rows, sequence) for sequence in sequences)
    input_ids = np.zeros((len(sequences), length), np.int64)  # any id does for padding: nothing reads it
    positions = np.zeros_like(input_ids)
    branches = np.full_like(input_ids, PADDING_BRANCH)
    predicting, targets = [], []
    for s, sequence in enumerate(sequences):
        prompt = rows[sequence[0]].prompt_token_ids
        end = len(prompt)
        input_ids[s, :end], positions[s, :end], branches[s, :end] = prompt, np.arange(end), PROMPT_BRANCH
        for branch, index in enumerate(sequence, start=1):
            completion = rows[index].completion_token_ids
            span = slice(end, end + len(completion) - 1)
            input_ids[s, span] = completion[:-1]
            positions[s, span] = len(prompt) + np.arange(len(completion) - 1)
            branches[s, span] = branch
            predicting.append(s * length + np.concatenate([[len(prompt) - 1], np.arange(span.start, span.stop)]))
            targets.append(completion)
            end = span.stop
    order = [index for sequence in sequences for index in sequence]
    return MicroBatch(
        row_indices=tuple(order),
        lengths=tuple(len(rows[index].completion_token_ids) for index in order),
        input_ids_SL=torch.from_numpy(input_ids),
        position_ids_SL=torch.from_numpy(positions),
        branch_SL=torch.from_numpy(branches),
        predicting_T=torch.from_numpy(np.concatenate(predicting).astype(np.int64)),
        target_T=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
    )
