"""What the data set says of its own completions, kind by kind."""

from __future__ import annotations

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError
from data_contracts.schemas import REWARDS
from data_contracts.validation import check_table
from rft_core.rewards.given import GIVEN, MARGIN, given_rewards
from tests.rft_core.given_examples import demonstration, labelled, pair, stepwise, table_of, trajectory
from tests.rft_core.rewards.tables import rollouts_table


def rewarded(*examples: dict, rollouts: list[dict] | None = None) -> list[dict]:
    """Rewards of the first completion of each example, or of the rollouts given."""
    made = rollouts_table(*(rollouts or [{"prompt_id": example["example_id"]} for example in examples]))
    table = given_rewards(made, table_of(*examples))
    assert table.schema.equals(REWARDS.schema, check_metadata=True)
    check_table(table, "rewards")
    return table.to_pylist()


def test_a_row_by_hand():
    [row] = rewarded(demonstration("a"))
    assert row == {
        "rollout_id": "step-00001/a/00",
        "group_id": "step-00001/a",
        "reward": 1.0,
        "components": [(GIVEN, 1.0)],
        "component_status": [(GIVEN, "scored")],
        "status": "scored",
        "reason": None,
        "turn_rewards": None,
        "step_ends": None,
        "step_rewards": None,
        "grader_digest": GIVEN,
    }


def test_chosen_gets_1_and_rejected_0_and_the_margin_is_that_of_chosen():
    both = [{"prompt_id": "a", "index": 0}, {"prompt_id": "a", "index": 1}]
    rows = rewarded(pair("a"), rollouts=both)
    assert [(row["rollout_id"], row["reward"]) for row in rows] == [("step-00001/a/00", 1.0), ("step-00001/a/01", 0.0)]
    rows = rewarded(pair("a", margin=0.75), rollouts=both)
    assert [dict(row["components"]) for row in rows] == [{GIVEN: 1.0, MARGIN: 0.75}, {GIVEN: 0.0}]
    assert [row["reward"] for row in rows] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("example", "reward"),
    [
        (labelled("a", True), 1.0),
        (labelled("a", False), 0.0),
        (trajectory("a", "x", reward=-2.5), -2.5),
        (trajectory("a", "x", "y", reward=0.25, turn_rewards=[1.0, 1.0]), 0.25),  # the whole's own
        (trajectory("a", "x", "y", turn_rewards=[0.5, -2.0]), -1.5),
        (trajectory("a", "x", "y", "z", turn_rewards=[0.5, None, 1.0]), 1.5),
        (trajectory("a", "x", turn_rewards=[None]), 0.0),
        (stepwise("a", [1.0, 0.0, 1.0], "x", "y", "z"), 2 / 3),
    ],
)
def test_rewards_by_kind(example, reward):
    [row] = rewarded(example)
    assert row["reward"] == pytest.approx(reward)
    assert row["turn_rewards"] == example.get("turn_rewards")


def steps_of(labels, ends) -> dict:
    rollouts = rollouts_table({"prompt_id": "a", "token_ids": [3] * 9})
    column = rollouts.schema.get_field_index("step_ends")
    rollouts = rollouts.set_column(
        column, rollouts.schema.field(column), pa.array([ends], rollouts.schema.field(column).type)
    )
    [row] = given_rewards(rollouts, table_of(stepwise("a", labels, *("x" for _ in labels)))).to_pylist()
    return row


def test_step_labels_stand_at_their_ends():
    row = steps_of([1.0, 0.0, -1.0], [2, 5, 8])
    assert (row["step_ends"], row["step_rewards"]) == ([2, 5, 8], [1.0, 0.0, -1.0])
    cut = steps_of([1.0, 0.0, 1.0], [2, 5])  # the last step's end was cut off
    assert (cut["step_ends"], cut["step_rewards"]) == ([2, 5], [1.0, 0.0])
    assert cut["reward"] == pytest.approx(2 / 3)


def test_segments_have_one_reward():
    rows = rewarded(
        trajectory("a", "x", "y", reward=2.0),
        rollouts=[{"prompt_id": "a"}, {"prompt_id": "a", "segment": 1}],
    )
    assert [row["reward"] for row in rows] == [2.0]


def test_a_rollout_of_no_example_is_refused():
    with pytest.raises(ContractError, match="step-00001/b/00 must be of an example"):
        rewarded(demonstration("a"), rollouts=[{"prompt_id": "b"}])
    empty = given_rewards(rollouts_table(), table_of(demonstration("a")))
    assert (empty.num_rows, empty.schema) == (0, REWARDS.schema)
