"""Every record has a suite; every rule of it can fail, in the quick check and in Great Expectations alike."""

from __future__ import annotations

import math

import pytest

from data_contracts.errors import ContractError
from data_contracts.schemas import RECORDS
from data_contracts.suites import SUITES
from data_contracts.validation import check_table, validate
from tests.data_contracts.samples import broken, good_rows, table_of

NAN = math.nan
SPAN = {"role": "assistant", "start": 0, "end": 9, "reward": None, "state_digest": None}

# record, column and value of the one broken cell (of row 0), and the rule that must notice, with its first column
BREAKS = [
    ("prompts", "prompt_id", "a b", "match_pattern"),
    ("prompts", "prompt_text", "", "filled"),
    ("prompts", "prompt_token_ids", [], "filled"),
    ("prompts", "messages", "{}", "canonical_json"),
    ("prompts", "tools", "{}", "canonical_json"),
    ("prompts", "metadata", '{"a": 1}', "canonical_json"),
    ("prompts", "source", "/data/sums.jsonl", "match_pattern"),
    ("prompts", "source", "", "filled"),
    ("prompts", "source_row", 0, "at_least"),
    ("prompts", "split", "test", "in_set"),
    ("examples", "kind", "triple", "in_set"),
    ("examples", "label", True, "given_exactly_when"),
    ("examples", "step_labels", [1.0], "given_exactly_when"),
    ("examples", "margin", NAN, "finite"),
    ("rollouts", "purpose", "test", "in_set"),
    ("rollouts", "origin", "human", "in_set"),
    ("rollouts", "status", "done", "in_set"),
    ("rollouts", "finish_reason", "eos", "in_set"),
    ("rollouts", "finish_reason", "length", "imply_another"),
    ("rollouts", "finish_reason", "error", "imply_another"),
    ("rollouts", "finish_reason", "given", "imply_another"),
    ("rollouts", "error_reason", "none of it", "given_exactly_when"),
    ("rollouts", "completion_mask", [True], "aligned"),
    ("rollouts", "behaviour_logprobs", [-1.0], "aligned"),
    ("rollouts", "behaviour_logprobs", [-1.0, NAN, 0.0], "logprobs"),
    ("rollouts", "turns", [SPAN], "spans_within"),
    ("rollouts", "prompt_token_ids", [], "filled"),
    ("rollouts", "environment_reward", NAN, "finite"),
    ("rollouts", "seed", -1, "at_least"),
    ("rollouts", "sampling", "[]", "canonical_json"),
    ("rewards", "reward", None, "given_exactly_when"),
    ("rewards", "reward", NAN, "finite"),
    ("rewards", "reason", "why", "given_exactly_when"),
    ("rewards", "status", "ok", "in_set"),
    ("rewards", "components", [("exact_match", NAN)], "finite"),
    ("rewards", "components", [("other", 0.0)], "equal_keys"),
    ("rewards", "turn_rewards", [math.inf], "finite"),
    ("rewards", "grader_digest", "", "filled"),
    ("token_scores", "scorer", "judge", "in_set"),
    ("token_scores", "values", [NAN], "finite"),
    ("advantages", "advantage", NAN, "finite"),
    ("advantages", "token_advantages", [NAN], "finite"),
    ("advantages", "weight", -1.0, "at_least"),
    ("advantages", "drop_reason", "bad", "in_set"),
    ("advantages", "drop_reason", "stale", "imply_another"),
    ("advantages", "is_trained", False, "imply_another"),
    ("advantages", "pair_role", "chosen", "given_exactly_when"),
    ("advantages", "term", "mine", "in_set"),
    ("updates", "loss", NAN, "finite"),
    ("updates", "grad_norm", math.inf, "finite"),
    ("updates", "learning_rate", -1.0, "at_least"),
    ("updates", "policy_version", 0, "at_least"),
    ("evaluations", "metric", "bleu", "match_pattern"),
    ("evaluations", "value", NAN, "finite"),
    ("evaluations", "low", 0.9, "ordered"),
    ("evaluations", "num_prompts", 0, "at_least"),
    ("quarantine", "reason", "Not JSON", "match_pattern"),
    ("quarantine", "source", "a/b", "match_pattern"),
]


ONE_PER_RULE = list(
    {(entry[0], entry[3]): entry for entry in BREAKS if entry[0] in ("prompts", "rollouts", "updates")}.values()
)


def test_every_record_has_a_suite_that_begins_with_its_key():
    assert SUITES.keys() == RECORDS.keys()
    for name, suite in SUITES.items():
        assert suite[0].columns == RECORDS[name].key
        assert "unique" in suite[0].name
        assert all(set(rule.columns) <= set(RECORDS[name].schema.names) for rule in suite)


def test_every_rule_has_words_of_its_own():
    for suite in SUITES.values():
        words = [(rule.name, rule.columns, rule.must) for rule in suite]
        assert len(set(words)) == len(words)


@pytest.mark.parametrize("record", RECORDS)
def test_good_rows_pass_both(record):
    table = table_of(record, good_rows(record))
    check_table(table, record)
    report = validate(table, record)
    assert report.ok, [check for check in report.checks if not check.ok]
    check_table(table.slice(0, 0), record)
    assert validate(table.slice(0, 0), record).ok


@pytest.mark.parametrize(("record", "column", "value", "rule"), BREAKS)
def test_a_broken_cell_is_noticed(record, column, value, rule):
    table = broken(record, column, value, row=0)
    if rule != "canonical_json":  # values that need Python are left to the suite
        with pytest.raises(ContractError, match=rf"{record}\..*{column}.* must .* in row 0"):
            check_table(table, record)
    if (record, column, value, rule) not in ONE_PER_RULE:  # a suite takes 0.2 s
        return
    failed = [check for check in validate(table, record).checks if not check.ok]
    assert any(rule in check.name and column in check.column for check in failed), failed
    assert all(check.unexpected_count == 1 and check.examples[0].startswith("row 0: ") for check in failed)


@pytest.mark.parametrize("record", RECORDS)
def test_a_repeated_key_is_noticed_by_both(record):
    first, second = good_rows(record)
    second.update({name: first[name] for name in RECORDS[record].key})
    table = table_of(record, [first, second])
    with pytest.raises(ContractError, match=r"must be unique, found .* in row 1"):
        check_table(table, record)
    assert not validate(table, record).ok
