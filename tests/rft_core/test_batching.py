import numpy as np
import pytest
import torch

from rft_core.batching import TrainRow, micro_batches


def row(name: str, prompt: list[int], completion: list[int]) -> TrainRow:
    ids = np.array(completion, np.int64)
    return TrainRow(name, "g", np.array(prompt, np.int64), ids, np.ones(len(ids), bool))


def test_shared_layout_by_hand():
    # As drawn in the module: prompt p of 3, completions a of 3 and b of 4, whose last tokens are no inputs.
    rows = [row("a", [10, 11, 12], [20, 21, 22]), row("b", [10, 11, 12], [30, 31, 32, 33])]
    (batch,) = micro_batches(rows, 100, shared_prefix=True)
    assert batch.input_ids_SL.tolist() == [[10, 11, 12, 20, 21, 30, 31, 32]]
    assert batch.branch_SL.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert batch.predicting_T.tolist() == [2, 3, 4, 2, 5, 6, 7]
    assert batch.target_T.tolist() == [20, 21, 22, 30, 31, 32, 33]
    assert batch.lengths == (3, 4)
    is_seen = (batch.attention_mask(torch.float32, "cpu")[0, 0] == 0).int().tolist()
    assert is_seen == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1, 1, 1],
    ]


def test_plain_layout_pads_on_the_right_and_leaves_the_mask_to_the_model():
    rows = [row("a", [1], [5]), row("b", [1], [6, 7, 8])]
    (batch,) = micro_batches(rows, 100, shared_prefix=False)
    assert batch.row_indices == (1, 0)  # longest first
    assert batch.input_ids_SL.tolist() == [[1, 6, 7], [1, 0, 0]]
    assert batch.attention_mask(torch.float32, "cpu").tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.predicting_T.tolist() == [0, 1, 2, 3]


def _random_rows(count: int) -> list[TrainRow]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 100, size=size).tolist() for size in (3, 9, 17)]
    return [
        row(str(i), prompts[generator.integers(3)], generator.integers(5, 100, size=generator.integers(1, 20)).tolist())
        for i in range(count)
    ]


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 64, 1000])  # 1: every sequence alone; 40: less than some; 1000: everything
def test_every_row_once_under_the_budget(shared_prefix, budget):
    rows = _random_rows(50)
    batches = micro_batches(rows, budget, shared_prefix, max_shared_tokens=60)
    assert sorted(index for batch in batches for index in batch.row_indices) == list(range(50))
    for batch in batches:
        assert batch.num_tokens <= budget or len(batch.row_indices) == 1
        completions = batch.target_T.split(batch.lengths)
        for index, completion in zip(batch.row_indices, completions, strict=True):
            assert completion.tolist() == rows[index].completion_token_ids.tolist()
        # A predicting position holds the token before its target: the prompt's last, then the completion's own.
        before = batch.input_ids_SL.flatten()[batch.predicting_T].split(batch.lengths)
        for index, tokens in zip(batch.row_indices, before, strict=True):
            expected = [rows[index].prompt_token_ids[-1], *rows[index].completion_token_ids[:-1]]
            assert tokens.tolist() == expected


def test_sequences_longer_than_shared_ones_may_be_keep_the_models_own_mask():
    long = row("long", [1, 2], list(range(5, 55)))
    short = [row(str(i), [3, 4], [5, 6, 7]) for i in range(4)]
    batches = micro_batches([*short, long], 1000, shared_prefix=True, max_shared_tokens=16)
    assert [batch.is_shared for batch in batches] == [False, True]
    assert batches[0].row_indices == (4,)


def test_rows_of_equal_prompts_share_although_their_groups_differ_in_order():
    rows = [row("a", [1, 2], [5, 6]), row("b", [3], [5]), row("c", [1, 2], [7, 8])]
    (batch,) = micro_batches(rows, 100, shared_prefix=True)
    assert batch.input_ids_SL.shape == (2, 4)


def test_a_row_without_completion_is_refused():
    with pytest.raises(ValueError, match="has none"):
        micro_batches([row("empty", [1], [])], 100, shared_prefix=True)
