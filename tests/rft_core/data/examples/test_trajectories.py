"""Records trajectories and stepwise: rewards of the whole and of turns, labels of steps."""

from __future__ import annotations

import pytest

from tests.rft_core.data.examples.rows import assistant, read, rejection, tool, user

CALL = assistant("", tool_calls=[{"name": "look", "arguments": {}}])
GAME = [user("Look."), CALL, tool("A door."), assistant("Open it."), user("Well done.")]
STEPS = {
    "prompt": "9.8 or 9.11?",
    "completions": ["0.8 and 0.11.", "0.8 is more.", "9.8"],
    "labels": [True, False, True],
}


def test_a_trajectory_with_a_reward():
    content = read({"messages": GAME, "reward": 1, "seed": 5}, "trajectories")
    assert content.kind == "trajectory" and content.parts == {"prompt": GAME[:1], "completion": GAME[1:]}
    assert (content.reward, content.turn_rewards, content.metadata) == (1.0, None, '{"seed":5}')
    assert isinstance(content.reward, float)


def test_a_trajectory_with_a_reward_for_each_turn_of_the_assistant():
    content = read({"messages": GAME, "rewards": [0, 0.5]}, "trajectories")
    assert (content.reward, content.turn_rewards) == (None, [0.0, 0.5])
    content = read({"messages": GAME, "reward": -1.0, "turn_rewards": [0.25, 0.5]}, "trajectories")
    assert (content.reward, content.turn_rewards) == (-1.0, [0.25, 0.5])


def test_a_trajectory_of_prompt_and_completion():
    content = read({"prompt": "Look.", "completion": GAME[1:], "reward": 0.5}, "trajectories")
    assert content.parts == {"prompt": GAME[:1], "completion": GAME[1:]}


def test_a_turn_in_which_nothing_was_said_is_a_turn():
    messages = [user("a"), assistant(""), user("b"), assistant("c")]
    assert read({"messages": messages, "turn_rewards": [0, 1]}, "trajectories").turn_rewards == [0.0, 1.0]
    reason, detail = rejection({"messages": messages[:2], "reward": 0}, "trajectories")
    assert (reason, detail) == ("empty_completion", "messages[1] must hold text or tool calls, found str ''")


def test_rewards_in_a_table_of_texts():
    value = {"prompt": "a", "completion": "b", "reward": "0.5", "turn_rewards": "[0.5]"}
    content = read(value, "trajectories", source="games.csv")
    assert (content.reward, content.turn_rewards) == (0.5, [0.5])
    content = read({**value, "turn_rewards": ""}, "trajectories", source="games.csv", like=value)
    assert (content.reward, content.turn_rewards) == (0.5, None)


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        ({"reward": "1"}, "bad_reward", "reward must be a finite number, found str '1'"),
        ({"reward": True}, "bad_reward", "found bool True"),
        ({"reward": [1]}, "bad_reward", "found list [1]"),
        ({"turn_rewards": 1}, "bad_reward", "one value for each of the 2 turns of the assistant, found int 1"),
        ({"turn_rewards": [1]}, "bad_reward", "found a list of 1"),
        ({"turn_rewards": [1, 2, 3]}, "bad_reward", "found a list of 3"),
        ({"turn_rewards": [1, None]}, "bad_reward", "turn_rewards[1] must be a finite number, found NoneType None"),
        ({"turn_rewards": [True, 1]}, "bad_reward", "turn_rewards[0] must be a finite number, found bool True"),
        ({"turn_rewards": "[1, 2"}, "bad_reward", "found str '[1, 2'"),
        ({}, "missing_field", "the row must have a reward or turn_rewards that is not null, found messages"),
        ({"reward": None, "turn_rewards": None}, "missing_field", "that is not null"),
        ({"reward": 1, "messages": None}, "no_assistant_turn", "found NoneType None"),
        ({"reward": 1, "messages": GAME[:1]}, "no_assistant_turn", "found user"),
    ],
)
def test_bad_trajectories(value, reason, told):
    like = {"messages": GAME, "reward": 1, "turn_rewards": [0, 1]}
    found, detail = rejection({"messages": GAME, **value}, "trajectories", like=like)
    assert found == reason and told in detail


def test_a_row_without_messages():
    like = {"messages": GAME, "reward": 1}
    assert rejection({"reward": 1}, "trajectories", like=like) == (
        "missing_field",
        "the row must have prompt and completion, or messages, found reward; data.fields says which field of the file "
        "is which",
    )


def test_steps_with_labels():
    content = read({**STEPS, "answer": "9.8"}, "stepwise")
    assert content.kind == "stepwise" and content.answer == "9.8"
    assert content.parts == {"prompt": [user("9.8 or 9.11?")], "steps": STEPS["completions"]}
    assert content.step_labels == [1.0, 0.0, 1.0] and all(isinstance(label, float) for label in content.step_labels)
    assert read({**STEPS, "labels": [1, 0.25, -1]}, "stepwise").step_labels == [1.0, 0.25, -1.0]


def test_steps_in_a_table_of_texts():
    value = {"prompt": "a", "steps": '["b", " c"]', "labels": "[true, 0.5]"}
    content = read(value, "stepwise", source="steps.csv")
    assert content.parts["steps"] == ["b", " c"] and content.step_labels == [1.0, 0.5]


@pytest.mark.parametrize(
    ("change", "reason", "told"),
    [
        ({"completions": None}, "empty_completion", "steps must hold at least one text, found NoneType None"),
        ({"completions": []}, "empty_completion", "found list []"),
        ({"completions": "one"}, "completion_not_text", "steps must be a list of texts, found str 'one'"),
        ({"completions": ["a", " ", "c"]}, "empty_completion", "steps[1] must hold more than white space"),
        ({"completions": ["a", None, "c"]}, "empty_completion", "steps[1] must hold more than white space, found None"),
        ({"completions": ["a", "b", 3]}, "completion_not_text", "steps[2] must be a text, found int 3"),
        ({"labels": [True, False]}, "bad_step_labels", "one value for each of the 3 steps, found a list of 2"),
        ({"labels": None}, "bad_step_labels", "found NoneType None"),
        ({"labels": [True, "+", True]}, "bad_step_labels", "step_labels[1] must be a finite number, found str '+'"),
        ({"labels": [True, None, True]}, "bad_step_labels", "step_labels[1]"),
        ({"labels": True}, "bad_step_labels", "found bool True"),
        ({"prompt": None}, "empty_prompt", "found null"),
        ({"prompt": [assistant("a")]}, "wrong_role_order", "prompt[0]"),
    ],
)
def test_bad_steps(change, reason, told):
    found, detail = rejection({**STEPS, **change}, "stepwise", like=STEPS)
    assert found == reason and told in detail


@pytest.mark.parametrize("name", ["prompt", "completions", "labels"])
def test_a_row_of_steps_that_lacks_a_field(name):
    value = {field: item for field, item in STEPS.items() if field != name}
    assert rejection(value, "stepwise", like=STEPS)[0] == "missing_field"
