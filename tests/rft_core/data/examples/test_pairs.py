"""Record preferences: prompts given or found in the sides, by messages or by words; margins; equal sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.data.faults import Faults
from tests.rft_core.data.examples.rows import assistant, read, rejection, system, tool, user

LIKE = {"prompt": "a", "chosen": "b", "rejected": "c"}
MIXED = [user("a"), system("s")]
SIDES = {"chosen": "b", "rejected": "c"}


def parts(value: dict, **rest) -> dict:
    content = read(value, "preferences", **rest)
    assert content.kind == "pair"
    return content.parts


def pair(prompt: list, chosen: list, rejected: list) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


WHOLE_BLUE = [user("Colour?"), assistant("Blue.")]
WHOLE_GREEN = [user("Colour?"), assistant("Green.")]
BLUE = pair([user("Colour?")], [assistant("Blue.")], [assistant("Green.")])


@pytest.mark.parametrize(
    "value",
    [
        pair("Colour?", "Blue.", "Green."),
        BLUE,
        pair("Colour?", [assistant("Blue.")], "Green."),
        pair([user("Colour?")], "Blue.", "Green."),
        # LLaMA-Factory: one message a side.
        pair([{"from": "human", "value": "Colour?"}], {"from": "gpt", "value": "Blue."}, assistant("Green.")),
        # UltraFeedback: the prompt as text, the sides as whole conversations.
        pair("Colour?", WHOLE_BLUE, WHOLE_GREEN),
        pair(" Colour? ", WHOLE_BLUE, WHOLE_GREEN),
        # One side whole, the other the answer alone: each row and side is looked at by itself.
        pair("Colour?", WHOLE_BLUE, "Green."),
        pair([user("Colour?")], [assistant("Blue.")], WHOLE_GREEN),
        # A conversation repeated as the prompt.
        pair(WHOLE_BLUE, WHOLE_BLUE, WHOLE_GREEN),
        # Null there: the sides say the prompt.
        pair(None, WHOLE_BLUE, WHOLE_GREEN),
    ],
)
def test_one_pair_in_many_shapes(value):
    assert parts(value, like=LIKE) == BLUE


def test_the_prompt_is_the_longest_common_beginning_in_messages():
    shared = [system("s"), user("a"), assistant("b"), user("c")]
    value = {"chosen": [*shared, assistant("d")], "rejected": [*shared, assistant("e")]}
    assert parts(value) == pair(shared, [assistant("d")], [assistant("e")])
    # Messages are compared whole: "d1" and "d2" share a character and no message.
    value = {"chosen": [*shared, assistant("d1")], "rejected": [*shared, assistant("d2")]}
    assert parts(value) == pair(shared, [assistant("d1")], [assistant("d2")])
    # Given as a text as well, the prompt is one of the common messages.
    for text in ("a", "c"):
        assert parts({"prompt": text, **value}) == pair(shared, [assistant("d1")], [assistant("d2")])


def test_the_prompt_ends_where_the_assistant_speaks():
    # The common beginning [a, b] ends with the assistant, and both go on with the user: the prompt is [a].
    chosen, rejected = [user("a"), assistant("b"), user("c"), assistant("d")], [user("a"), assistant("b"), user("x")]
    value = {"chosen": chosen, "rejected": rejected}
    assert parts(value) == pair([user("a")], chosen[1:], rejected[1:])
    # One side is the beginning of the other.
    value = {"chosen": chosen[:2], "rejected": chosen}
    assert parts(value) == pair([user("a")], chosen[1:2], chosen[1:])


def test_calls_and_tools_are_messages_like_others():
    call = assistant("", tool_calls=[{"name": "f", "arguments": {"x": 1}}])
    shared = [user("a"), call, tool("5")]
    value = {"chosen": [*shared, assistant("5.")], "rejected": [*shared, assistant("6.")]}
    assert parts(value) == pair(shared, [assistant("5.")], [assistant("6.")])


def test_a_system_message_of_the_prompt_alone_stays():
    value = pair([system("s"), *BLUE["prompt"]], BLUE["prompt"] + BLUE["chosen"], BLUE["prompt"] + BLUE["rejected"])
    assert parts(value)["prompt"] == [system("s"), user("Colour?")]
    assert parts({**value, "prompt": "Colour?"}, system="r")["prompt"] == [system("r"), user("Colour?")]
    assert parts(BLUE, system="r", suffix="!")["prompt"] == [system("r"), user("Colour?!")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "sides"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is", (" blue.", " green.")),
        # bl- is common to both, but is no word.
        ("The sky is blue.", "The sky is black.", "The sky is", (" blue.", " black.")),
        ("Say:\n\nyes", "Say:\n\nno", "Say:", ("\n\nyes", "\n\nno")),
        # The white space belongs to the word after it.
        ("a  b", "a c", "a", ("  b", " c")),
        ("a b", "a\tc", "a", (" b", "\tc")),
        # A whole word that the other side goes on with is not common.
        ("It is one two", "It is ones two", "It is", (" one two", " ones two")),
        (" lead a", " lead b", " lead", (" a", " b")),
    ],
)
def test_texts_without_a_prompt_are_split_after_whole_words(chosen, rejected, prompt, sides):
    found = parts({"chosen": chosen, "rejected": rejected})
    assert found == pair([user(prompt)], [assistant(sides[0])], [assistant(sides[1])])


WORDS = st.lists(st.tuples(st.sampled_from([" ", "\n\n"]), st.sampled_from(["a", "ab", "b"])), min_size=1, max_size=5)


@given(WORDS, WORDS)
def test_splitting_by_words_is_what_splitting_word_lists_gives(one, other):
    """Independent: the number of equal (white space, word) pairs from the beginning."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    chosen, rejected = ("".join(map("".join, side)) for side in (one, other))
    value = {"chosen": chosen, "rejected": rejected}
    if same == 0:
        assert rejection(value, "preferences")[0] == "no_common_prompt"
    elif same == min(len(one), len(other)):
        assert rejection(value, "preferences")[0] == "empty_completion"
    else:
        found = read(value, "preferences", policies={"identical_sides": "keep"}).parts
        assert found["prompt"][0]["content"] == "".join(map("".join, one[:same]))
        assert found["prompt"][0]["content"] + found["chosen"][0]["content"] == chosen
        assert found["prompt"][0]["content"] + found["rejected"][0]["content"] == rejected


