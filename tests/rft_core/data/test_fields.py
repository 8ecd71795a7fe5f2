"""Names in use -> ours: what is recognised, what the recipe overrides, what is said about it, what stays metadata."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import get_args

import pytest

from rft_core.data.field_names import ALWAYS_OPTIONAL, FIELDS, SHAPES
from rft_core.data.fields import Recognised, map_fields, recognise
from rft_core.data.settings import FieldName, RecordName
from rft_core.errors import ContractError

MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def names_of(value: dict, record: str, **overrides: str) -> dict[str, str]:
    return recognise([value], record, overrides).names


def mapped(value: dict, record: str, **overrides: str) -> dict:
    return map_fields(value, recognise([value], record, overrides))


@pytest.mark.parametrize(
    ("record", "value", "names"),
    [
        # TRL
        ("prompts", {"prompt": "a"}, {"prompt": "prompt"}),
        ("demonstrations", {"messages": MESSAGES}, {"messages": "messages"}),
        ("demonstrations", {"prompt": "a", "completion": "b"}, {"prompt": "prompt", "completion": "completion"}),
        ("demonstrations", {"text": "a"}, {"text": "text"}),
        ("preferences", {"chosen": "a b", "rejected": "a c"}, {"chosen": "chosen", "rejected": "rejected"}),
        (
            "preferences",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0},
            {"chosen": "chosen", "rejected": "rejected", "prompt": "prompt", "margin": "margin"},
        ),
        (
            "labelled",
            {"prompt": "a", "completion": "b", "label": True},
            {"prompt": "prompt", "completion": "completion", "label": "label"},
        ),
        (
            "stepwise",
            {"prompt": "a", "completions": ["b"], "labels": [True]},
            {"prompt": "prompt", "steps": "completions", "step_labels": "labels"},
        ),
        # OpenRLHF
        ("prompts", {"input": "a", "label": "4"}, {"prompt": "input", "answer": "label"}),
        ("prompts", {"context_messages": MESSAGES[:1]}, {"prompt": "context_messages"}),
        ("demonstrations", {"input": "a", "output": "b"}, {"prompt": "input", "completion": "output"}),
        (
            "labelled",
            {"instruction": "a", "response": "b", "score": 1},
            {"prompt": "instruction", "completion": "response", "label": "score"},
        ),
        # verl and SkyRL
        (
            "prompts",
            {"data_source": "gsm", "prompt": MESSAGES[:1], "reward_model": {"ground_truth": "4"}, "extra_info": {}},
            {"prompt": "prompt", "answer": "reward_model.ground_truth"},
        ),
        (
            "prompts",
            {"prompt": MESSAGES[:1], "reward_spec": {"ground_truth": "4"}},
            {"prompt": "prompt", "answer": "reward_spec.ground_truth"},
        ),
        # Trinity-RFT
        ("prompts", {"question": "a", "answer": "4"}, {"prompt": "question", "answer": "answer"}),
        ("prompts", {"prompt": "a", "response": "4"}, {"prompt": "prompt", "answer": "response"}),
        ("demonstrations", {"message": MESSAGES}, {"messages": "message"}),
        # Alpaca, ShareGPT, Dolly, OpenOrca
        (
            "demonstrations",
            {"instruction": "a", "input": "b", "output": "c"},
            {"prompt": "instruction + input", "completion": "output"},
        ),
        (
            "demonstrations",
            {"instruction": "a", "context": "b", "response": "c", "category": "d"},
            {"prompt": "instruction + context", "completion": "response"},
        ),
        (
            "demonstrations",
            {"conversations": MESSAGES, "system": "s", "tools": "[]"},
            {"messages": "conversations", "system": "system", "tools": "tools"},
        ),
        (
            "demonstrations",
            {"id": "q.1", "system_prompt": "s", "question": "a", "response": "b"},
            {"prompt": "question", "completion": "response", "system": "system_prompt", "id": "id"},
        ),
        (
            "preferences",
            {"conversations": MESSAGES[:1], "chosen": MESSAGES[1], "rejected": MESSAGES[1]},
            {"chosen": "chosen", "rejected": "rejected", "prompt": "conversations"},
        ),
        (
            "labelled",
            {"conversations": MESSAGES, "kto_tag": False},
            {"messages": "conversations", "label": "kto_tag"},
        ),
        # OpenAI's preference files
        (
            "preferences",
            {"input": {"messages": MESSAGES[:1]}, "preferred_output": [], "non_preferred_output": []},
            {"chosen": "preferred_output", "rejected": "non_preferred_output", "prompt": "input.messages"},
        ),
        # Sets of mathematics: the worked solution is the completion, the short answer the answer.
        ("prompts", {"problem": "a", "solution": "b", "answer": "4"}, {"prompt": "problem", "answer": "answer"}),
        ("prompts", {"Problem": "a", "Answer": 4, "ID": "x"}, {"prompt": "Problem", "answer": "Answer", "id": "ID"}),
        (
            "demonstrations",
            {"problem": "a", "solution": "b", "answer": "4"},
            {"prompt": "problem", "completion": "solution", "answer": "answer"},
        ),
        ("demonstrations", {"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}),
        # Scores of both sides make a margin.
        (
            "preferences",
            {"chosen": "a b", "rejected": "a c", "chosen-rating": 5, "rejected-rating": 2},
            {"chosen": "chosen", "rejected": "rejected", "margin": "chosen-rating - rejected-rating"},
        ),
        ("labelled", {"chosen": "a b", "rejected": "a c"}, {"chosen": "chosen", "rejected": "rejected"}),
        # One name for two things: what it holds decides.
        (
            "trajectories",
            {"messages": MESSAGES, "rewards": [0.5]},
            {"messages": "messages", "turn_rewards": "rewards"},
        ),
        ("trajectories", {"messages": MESSAGES, "rewards": 0.5}, {"messages": "messages", "reward": "rewards"}),
        (
            "trajectories",
            {"messages": MESSAGES, "reward": 1.0, "turn_rewards": [1.0]},
            {"messages": "messages", "turn_rewards": "turn_rewards", "reward": "reward"},
        ),
        (
            "trajectories",
            {"prompt": "a", "completion": MESSAGES[1:], "reward": 1},
            {"prompt": "prompt", "completion": "completion", "reward": "reward"},
        ),
    ],
)
def test_names_in_use_are_recognised(record, value, names):
    assert names_of(value, record) == names


def test_tables_name_every_field_and_record_once():
    assert set(FIELDS) == set(SHAPES) == set(get_args(RecordName))
    for record, fields in FIELDS.items():
        needed = {field for shape in SHAPES[record] for part in shape for field in part}
        assert needed | set(ALWAYS_OPTIONAL) == set(fields) <= set(get_args(FieldName))
        for candidates in fields.values():
            assert len(set(candidates)) == len(candidates)


def test_the_recipe_wins_and_what_was_taken_is_said():
    value = {"prompt": "a", "question": "b", "answer": "4", "level": 3, "subject": "x"}
    recognised = recognise([value], "prompts", {"prompt": "question"})
    assert recognised.notes == (
        "prompt <- question (data.fields)",
        "answer <- answer",
        "metadata <- prompt, level, subject",
    )
    assert map_fields(value, recognised) == {
        "prompt": "b",
        "answer": "4",
        "metadata": {"prompt": "a", "level": 3, "subject": "x"},
    }


def test_an_ambiguity_is_said():
    recognised = recognise([{"prompt": "a", "question": "b", "messages": MESSAGES}], "prompts", {})
    assert recognised.notes[0] == (
        "prompt <- prompt (not question, messages, also there: data.fields.prompt would choose)"
    )


def test_an_override_may_be_nested_or_leave_a_field_out():
    value = {"q": {"text": "a"}, "answer": "4", "prompt": "b"}
    assert mapped(value, "prompts", prompt="q.text", answer="") == {"prompt": "a", "metadata": value}
    # A column that is literally named so comes before a place in an object.
    assert mapped({"q.text": "c", **value}, "prompts", prompt="q.text", answer="")["prompt"] == "c"


def test_an_override_that_no_row_has_is_refused():
    with pytest.raises(ContractError, match=r"data\.fields\.prompt must name a field .*'qestion'.*there are question"):
        names_of({"question": "a"}, "prompts", prompt="qestion")
    with pytest.raises(ContractError, match=r"'instruction \+ inptu'"):
        names_of({"instruction": "a", "input": "b"}, "prompts", prompt="instruction + inptu")


def test_an_override_of_another_record_is_refused():
    with pytest.raises(ContractError, match="of record prompts, found chosen"):
        names_of({"prompt": "a", "b": "c"}, "prompts", chosen="b")


def test_a_needed_field_that_is_nowhere_is_named_with_what_is_there():
    with pytest.raises(ContractError) as caught:
        names_of({"prompt": "a", "completion": "b"}, "preferences")
    text = str(caught.value)
    assert text.startswith("record preferences needs chosen and rejected; found the fields prompt, completion in the")
    assert "The fields fit record prompts or demonstrations." in text
    assert "chosen: chosen, chosen_response" in text and "data.fields, e.g. {chosen: NAME}" in text


def test_a_name_whose_values_never_suit_is_taken_so_that_the_rows_say_why():
    assert names_of({"messages": "hello"}, "demonstrations") == {"messages": "messages"}
    assert names_of({"messages": "hello", "prompt": "a", "completion": "b"}, "demonstrations") == {
        "prompt": "prompt",
        "completion": "completion",
    }


def test_a_field_needs_not_be_in_the_first_row():
    rows = [{"id": 1, "prompt": None}, {"id": 2}, {"id": 3, "prompt": "a", "answer": "4"}]
    recognised = recognise(rows, "prompts", {})
    assert recognised.names == {"prompt": "prompt", "answer": "answer", "id": "id"}
    assert recognised.notes[0] == "prompt <- prompt (null or missing in 2 of the first 3 rows)"


def test_a_stray_name_does_not_beat_one_that_is_filled_everywhere():
    rows = [{"question": "a", "prompt": "b"}, *({"question": str(number)} for number in range(3))]
    assert recognise(rows, "prompts", {}).names["prompt"] == "question"


def test_a_column_that_repeats_is_no_id_unless_it_is_called_so():
    rows = [{"prompt": "a", "problem_id": 1}, {"prompt": "b", "problem_id": 1}]
    assert "id" not in recognise(rows, "prompts", {}).names
    rows[1]["problem_id"] = 2
    assert recognise(rows, "prompts", {}).names["id"] == "problem_id"
    same = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}]
    assert recognise(same, "prompts", {}).names["id"] == "id"


def test_no_readable_row_recognises_nothing():
    recognised = recognise([], "prompts", {})
    assert map_fields({"prompt": "a"}, recognised) == {"metadata": {"prompt": "a"}}


def test_ids_scores_and_opened_objects_stay_in_the_metadata():
    value = {"id": 7, "prompt": "a", "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": 3}}
    assert mapped(value, "prompts") == {
        "id": 7,
        "prompt": "a",
        "answer": "4",
        "metadata": {"id": 7, "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": 3}},
    }
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 0.75, "score_rejected": 0.25}
    assert recognise([pair], "preferences", {}).notes[-2:] == (
        "margin <- score_chosen - score_rejected",
        "metadata <- score_chosen, score_rejected",
    )
    assert mapped(pair, "preferences") == {
        "prompt": "p",
        "chosen": "a",
        "rejected": "b",
        "margin": 0.5,
        "metadata": {"score_chosen": 0.75, "score_rejected": 0.25},
    }


@pytest.mark.parametrize(
    ("scores", "margin"),
    [((None, 1.0), None), (("0.75", "0.25"), 0.5), (("high", 1.0), "high"), ((1.0, True), True), ((1, [2]), [2])],
)
def test_a_margin_of_scores(scores, margin):
    value = {"chosen": "a b", "rejected": "a c", "score_chosen": scores[0], "score_rejected": scores[1]}
    found = mapped(value, "preferences")["margin"]
    assert found == margin and type(found) is type(margin)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Add.", "input": "1 and 2"}, "Add.\n1 and 2"),
        ({"instruction": "Add.", "input": ""}, "Add."),
        ({"instruction": "Add.", "input": None}, "Add."),
        ({"input": "1 and 2"}, "1 and 2"),
        ({"instruction": "", "input": ""}, None),
        ({"instruction": 5, "input": "a"}, 5),
    ],
)
def test_instruction_and_input_are_joined_by_a_line_break(row, prompt):
    recognised = recognise([{"instruction": "a", "input": "b", "output": "c"}], "demonstrations", {})
    assert map_fields({**row, "output": "x"}, recognised) == {"prompt": prompt, "completion": "x", "metadata": {}}
    assert "prompt" not in map_fields({"output": "x"}, recognised)


def test_the_history_of_alpaca_becomes_earlier_messages():
    value = {"instruction": "And 3?", "input": "", "output": "9", "history": [["2 squared?", "4"]]}
    assert names_of(value, "demonstrations")["prompt"] == "history + instruction + input"
    assert mapped(value, "demonstrations")["prompt"] == [
        {"role": "user", "content": "2 squared?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3?"},
    ]
    assert mapped({**value, "history": []}, "demonstrations")["prompt"] == "And 3?"
    assert mapped({**value, "history": ["2 squared?"]}, "demonstrations")["prompt"] == ["2 squared?"]


def test_lists_that_are_spelled_in_json_are_read():
    cell = '[{"role": "user", "content": "2+2?"}]'
    assert mapped({"prompt": cell}, "prompts")["prompt"] == [{"role": "user", "content": "2+2?"}]
    for text in ('[{"a": 1}]', "[1, 2] is a list?", '[{"role": "user", "content": ', "[{"):
        assert mapped({"prompt": text}, "prompts")["prompt"] == text
    value = {"prompt": "a", "completions": '["b", "c"]', "labels": "[true, 0.5]"}
    assert mapped(value, "stepwise") == {
        "prompt": "a",
        "steps": ["b", "c"],
        "step_labels": [True, 0.5],
        "metadata": {},
    }
    # Elsewhere a text stays a text.
    assert mapped({"prompt": "a", "answer": "[1]", "level": "[2]"}, "prompts") == {
        "prompt": "a",
        "answer": "[1]",
        "metadata": {"level": "[2]"},
    }


def test_a_pair_without_the_prompt_that_its_file_has_gets_null_there():
    recognised = recognise([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preferences", {})
    assert map_fields({"chosen": "I b", "rejected": "I c"}, recognised)["prompt"] is None
    assert "prompt" not in mapped({"chosen": "I b", "rejected": "I c"}, "preferences")


def test_a_field_that_a_row_lacks_is_not_there():
    recognised = recognise([{"prompt": "a", "answer": "4"}], "prompts", {})
    assert map_fields({"answer": None}, recognised) == {"answer": None, "metadata": {}}


def test_recognised_fields_go_to_other_processes():
    recognised = recognise([{"instruction": "a", "input": "b"}], "prompts", {})
    map_fields({"instruction": "a", "input": "b"}, recognised)
    copy = ForkingPickler.loads(ForkingPickler.dumps(recognised))
    assert copy == recognised == Recognised({"prompt": "instruction + input"}, recognised.notes)
