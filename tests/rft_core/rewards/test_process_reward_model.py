"""Scores of reasoning steps by tiny random models, each held against a forward pass of its own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rft_core.errors import SettingsError
from rft_core.rewards import build_grader
from rft_core.rewards.settings import RewardSettings
from tests.rft_core.rewards.tables import prompts_table, rollouts_table
from tests.tiny import make_tiny_classifier, make_tiny_model, make_tiny_tokenizer

TEXT = "two and two\n\n are four\nso: 4\n"
STEPS = ["two and two", "are four", "so: 4"]
PLAIN = {"render": "plain", "after_prompt": " "}
SHEPHERD = {"kind": "next_token", "separator": " ки", "keep_spaces": True, **PLAIN}


@pytest.fixture(scope="module")
def labels_model(tmp_path_factory) -> Path:
    return make_tiny_classifier(tmp_path_factory.mktemp("labels") / "model", "token", ("bad", "good"))


@pytest.fixture(scope="module")
def causal_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("causal") / "model", seed=3)


def scored(folder: Path, texts: list[str], steps: dict | None = None, **settings) -> list[dict]:
    """Rows of rewards for completions of one prompt by a policy whose tokens are bytes."""
    tokenizer = make_tiny_tokenizer()
    table = rollouts_table(
        *(
            {"prompt_id": "a", "index": i, "text": text, "token_ids": tokenizer(text)["input_ids"]}
            for i, text in enumerate(texts)
        )
    )
    grader = build_grader(reward(folder, steps or {"split": "lines"}, **settings))
    return grader.score(table, prompts_table({"prompt_id": "a"}), tokenizer=tokenizer).to_pylist()


def reward(folder: Path, steps: dict, **settings) -> RewardSettings:
    section = {"path": str(folder), "dtype": "float32", **settings}
    return RewardSettings(functions=[{"name": "process_reward_model", "process_reward_model": section}], steps=steps)


def label_probabilities(folder: Path, prompt: str, steps: list[str], separator: str = "\n") -> list[float]:
    """P(good) at the last byte of each step and its separator, of growing texts computed one by one."""
    module = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found, text = [], prompt
    for step in steps:
        text += step + separator
        with torch.no_grad():
            logits = module(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1]
        found.append(float(logits.softmax(0)[1]))
    return found


def test_steps_are_judged_at_the_end_of_their_separators(labels_model):
    expected = label_probabilities(labels_model, "How many? ", STEPS)
    row = scored(labels_model, [TEXT], **PLAIN)[0]
    assert row["step_rewards"] == pytest.approx(expected, abs=1e-6)
    assert row["reward"] == pytest.approx(min(expected), abs=1e-6)
    # Bytes of the completion: "two and two" is 0-10, then two breaks and a space, "are four" is 14-21, "so: 4" 23-27.
    assert row["step_ends"] == [10, 21, 27]


def test_the_prompt_is_rendered_by_the_models_template(labels_model):
    # REWARD_TEMPLATE has no generation prompt.
    expected = label_probabilities(labels_model, "[user] How many?<|im_end|>", STEPS)
    assert scored(labels_model, [TEXT])[0]["step_rewards"] == pytest.approx(expected, abs=1e-6)


def test_a_bos_and_no_separator(labels_model):
    expected = label_probabilities(labels_model, "<|im_start|>How many?", STEPS, "")
    settings = {"render": "plain", "after_prompt": "", "add_bos": True, "separator": ""}
    assert scored(labels_model, [TEXT], **settings)[0]["step_rewards"] == pytest.approx(expected, abs=1e-6)


def test_a_separator_of_one_character_may_occur_in_texts(labels_model):
    expected = label_probabilities(labels_model, "How many? ", ["so. 4"], ".")
    assert scored(labels_model, ["so. 4"], separator=".", **PLAIN)[0]["step_rewards"] == pytest.approx(
        expected, abs=1e-6
    )


def test_another_label_is_the_good_one(labels_model):
    expected = [1 - p for p in label_probabilities(labels_model, "How many? ", STEPS)]
    row = scored(labels_model, [TEXT], good_label="bad", **PLAIN)[0]
    assert row["step_rewards"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(SettingsError, match=r"good_label must be one of the model's labels"):
        scored(labels_model, [TEXT], good_label="fine")


def test_a_causal_model_says_good_or_bad_after_each_separator(causal_model):
    module, tokenizer = AutoModelForCausalLM.from_pretrained(causal_model).eval(), make_tiny_tokenizer()
    good, bad = (tokenizer(token)["input_ids"][0] for token in "+-")
    expected, text = [], "How many? "
    for step in ("two and two ки", "\n\n are four ки", "\nso: 4 ки"):
        text += step
        with torch.no_grad():
            logits = module(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1]
        expected.append(1 / (1 + math.exp(float(logits[bad] - logits[good]))))
    row = scored(causal_model, [TEXT], **SHEPHERD)[0]
    assert row["step_rewards"] == pytest.approx(expected, abs=1e-5)
    # The same with the good token's part in the prompt: what a completion says is no separator.
    row = scored(causal_model, ["so ки+\nmore"], **SHEPHERD)[0]
    assert len(row["step_rewards"]) == 2 and "taken apart" in row["component_status"][0][1]


@pytest.mark.parametrize(
    ("aggregate", "combine"),
    [("min", min), ("product", math.prod), ("last", lambda p: p[-1]), ("mean", lambda p: sum(p) / 3)],
)
def test_aggregates(labels_model, aggregate, combine):
    row = scored(labels_model, [TEXT], aggregate=aggregate)[0]
    assert row["reward"] == pytest.approx(combine(row["step_rewards"]))


def test_rows_do_not_depend_on_each_other(labels_model):
    texts = [TEXT, "a", "b\nc", "a"]
    together = scored(labels_model, texts)
    for text, row in zip(texts, together, strict=True):
        alone = scored(labels_model, [text])[0]
        assert (alone["reward"], alone["step_rewards"]) == (row["reward"], row["step_rewards"])


def test_a_completion_without_steps_is_as_bad_as_can_be(labels_model):
    rows = scored(labels_model, [" \n ", "a"])
    assert (rows[0]["reward"], rows[0]["step_ends"], rows[0]["step_rewards"]) == (0.0, [], [])
    assert rows[0]["component_status"] == [("process_reward_model", "scored: the completion has no steps")]
    assert rows[1]["reward"] > 0


def test_what_is_too_long_is_never_cut_in_silence(labels_model):
    # "How many? " is 10 bytes, the steps with their breaks 12, 9 and 6.
    rows = scored(labels_model, [TEXT, "so: 4"], max_tokens=30, **PLAIN)
    assert (rows[0]["reward"], rows[0]["step_rewards"]) == (None, None)
    assert "37 tokens as the model sees them, at most 30 are scored" in rows[0]["reason"]
    row = scored(labels_model, [TEXT], max_tokens=30, too_long="cut_left", **PLAIN)[0]
    expected = label_probabilities(labels_model, "How many? "[7:], STEPS)
    assert row["step_rewards"] == pytest.approx(expected, abs=1e-6)
    assert dict(row["components"])["process_reward_model/cut_tokens"] == 7.0
    row = scored(labels_model, [TEXT], max_tokens=12, too_long="cut_left", **PLAIN)[0]
    assert "25 tokens would have to be cut, and the first step ends before" in row["reason"]


def test_settings_that_do_not_fit(labels_model, causal_model):
    with pytest.raises(ValidationError, match=r"reward.steps.split must say how completions are divided"):
        reward(labels_model, {"split": "none"})
    with pytest.raises(ValidationError, match="separator must not be empty"):
        reward(causal_model, {"split": "lines"}, kind="next_token", separator="")
    with pytest.raises(ValidationError, match="must differ"):
        reward(causal_model, {"split": "lines"}, kind="next_token", bad_token="+")
    with pytest.raises(SettingsError, match="must be a token classification model, found LlamaForCausalLM"):
        scored(causal_model, ["a"])
    with pytest.raises(SettingsError, match=r"good_token must be one token of the model, 'good' is 4"):
        scored(causal_model, ["a"], **SHEPHERD, good_token="good")
