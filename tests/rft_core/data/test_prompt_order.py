"""Which prompts a step takes: epochs, orders, mixtures, and that all of it is a function of its arguments."""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.schemas import PROMPT_STATS
from rft_core.data.prompt_order import ORDERS, Measured, light_columns, select_prompts, with_difficulty
from rft_core.data.settings import DataSettings
from rft_core.errors import ContractError
from rft_core.seeds import derive, permutation

NAMES = tuple(ORDERS)
EPOCH_ORDERS = ("shuffled", "sequential", "difficulty")


def settings(order: str = "shuffled", **changes) -> DataSettings:
    return DataSettings(source="sums.jsonl", order=order, **changes)


def numbered(total: int, dataset: str = "sums", difficulty=lambda n: float(n)) -> pa.Table:
    """`total` train prompts p0, p1, ..., each followed by a held-out one."""
    names = [name for n in range(total) for name in (f"{dataset}-p{n}", f"{dataset}-held{n}")]
    levels = [level for n in range(total) for level in (difficulty(n), 0.0)]
    columns = {
        "prompt_id": pa.array(names, pa.large_string()),
        "split": pa.array(["train", "heldout"] * total, pa.large_string()),
        "dataset": pa.array([dataset] * 2 * total, pa.large_string()),
        "difficulty": pa.array(levels, pa.float64()),
    }
    return pa.table(columns)


def stats_of(**rows: tuple[float, float]) -> pa.Table:
    """Record prompt_stats from {prompt: (attempts, passes)}; each was drawn once."""
    values = [
        {"prompt_id": f"sums-{name}", "attempts": attempts, "passes": passes, "draws": 1, "last_step": 1}
        for name, (attempts, passes) in rows.items()
    ]
    return pa.Table.from_pylist(values, PROMPT_STATS.schema)


def chosen(table: pa.Table, step: int, count: int, order: str, measured=None, weights=None, seed=3, **changes):
    """Names of the prompts of a step, without the data set's where there is one."""
    rows = select_prompts(table, step, count, settings(order, **changes), weights or {}, seed, measured)
    assert rows.dtype == np.int64 and len(rows) == count
    names = table["prompt_id"].take(pa.array(rows)).to_pylist()
    return names if weights else [name.removeprefix("sums-") for name in names]


def steps_of(total: int, count: int, num_steps: int, order: str = "shuffled", seed: int = 3) -> list[list[str]]:
    table = numbered(total)
    return [chosen(table, step, count, order, seed=seed) for step in range(1, num_steps + 1)]


def run_of(table: pa.Table, count: int, num_steps: int, order: str, solve, weights=None, ahead=0, **changes):
    """Steps of an order that measures: `solve(name, step)` gives (attempts, passes) of a prompt's rollouts.

    The statistics are kept in a dict here, independent of `update_stats`. Rewards come `ahead` steps late.
    """
    known: dict[str, list[float]] = {}
    steps: list[list[str]] = []
    for step in range(1, num_steps + 1):
        if (finished := step - 1 - ahead) >= 1:
            for name in steps[finished - 1]:
                attempts, passes = solve(name, finished)
                before = known.setdefault(name, [0.0, 0.0, 0])
                known[name] = [before[0] + attempts, before[1] + passes, before[2] + 1]
        rows = [
            {"prompt_id": name, "attempts": a, "passes": p, "draws": d, "last_step": 1}
            for name, (a, p, d) in known.items()
        ]
        under_way = [pa.table({"prompt_id": pa.array(names, pa.large_string())}) for names in steps[max(finished, 0) :]]
        measured = Measured(pa.Table.from_pylist(rows, PROMPT_STATS.schema) if rows else None, under_way)
        taken = select_prompts(table, step, count, settings(order, **changes), weights or {}, 3, measured)
        steps.append(table["prompt_id"].take(pa.array(taken)).to_pylist())
    return steps


def test_every_order_of_the_settings_is_there_and_no_other():
    assert set(ORDERS) == set(get_args(DataSettings.model_fields["order"].annotation))


def test_sequential_order_worked_by_hand():
    # Epoch 1 is 0 1 2 3 4. The second step ends it with 3 4 and takes 0. The fourth holds 4: it takes 0 1 next.
    assert steps_of(5, 3, 5, "sequential") == [
        ["p0", "p1", "p2"],
        ["p3", "p4", "p0"],
        ["p1", "p2", "p3"],
        ["p4", "p0", "p1"],
        ["p2", "p3", "p4"],
    ]


