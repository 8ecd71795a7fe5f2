"""Record labelled: labels, whole conversations with a label, pairs that are unpaired."""

from __future__ import annotations

import pytest

from rft_core.data.faults import Faults
from tests.rft_core.data.examples.rows import assistant, read, read_all, rejection, system, tool, user

ROW = {"prompt": "2+2?", "completion": "4", "label": True}
REPAIR = {"label_not_boolean": "repair"}


def test_a_labelled_completion():
    content = read({**ROW, "annotator": 3}, "labelled", system="s")
    assert content.kind == "labelled" and content.label is True and content.metadata == '{"annotator":3}'
    assert content.parts == {"prompt": [system("s"), user("2+2?")], "completion": [assistant("4")]}
    assert read({**ROW, "label": False}, "labelled").label is False


def test_the_label_of_a_conversation_is_of_its_last_turn():
    call = assistant("", tool_calls=[{"name": "f", "arguments": {}}])
    messages = [user("a"), assistant("b"), user("c"), call, tool("5"), assistant("d")]
    content = read({"conversations": messages, "kto_tag": False}, "labelled")
    assert content.label is False
    assert content.parts == {"prompt": messages[:3], "completion": messages[3:]}
    reason, detail = rejection({"conversations": messages[:3], "kto_tag": True}, "labelled")
    assert reason == "no_assistant_turn" and detail.endswith("found user, assistant, user")


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        *((value, True) for value in (1, 1.0, "1", "yes", " TRUE ")),
        *((value, False) for value in (0, "0", "No", "false")),
    ],
)
def test_labels_that_repair_reads(label, meant):
    faults = Faults(REPAIR)
    content = read({**ROW, "label": label}, "labelled", faults=faults)
    assert content.label is meant
    assert [(fault.reason, fault.action) for fault in faults.found] == [("label_not_boolean", "repaired")]
    reason, detail = rejection({**ROW, "label": label}, "labelled")
    assert reason == "label_not_boolean"
    assert detail.endswith(f"data.policies.label_not_boolean repair reads it as {str(meant).lower()}")


@pytest.mark.parametrize("label", [None, 2, -1, 0.5, "good", "", [True], {}, float(10**300)])
def test_labels_that_nothing_reads(label):
    reason, detail = rejection({**ROW, "label": label}, "labelled", like=ROW, policies=REPAIR)
    assert reason == "label_not_boolean" and detail.startswith("label must be true or false, found")


def test_a_table_of_texts_spells_its_booleans():
    for text, label in (("true", True), ("False", False)):
        faults = Faults({})
        content = read({**ROW, "label": text}, "labelled", source="thumbs.csv", faults=faults)
        assert content.label is label and faults.found == []
    assert rejection({**ROW, "label": "1"}, "labelled", source="thumbs.csv")[0] == "label_not_boolean"


def test_a_row_without_a_label():
    row = {"prompt": "a", "completion": "b"}
    assert rejection(row, "labelled", like=ROW) == (
        "missing_field",
        "the row must have the field label, found prompt, completion; data.fields says which field of the file is "
        "which",
    )


def test_a_pair_becomes_two_labelled_rows_on_request():
    value = {"id": "p1", "prompt": "Greet me.", "chosen": "Hello!", "rejected": "Go away.", "answer": 1, "margin": 2}
    faults = Faults({})
    chosen, rejected = read_all(value, "labelled", unpair=True, faults=faults)
    assert (chosen.row_id, chosen.label, chosen.parts) == (
        "p1-chosen",
        True,
        {"prompt": [user("Greet me.")], "completion": [assistant("Hello!")]},
    )
    assert (rejected.row_id, rejected.label, rejected.parts) == (
        "p1-rejected",
        False,
        {"prompt": [user("Greet me.")], "completion": [assistant("Go away.")]},
    )
    for content in (chosen, rejected):
        assert (content.kind, content.margin, content.answer) == ("labelled", None, "1")
        assert content.metadata == '{"id":"p1","margin":2}'
    assert [fault.reason for fault in faults.found] == ["answer_not_text"]


def test_ids_of_an_unpaired_row_without_one_have_one_stem():
    chosen, rejected = read_all({"chosen": "The sky is blue", "rejected": "The sky is red"}, "labelled", unpair=True)
    assert chosen.row_id.removesuffix("-chosen") == rejected.row_id.removesuffix("-rejected")


def test_a_pair_is_not_unpaired_unasked():
    value = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert rejection(value, "labelled") == (
        "missing_field",
        "a labelled row must have completion and label, found a pair; data.unpair reads pairs",
    )


def test_a_pair_that_is_no_pair_is_refused_whole():
    value = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert rejection(value, "labelled", unpair=True)[0] == "identical_sides"
    assert rejection({**value, "rejected": None}, "labelled", unpair=True)[0] == "empty_completion"