def test_texts_with_marks_of_turns_are_conversations():
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 2+2?\n\nAssistant:"
    value = {"chosen": start + " It is 4.", "rejected": start + " It is 5."}
    shared = [user("Hi"), assistant("Hello."), user("2+2?")]
    assert parts(value) == pair(shared, [assistant("It is 4.")], [assistant("It is 5.")])
    # Texts that are joined as they are stay texts.
    assert parts(value, render="plain") == pair([user(start + " It is")], [assistant(" 4.")], [assistant(" 5.")])


@pytest.mark.parametrize(("margin", "number"), [(0.5, 0.5), (-2, -2.0), (None, None), (0, 0.0)])
def test_margins(margin, number):
    found = read({**LIKE, "margin": margin}, "preferences").margin
    assert found == number and isinstance(found, float | None)


def test_a_margin_of_scores_and_in_a_table_of_texts():
    assert read({**LIKE, "score_chosen": 0.75, "score_rejected": 0.25}, "preferences").margin == 0.5
    assert read({**LIKE, "margin": " 1e-1"}, "preferences", source="pairs.csv").margin == 0.1
    assert read({**LIKE, "margin": "-.5"}, "preferences", source="pairs.csv.gz").margin == -0.5
    assert read({**LIKE, "margin": ""}, "preferences", source="pairs.csv").margin is None


@pytest.mark.parametrize(
    ("margin", "source"),
    [
        ("0.5", "pairs.jsonl"),
        ("nan", "pairs.csv"),
        ("1_0", "pairs.csv"),
        ("1e999", "pairs.csv"),
        ("", "pairs.jsonl"),
        (True, "pairs.jsonl"),
        ([1], "pairs.jsonl"),
        (10**400, "pairs.jsonl"),
    ],
)
def test_bad_margins(margin, source):
    reason, detail = rejection({**LIKE, "margin": margin}, "preferences", source=source)
    assert reason == "bad_margin" and detail.startswith("margin must be a finite number, found")


def test_scores_that_are_no_numbers():
    value = {**LIKE, "score_chosen": "good", "score_rejected": 1}
    assert rejection(value, "preferences") == ("bad_margin", "margin must be a finite number, found str 'good'")


