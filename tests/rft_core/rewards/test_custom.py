"""A user's function: what it may give, and how every mistake is named (cases rw-01 and rw-03)."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest

from rft_core.errors import GraderUnavailable, RewardFunctionError
from rft_core.rewards import custom
from rft_core.rewards.custom import BadValue, as_scored, call
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction


def rows(count: int) -> list[RewardRow]:
    return [RewardRow(f"step-00001/p/{i:02d}", "p", [], f"text {i}", "1", {}, "stop") for i in range(count)]


def of(function, count: int = 2) -> list[Scored]:
    return call(function, "mine", rows(count), "score")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (1, 1.0),
        (0.25, 0.25),
        (-0.0, 0.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (np.int64(3), 3.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers(value, expected):
    assert as_scored(value, "score") == Scored(expected)
    assert type(as_scored(value, "score").value) is float


def test_a_tensor_without_dimensions_is_a_number():
    import torch

    assert as_scored(torch.tensor(0.5, dtype=torch.bfloat16), "score") == Scored(0.5)
    assert [s.value for s in of(lambda batch: torch.tensor([0.0, 1.0]))] == [0.0, 1.0]


@pytest.mark.parametrize(
    "value", [None, math.nan, np.float32("nan"), {"score": None}, {"score": math.nan}, Scored(None)]
)
def test_none_and_nan_are_unscored(value):
    scored = as_scored(value, "score")
    assert scored.value is None
    assert scored.reason.startswith("the function gave ")


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        np.float64("inf"),
        10**400,
        "0.7",
        b"1",
        np.array([1.0]),
        [1.0],
        1j,
        object(),
        {"score": "1"},
    ],
)
def test_everything_else_is_an_error(value):
    with pytest.raises(BadValue):
        as_scored(value, "score")
    with pytest.raises(RewardFunctionError, match="mine, row step-00001/p/01: "):
        of(lambda batch: [0.0, value])


def test_error_shows_the_value():
    with pytest.raises(RewardFunctionError, match=r"mine, row step-00001/p/01: .* got '0.7' \(str\)"):
        of(lambda batch: [0.0, "0.7"])


# Case rw-03: floats and dicts side by side.
def test_dicts_keep_their_metrics():
    values = [1.0, {"score": 0.5, "tests_passed": 2, "tests_total": 4}, 0, {"score": 1.0, "seconds": 0.2, "gone": None}]
    assert of(lambda batch: values, 4) == [
        Scored(1.0),
        Scored(0.5, None, {"tests_passed": 2.0, "tests_total": 4.0}),
        Scored(0.0),
        Scored(1.0, None, {"seconds": 0.2, "gone": None}),
    ]


def test_dict_without_score_names_keys_and_setting():
    with pytest.raises(RewardFunctionError, match=r"'score' \(setting score_key\), it has the keys \['acc'\]"):
        of(lambda batch: [0.0, {"acc": 1.0}])
    assert call(lambda batch: [{"acc": 1.0}], "mine", rows(1), "acc") == [Scored(1.0)]


def test_reason_of_a_dict_and_a_scored():
    assert as_scored({"score": None, "reason": "judge is down"}, "score") == Scored(None, "judge is down")
    assert as_scored(Scored(0.0, "no box", {"boxes": 0}), "score") == Scored(0.0, "no box", {"boxes": 0.0})
    with pytest.raises(BadValue, match="'reason' must hold a text"):
        as_scored({"score": 1, "reason": 3}, "score")
    with pytest.raises(BadValue, match="metric 'why'"):
        as_scored({"score": 1, "why": "long story"}, "score")


@pytest.mark.parametrize("values", [[1.0], [1.0] * 3, [], (0.5,)])
def test_wrong_length(values):
    with pytest.raises(
        RewardFunctionError, match=rf"mine must give one value per row: 2 rows .* got {len(values)} values"
    ):
        of(lambda batch: values)


@pytest.mark.parametrize("values", [None, 1.0, "ab", {0: 1.0, 1: 2.0}, (x for x in (1.0, 2.0)), np.zeros((2, 1))])
def test_no_list(values):
    with pytest.raises(RewardFunctionError, match="mine must give a list of 2 values"):
        of(lambda batch: values)


def test_exception_names_the_row_at_hand():
    def fails(batch):
        return [1 / (row.rollout_id != "step-00001/p/01") for row in batch]

    with pytest.raises(
        RewardFunctionError, match=r"mine raised ZeroDivisionError: .* at row step-00001/p/01 .*'text 1'"
    ):
        of(fails, 3)


def test_exception_without_a_row_names_the_batch():
    with pytest.raises(
        RewardFunctionError, match="mine raised KeyError: 'x' in the batch of 2 rows from step-00001/p/00"
    ):
        of(lambda batch: {}["x"])


def test_a_function_may_do_to_its_list_what_it_likes():
    def empties(batch):
        count = len(batch)
        batch.clear()
        return [1.0] * count

    assert of(empties) == [Scored(1.0)] * 2


def test_what_a_function_says_becomes_valid_text_and_stays_short_in_messages():
    said = {"score": 0.0, "reason": "half \ud800", "half \udfff": 1.0}
    assert as_scored(said, "score") == Scored(0.0, "half \\ud800", {"half \\udfff": 1.0})

    def fails(batch):
        raise ValueError("\ud800" + "x" * 10_000)

    with pytest.raises(RewardFunctionError, match=r"raised ValueError: \\ud800xx") as error:
        of(fails)
    assert len(str(error.value)) < 500


def test_exit_does_not_end_the_run_and_transient_errors_pass():
    def leaves(batch):
        raise SystemExit(0)

    def is_down(batch):
        raise GraderUnavailable("the judge is down")

    with pytest.raises(RewardFunctionError, match="SystemExit"):
        of(leaves)
    with pytest.raises(GraderUnavailable):
        of(is_down)


def test_async_functions_inside_and_outside_a_loop():
    async def later(batch):
        await asyncio.sleep(0)
        return [0.5] * len(batch)

    async def inside():
        return of(later)

    async def fails(batch):
        raise ValueError("late")

    assert of(later) == [Scored(0.5)] * 2
    assert asyncio.run(inside()) == [Scored(0.5)] * 2
    with pytest.raises(RewardFunctionError, match="ValueError: late"):
        of(fails)


def test_empty_batch_is_not_handed_over(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(rows):\n    return [rows[0].answer]\n")
    scorer = custom.build(RewardFunction(name="custom", path="mine.py:reward"), tmp_path)
    assert scorer.score([]) == []