@pytest.mark.parametrize(("total", "count"), [(12, 4), (10, 4), (7, 5), (5, 5), (9, 1), (11, 10), (23, 7), (6, 4)])
@pytest.mark.parametrize("order", EPOCH_ORDERS)
def test_no_prompt_twice_in_a_step_and_each_once_an_epoch(total, count, order):
    steps = steps_of(total, count, 4 * total, order)
    everyone = {f"p{n}" for n in range(total)}
    assert all(len(set(step)) == count and set(step) <= everyone for step in steps)
    taken = [name for step in steps for name in step]
    for start in range(0, len(taken), total):
        assert set(taken[start : start + total]) == everyone


def test_epochs_are_shuffled_anew_and_by_seed():
    epochs = steps_of(50, 50, 3)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert steps_of(50, 50, 1, seed=4) != steps_of(50, 50, 1)
    assert steps_of(50, 50, 3) == epochs


def test_the_shuffled_order_is_the_permutation_of_the_epochs_seed():
    # What earlier releases chose, so that runs of one source go on with the same bits.
    [first, second] = steps_of(8, 8, 2)
    assert first == [f"p{n}" for n in permutation(derive(3, "prompts", 0), 8)]
    assert second == [f"p{n}" for n in permutation(derive(3, "prompts", 1), 8)]


def test_places_are_fair():
    # Each of 10 prompts comes first in a fresh epoch 100 times in 1000; 4 standard deviations are 38.
    counts = np.unique([steps_of(10, 10, 1, seed=seed)[0][0] for seed in range(1000)], return_counts=True)[1]
    assert len(counts) == 10 and counts.min() > 62 and counts.max() < 138


@pytest.mark.parametrize("order", NAMES)
def test_fewer_prompts_than_a_step_needs(order):
    with pytest.raises(
        ContractError, match=r"needs 6 different train prompts, found 5; lower rollout\.prompts_per_step"
    ):
        chosen(numbered(5), 1, 6, order)


@pytest.mark.parametrize("order", NAMES)
def test_equal_arguments_give_equal_choices_and_held_out_prompts_are_never_among_them(order):
    measured = Measured(stats_of(p1=(4, 1), p7=(4, 4)))
    for step in (1, 2, 9):
        first = chosen(numbered(20), step, 6, order, measured)
        assert chosen(numbered(20), step, 6, order, measured) == first
        assert len(set(first)) == 6 and not any(name.startswith("held") for name in first)


@pytest.mark.parametrize("order", NAMES)
def test_only_the_light_columns_are_needed(order):
    data = settings(order)
    table = numbered(9).append_column("metadata", pa.array(['{"difficulty":1}'] * 18, pa.large_string()))
    light = table.select(light_columns(data))
    if order == "difficulty":
        light = with_difficulty(light, "difficulty")
    assert len(select_prompts(light, 1, 4, data, {}, 0)) == 4


def test_difficulty_ascends_with_ties_in_the_order_of_the_data_set():
    table = numbered(6, difficulty=lambda n: [2, 0.5, 2, -1, 0.5, 9][n])
    assert chosen(table, 1, 6, "difficulty") == ["p3", "p1", "p4", "p0", "p2", "p5"]
    assert chosen(table, 2, 4, "difficulty") == ["p2", "p5", "p3", "p1"]  # the next epoch is the same again


@pytest.mark.parametrize(
    ("metadata", "name", "number"),
    [
        ({"difficulty": 3}, "difficulty", 3.0),
        ({"difficulty": " 2.5 "}, "difficulty", 2.5),
        ({"info": {"level": "4"}}, "info.level", 4.0),
        ({"info.level": 1, "info": {"level": 2}}, "info.level", 1.0),
        ({"difficulty": True}, "difficulty", None),
        ({"difficulty": "hard"}, "difficulty", None),
        ({"difficulty": "inf"}, "difficulty", None),
        ({"difficulty": [1]}, "difficulty", None),
        ({"difficulty": 10**400}, "difficulty", None),
        ({"info": 3}, "info.level", None),
        ({}, "difficulty", None),
    ],
)
def test_the_number_of_a_prompt(metadata, name, number):
    table = pa.table({"split": ["train"], "metadata": [json.dumps(metadata)]})
    assert with_difficulty(table, name)["difficulty"].to_pylist() == [number]