def test_pairs_of_ds_11():
    """Case ds-11-chosen-equals-rejected; that d3 and d5 contradict each other is found among the rows."""
    greet = {"prompt": "Greet me.", "chosen": "Hello!"}
    told = "chosen and rejected must differ, found both str 'Hello!'"
    assert rejection({"id": "d1", **greet, "rejected": "Hello!"}, "preferences") == ("identical_sides", told)
    assert rejection({"id": "d2", **greet, "rejected": "Hello! "}, "preferences") == ("identical_sides", told)
    assert parts({"id": "d3", **greet, "rejected": "Go away."})["rejected"] == [assistant("Go away.")]
    assert rejection({"id": "d4", **greet, "rejected": None}, "preferences") == (
        "empty_completion",
        "rejected must be a text or messages, found null",
    )
    assert parts({"id": "d5", "prompt": "Greet me.", "chosen": "Go away.", "rejected": "Hello!"})["chosen"] == [
        assistant("Go away.")
    ]


def test_equal_sides_are_kept_and_flagged_where_the_recipe_says_so():
    faults = Faults({"identical_sides": "keep"})
    found = parts(pair("a", "b", " b"), faults=faults)
    assert found["rejected"] == [assistant(" b")]
    assert [(fault.reason, fault.action) for fault in faults.found] == [("identical_sides", "flagged")]


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "missing_field", "the row must have the field rejected"),
        ({"prompt": "a", "rejected": "b"}, "missing_field", "the row must have the field chosen"),
        (pair("a", "", "b"), "empty_completion", "chosen must hold more than white space"),
        (pair("a", "b", "\n"), "empty_completion", "rejected must hold more than white space"),
        (pair("a", [], "b"), "empty_completion", "chosen must hold at least one message"),
        (pair("a", [assistant(" ")], "b"), "empty_completion", "chosen[0] must hold text or tool calls"),
        (pair("a", "b", 5), "completion_not_text", "rejected must be a text or messages, found int 5"),
        (pair("a", "b", ["c"]), "bad_message", "rejected[0] must be an object"),
        (pair(5, "b", "c"), "prompt_not_text", "found int 5"),
        (pair("", "b", "c"), "empty_prompt", "more than white space"),
        (pair(None, "I b", "I c"), "empty_prompt", "found null or none in this row"),
        (SIDES, "empty_prompt", "found null or none in this row"),
        (pair([user("a"), assistant("b")], "c", "d"), "last_not_user", "found assistant"),
        (pair("a", [assistant("b"), assistant("c")], "d"), "wrong_role_order", "chosen[1]: the assistant"),
        (pair("a", [tool("b")], "d"), "wrong_role_order", "chosen[0]: a tool's message must follow"),
        (
            pair("x", [user("a"), assistant("b")], [user("a"), assistant("c")]),
            "no_common_prompt",
            "the prompt must be in the conversations chosen and rejected, found str 'x' and str 'a'",
        ),
        (
            pair("a", [user("z"), assistant("b")], "c"),
            "no_common_prompt",
            "chosen must begin with the assistant's message or with the whole prompt, found user",
        ),
        (
            pair("a", [user("a"), assistant("b")], [user("z"), assistant("c")]),
            "no_common_prompt",
            "must begin with the same messages, up to where the assistant speaks; found str 'a' and str 'z'",
        ),
    ],
)
def test_bad_pairs_with_a_prompt(value, reason, told):
    found, detail = rejection(value, "preferences", like=LIKE)
    assert found == reason and told in detail


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason", "told"),
    [
        ("Blue.", "Green.", "no_common_prompt", "must begin with the same words, found str 'Blue.' and str 'Green.'"),
        ("Blue sky", "Black sky", "no_common_prompt", "give the prompt in a field of its own"),
        ("The sky is", "The sky is blue", "empty_completion", "chosen must go on after the common prompt"),
        ("The sky is blue", "The sky is \n", "empty_completion", "rejected must go on"),
        ([assistant("b")], [assistant("c")], "no_common_prompt", "conversations that begin with the user"),
        ("The sky", [user("a"), assistant("b")], "no_common_prompt", "must both be texts"),
        ([user("a")], [user("a")], "no_common_prompt", "up to where the assistant speaks"),
        ([*MIXED, assistant("b")], [*MIXED, assistant("c")], "wrong_role_order", "chosen[1]: a system message comes"),
    ],
)
def test_bad_pairs_without_a_prompt(chosen, rejected, reason, told):
    found, detail = rejection({"chosen": chosen, "rejected": rejected}, "preferences")
    assert found == reason and told in detail
