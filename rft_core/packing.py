"""Rows -> micro-batches without padding: one sequence of segments, each prompt once before its completions.

    tokens     p0 p1 p2 | a0 a1 | b0 b1 b2 | q0 q1 c0
    position    0  1  2 |  3  4 |  3  4  5 |  0  1  2
    segments   3, None    2, 0    3, 0       3, None       q has one completion: they are one segment

How many tokens a row costs depends on nothing beside it, so micro-batches can be made of equal cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rft_core.batching import PROMPT_BRANCH, MicroBatch, TrainRow, micro_batches, num_inputs, rows_by_prompt
from rft_core.kernels.packed_attention import Segment

# Attending to so many tokens costs as much as all that a layer does to a token beside that.
ATTENDED_TOKENS = 2048


def packed_micro_batches(
    rows: Sequence[TrainRow], token_budget: int, shared_prefix: bool, window: int | None = None
) -> list[MicroBatch]:
    """Every row in exactly one micro-batch of at most `token_budget` tokens; a longer row is alone in its own.

    As few micro-batches as greedy filling needs, of like cost. A pure function of the rows' order and tokens. Rows
    longer than the window of a model that has one are padded: only the model's own mask knows of that.
    """
    fitting = [index for index, row in enumerate(rows) if window is None or num_inputs(rows, [index]) <= window]
    if len(fitting) < len(rows):
        others = sorted(set(range(len(rows))) - set(fitting))
        made = packed_micro_batches([rows[index] for index in fitting], token_budget, shared_prefix) if fitting else []
        padded = micro_batches([rows[index] for index in others], token_budget, False)
        return [
            replace(batch, row_indices=tuple(numbers[index] for index in batch.row_indices))
            for batches, numbers in ((made, fitting), (padded, others))
            for batch in batches
        ]
    sequences = rows_by_prompt(rows, token_budget if shared_prefix else 0)
    sizes = [num_inputs(rows, sequence) for sequence in sequences]
    costs = [_cost(rows, sequence) for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: -costs[index])  # stable: equal costs keep their order
    count = max(1, -(-sum(sizes) // token_budget))
    while (filled := _filled(order, sizes, costs, count, token_budget)) is None:
        count += 1
    return [_packed(rows, [sequences[index] for index in sorted(bin)]) for bin in filled if bin]


def _filled(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], count: int, token_budget: int
) -> list[list[int]] | None:
    """Each into the cheapest of `count` bins that has room; None when one finds none. An empty bin has room for any."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used, spent = [0] * count, [0.0] * count
    for index in order:
        open_bins = [bin for bin in range(count) if not used[bin] or used[bin] + sizes[index] <= token_budget]
        if not open_bins:
            return None
        chosen = min(open_bins, key=lambda bin: spent[bin])
        bins[chosen].append(index)
        used[chosen] += sizes[index]
        spent[chosen] += costs[index]
    return bins


def _cost(rows: Sequence[TrainRow], sequence: Sequence[int]) -> float:
    """In tokens of a layer without its attention."""
    prompt = len(rows[sequence[0]].prompt_token_ids)
    counts = [len(rows[index].completion_token_ids) - 1 for index in sequence]
    attended = prompt * prompt / 2 + sum(count * (prompt + count / 2) for count in counts)
    return prompt + sum(counts) + attended / ATTENDED_TOKENS


def _packed(rows: Sequence[TrainRow], sequences: list[list[int]]) -> MicroBatch:
    input_ids, positions, branches, predicting, targets = [], [], [], [], []
    segments: list[Segment] = []
    end = 0
    for sequence in sequences:
        prompt = rows[sequence[0]].prompt_token_ids
        completions = [rows[index].completion_token_ids for index in sequence]
        inputs = [prompt, *(completion[:-1] for completion in completions)]
        last_of_prompt, end = end + len(prompt) - 1, end + len(prompt)
        if len(sequence) == 1:
            segments.append((len(prompt) + len(inputs[1]), None))
        else:
            shared = len(segments)
            segments += [(len(prompt), None), *((len(tokens), shared) for tokens in inputs[1:])]
        for completion in completions:
            predicting.append(np.concatenate([[last_of_prompt], np.arange(end, end + len(completion) - 1)]))
            end += len(completion) - 1
        input_ids += inputs
        positions.append(np.arange(len(prompt)))
        positions += [len(prompt) + np.arange(len(tokens)) for tokens in inputs[1:]]
        branches += [np.full(len(tokens), PROMPT_BRANCH + number) for number, tokens in enumerate(inputs)]
        targets += completions
    order = [index for sequence in sequences for index in sequence]

    def flat(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return MicroBatch(
        row_indices=tuple(order),
        lengths=tuple(len(rows[index].completion_token_ids) for index in order),
        input_ids_SL=flat(input_ids)[None],
        position_ids_SL=flat(positions)[None],
        branch_SL=flat(branches)[None],
        predicting_T=flat(predicting),
        target_T=flat(targets),
        segments=tuple(segments),
    )


def warm_up_rows(vocabulary: int) -> list[TrainRow]:
    """Rows from which code is compiled: enough tokens for it to use all threads, in numbers that nothing divides."""
    ids = (np.arange(2048) * 7919 + 13) % vocabulary
    prompts = ids[:43], ids[43:94]
    rows = [(prompt, ids[200 + 71 * n : 200 + 71 * n + 30 + 7 * n]) for prompt in prompts for n in range(8)]
    return [TrainRow(str(n), "", prompt, completion, completion >= 0) for n, (prompt, completion) in enumerate(rows)]