def test_prompts_without_a_difficulty_are_named():
    table = numbered(9, difficulty=lambda n: None if n in (2, 4, 5, 8) else 1.0)
    with pytest.raises(ContractError) as error:
        chosen(table, 1, 2, "difficulty", difficulty_field="level")
    assert str(error.value).startswith(
        "order difficulty needs a number in the metadata field 'level' of every train prompt, found none in 4 of 9: "
        "sums-p2, sums-p4, sums-p5, ...; set data.difficulty_field"
    )


def test_easy_to_hard_begins_as_shuffled_does():
    steps = run_of(numbered(12), 4, 3, "easy_to_hard", lambda name, step: (4, 2))
    assert [[name.removeprefix("sums-") for name in step] for step in steps] == steps_of(12, 4, 3, "shuffled")


def test_easy_to_hard_goes_by_measured_pass_rate_after_the_first_epoch():
    # p0 always passes, p1 in 7 of 8, ..., p7 in 1 of 8: the second epoch is p0 ... p7.
    steps = run_of(numbered(8), 4, 4, "easy_to_hard", lambda name, step: (8, 8 - int(name[-1])))
    assert steps[2] + steps[3] == [f"sums-p{n}" for n in range(8)]


def test_easy_to_hard_breaks_ties_in_the_epochs_shuffled_order():
    steps = run_of(numbered(8), 8, 2, "easy_to_hard", lambda name, step: (4, 4 if name == "sums-p3" else 0))
    order = [f"sums-p{n}" for n in permutation(derive(3, "prompts", 1), 8) if n != 3]
    assert steps[1] == ["sums-p3", *order]


def test_easy_to_hard_puts_the_unmeasured_in_the_middle():
    stats = stats_of(p0=(4, 3), p1=(0, 0), p2=(4, 1))
    assert chosen(numbered(3), 2, 3, "easy_to_hard", Measured(stats)) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("total", "count"), [(12, 4), (10, 4), (7, 5), (5, 5), (23, 7)])
def test_easy_to_hard_takes_no_prompt_twice_in_a_step_and_each_once_an_epoch(total, count, ahead):
    steps = run_of(numbered(total), count, 3 * total, "easy_to_hard", lambda name, step: (4, step % 5), ahead=ahead)
    assert all(len(set(step)) == count for step in steps)
    taken = [name for step in steps for name in step]
    for start in range(0, len(taken) - total + 1, total):
        assert len(set(taken[start : start + total])) == total


def test_targeted_prefers_the_prompt_whose_pass_rate_is_known_to_be_half():
    # Beta(41, 41) lies within 0.5 +- 0.11 in 95 of 100 draws, Beta(73, 9) and Beta(9, 73) never.
    stats = stats_of(p0=(80, 72), p1=(80, 40), p2=(80, 8))
    taken = [chosen(numbered(3), step, 1, "targeted", Measured(stats))[0] for step in range(1, 101)]
    assert taken == ["p1"] * 100


def test_targeted_follows_its_target():
    stats = stats_of(p0=(80, 72), p1=(80, 40), p2=(80, 8))
    easy = chosen(numbered(3), 1, 3, "targeted", Measured(stats), target_pass_rate=0.9)
    hard = chosen(numbered(3), 1, 3, "targeted", Measured(stats), target_pass_rate=0.1)
    assert easy == ["p0", "p1", "p2"] and hard == ["p2", "p1", "p0"]


def test_targeted_draws_from_the_posterior():
    # Half of 4000 prompts passed in 3 of 4 rollouts, half were never seen. Near 0.8 the density of Beta(4, 2) is about
    # twice that of the uniform prior, so about two of three of the 400 nearest are measured ones.
    stats = stats_of(**{f"p{n}": (4, 3) for n in range(2000)})
    table = numbered(4000)
    taken = [
        int(name[1:])
        for step in range(1, 11)
        for name in chosen(table, step, 400, "targeted", Measured(stats), target_pass_rate=0.8)
    ]
    rng = np.random.default_rng(0)
    distances = np.abs(np.concatenate([rng.beta(4, 2, (200, 2000)), rng.random((200, 2000))], axis=1) - 0.8)
    expected = np.mean(np.argsort(distances, axis=1)[:, :400] < 2000)
    assert 0.6 < expected < 0.7
    # The standard deviation of a share of 4000 is 0.008.
    assert abs(np.mean(np.array(taken) < 2000) - expected) < 0.03


def test_targeted_draws_do_not_depend_on_what_is_known_of_others():
    few, more = Measured(stats_of(p5=(4, 2))), Measured(stats_of(p5=(4, 2), p9=(8, 8)))
    table = numbered(10)
    for step in range(1, 30):
        with_few = [name for name in chosen(table, step, 10, "targeted", few) if name != "p9"]
        assert with_few == [name for name in chosen(table, step, 10, "targeted", more) if name != "p9"]


