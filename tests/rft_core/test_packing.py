import numpy as np
import pytest

from rft_core.packing import packed_micro_batches
from tests.rft_core.test_batching import row


def test_layout_by_hand():
    # As drawn in the module: prompt p of 3 with a of 3 and b of 4, q of 2 with c of 2; last tokens are no inputs.
    rows = [
        row("a", [10, 11, 12], [20, 21, 22]),
        row("c", [15, 16], [40, 41]),
        row("b", [10, 11, 12], [30, 31, 32, 33]),
    ]
    (batch,) = packed_micro_batches(rows, 100, True)
    assert batch.row_indices == (0, 2, 1)
    assert batch.lengths == (3, 4, 2)
    assert batch.input_ids_SL.tolist() == [[10, 11, 12, 20, 21, 30, 31, 32, 15, 16, 40]]
    assert batch.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert batch.segments == ((3, None), (2, 0), (3, 0), (3, None))
    assert batch.predicting_T.tolist() == [2, 3, 4, 2, 5, 6, 7, 9, 10]
    assert batch.target_T.tolist() == [20, 21, 22, 30, 31, 32, 33, 40, 41]
    assert batch.num_tokens == 11


def _random_rows(count: int):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 100, size=size).tolist() for size in (3, 9, 17, 30)]
    return [
        row(str(i), prompts[generator.integers(4)], generator.integers(5, 100, size=generator.integers(1, 20)).tolist())
        for i in range(count)
    ]


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 64, 200, 10_000])  # 1: every row alone; 40: less than some; all at once
def test_every_row_once_under_the_budget(shared_prefix, budget):
    rows = _random_rows(60)
    batches = packed_micro_batches(rows, budget, shared_prefix)
    assert sorted(index for batch in batches for index in batch.row_indices) == list(range(60))
    for batch in batches:
        assert batch.num_tokens <= budget or len(batch.row_indices) == 1
        assert batch.num_tokens == sum(length for length, _ in batch.segments)
        before = batch.input_ids_SL.flatten()[batch.predicting_T].split(batch.lengths)
        completions = batch.target_T.split(batch.lengths)
        for index, tokens, completion in zip(batch.row_indices, before, completions, strict=True):
            assert completion.tolist() == rows[index].completion_token_ids.tolist()
            assert tokens.tolist() == [rows[index].prompt_token_ids[-1], *rows[index].completion_token_ids[:-1]]


def test_micro_batches_are_few_and_of_like_cost():
    # 60 rows of at most 20 tokens behind 4 prompts: tokens / 100, rounded up, is the least there can be.
    batches = packed_micro_batches(_random_rows(60), 100, True)
    sizes = [batch.num_tokens for batch in batches]
    assert len(batches) <= -(-sum(sizes) // 100) + 1
    assert max(sizes) - min(sizes) <= 40


def test_rows_beyond_the_window_are_padded():
    long = row("long", [1, 2], list(range(5, 55)))
    short = [row(str(i), [3, 4], [5, 6, 7]) for i in range(4)]
    batches = packed_micro_batches([*short[:2], long, *short[2:]], 1000, True, window=16)
    assert [(batch.segments is None, batch.row_indices) for batch in batches] == [(False, (0, 1, 3, 4)), (True, (2,))]