def test_targeted_tries_everything_and_stays_at_the_target():
    # Pass rates 0, 0.1, ..., 1 for 33 prompts: after 60 steps the prompts with 0.5 have most of the draws.
    def solve(name: str, step: int) -> tuple[float, float]:
        rate = int(name.removeprefix("sums-p")) % 11 / 10
        return 8, round(8 * rate)

    steps = run_of(numbered(33), 4, 120, "targeted", solve)
    assert all(len(set(step)) == 4 for step in steps)
    assert {name for step in steps for name in step} >= {f"sums-p{n}" for n in range(33) if 2 <= n % 11 <= 8}
    late = [int(name.removeprefix("sums-p")) % 11 for step in steps[60:] for name in step]
    assert np.mean(np.isin(late, (4, 5, 6))) > 0.8
    assert np.mean(np.isin(late, (0, 10))) < 0.02


WEIGHTS = {"sums": 3.0, "words": 1.0}


def mixture(sums: int, words: int) -> pa.Table:
    return pa.concat_tables([numbered(sums), numbered(words, "words")])


@pytest.mark.parametrize("order", NAMES)
def test_shares_of_a_mixture_converge_to_its_weights(order):
    table = mixture(40, 40)
    taken = [name for step in range(1, 401) for name in chosen(table, step, 10, order, weights=WEIGHTS)]
    # 4000 places; the share of sums has standard deviation 0.0068.
    assert abs(np.mean([name.startswith("sums") for name in taken]) - 0.75) < 0.028


@pytest.mark.parametrize("order", EPOCH_ORDERS)
@pytest.mark.parametrize(("sums", "words", "count"), [(30, 11, 4), (9, 5, 6), (6, 3, 8), (20, 2, 7)])
def test_each_data_set_of_a_mixture_has_epochs_of_its_own(order, sums, words, count):
    table = mixture(sums, words)
    steps = [chosen(table, step, count, order, weights=WEIGHTS) for step in range(1, 161)]
    assert all(len(set(step)) == count for step in steps)
    for name, total in (("sums", sums), ("words", words)):
        taken = [prompt for step in steps for prompt in step if prompt.startswith(name)]
        assert len(taken) > 2 * total
        for start in range(0, len(taken) - total + 1, total):
            assert len(set(taken[start : start + total])) == total


def test_easy_to_hard_has_epochs_in_each_part_of_a_mixture():
    steps = run_of(mixture(9, 4), 5, 60, "easy_to_hard", lambda name, step: (4, step % 5), weights=WEIGHTS, ahead=1)
    assert all(len(set(step)) == 5 for step in steps)
    for name, total in (("sums", 9), ("words", 4)):
        taken = [prompt for step in steps for prompt in step if prompt.startswith(name)]
        for start in range(0, len(taken) - total + 1, total):
            assert len(set(taken[start : start + total])) == total


def test_a_sequential_mixture_takes_each_data_set_in_its_order():
    steps = [chosen(mixture(50, 50), step, 6, "sequential", weights=WEIGHTS) for step in range(1, 7)]
    for name in WEIGHTS:
        taken = [prompt for step in steps for prompt in step if prompt.startswith(name)]
        assert taken == [f"{name}-p{n}" for n in range(len(taken))]


def test_a_small_part_gives_its_places_to_the_others():
    # 9 of 10 places would be sums', which has 2 prompts: words fills the rest.
    for step in range(1, 20):
        names = chosen(mixture(2, 30), step, 10, "shuffled", weights={"sums": 9.0, "words": 1.0})
        assert len(set(names)) == 10
        assert sum(name.startswith("sums") for name in names) == 2


def test_a_mixture_of_one_is_that_one():
    table = numbered(20)
    for step in range(1, 9):
        assert chosen(table, step, 6, "shuffled", weights={"sums": 2.0}) == [
            f"sums-{name}" for name in chosen(table, step, 6, "shuffled")
        ]


def test_a_mixture_whose_parts_are_not_those_of_the_table():
    with pytest.raises(ContractError, match="found none of 'poems'; see quarantine"):
        chosen(mixture(9, 9), 1, 2, "shuffled", weights={**WEIGHTS, "poems": 1.0})
    with pytest.raises(ContractError, match=r"must be those of data.mixture \(sums, poems\), found 'words'"):
        chosen(mixture(9, 9), 1, 2, "shuffled", weights={"sums": 1.0, "poems": 1.0})
