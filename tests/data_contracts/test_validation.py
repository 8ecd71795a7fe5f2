"""What check_table says, and what the report holds."""

from __future__ import annotations

import json
import time

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.errors import ContractError
from data_contracts.schemas import RECORDS, REWARDS
from data_contracts.validation import check_table, counts_by_reason, validate
from tests.data_contracts.samples import good_rows, table_of


def rewards() -> pa.Table:
    return table_of("rewards", good_rows("rewards"))


def replaced(table: pa.Table, column: str, values: pa.Array, field: pa.Field | None = None) -> pa.Table:
    index = table.schema.get_field_index(column)
    return table.set_column(index, field or table.schema.field(column), values)


def test_an_unknown_record_is_named():
    with pytest.raises(ContractError, match=r"known record .*got 'reward'"):
        check_table(rewards(), "reward")


def test_schema_differences_name_the_first_column():
    table = rewards()
    cases = {
        "must have the column reward": table.drop_columns(["reward"]),
        "must not have a column note": table.append_column("note", pa.array(["a", "b"])),
        "column 0 must be rollout_id, found group_id": table.select(
            ["group_id", "rollout_id", *table.column_names[2:]]
        ),
        "column reward must have type double, found int64": replaced(
            table, "reward", pa.array([0, None]), pa.field("reward", pa.int64())
        ),
        "column status must not allow nulls": replaced(
            table, "status", table["status"], pa.field("status", pa.large_string())
        ),
        "metadata must say record rewards, found none": table.replace_schema_metadata(None),
        "metadata must say version 2, found 0": table.replace_schema_metadata({"record": "rewards", "version": "0"}),
    }
    for words, wrong in cases.items():
        with pytest.raises(ContractError, match=f"rewards: .*{words}"):
            check_table(wrong, "rewards")
        report = validate(wrong, "rewards")
        assert not report.ok and words in report.checks[0].detail and len(report.checks) == 1


def test_the_words_of_a_column_are_not_its_contract():
    schema = pa.schema([field.remove_metadata() for field in REWARDS.schema], metadata=REWARDS.schema.metadata)
    check_table(rewards().cast(schema), "rewards")


def test_a_null_where_none_may_be_is_found():
    table = replaced(rewards(), "group_id", pa.array(["g", None], pa.large_string()))
    with pytest.raises(ContractError, match=r"rewards.group_id must not be null, found 1 null of 2 rows.*row 1"):
        check_table(table, "rewards")
    failed = [check for check in validate(table, "rewards").checks if not check.ok]
    assert [(check.name, check.column) for check in failed] == [("expect_column_values_to_not_be_null", "group_id")]


def test_a_long_value_is_cut_and_further_rows_are_counted():
    rows = [{**good_rows("quarantine")[0], "source_row": row, "reason": "X" * 500} for row in (1, 2, 3)]
    with pytest.raises(
        ContractError, match=r"reason must be a reason code, found 'XX.*\.\.\. in row 0 \(3 rows in all\)"
    ) as e:
        check_table(table_of("quarantine", rows), "quarantine")
    assert len(str(e.value)) < 300


def test_report_is_plain_json_with_counts_and_examples():
    rows = [{**good_rows("quarantine")[0], "source_row": row, "reason": "Bad"} for row in range(1, 9)]
    value = json.loads(json.dumps(validate(table_of("quarantine", rows), "quarantine").to_json()))
    assert (value["record"], value["rows"], value["ok"]) == ("quarantine", 8, False)
    [failed] = [check for check in value["checks"] if not check["ok"]]
    assert failed["name"] == "expect_column_values_to_match_pattern"
    assert (failed["column"], failed["unexpected_count"]) == ("reason", 8)
    assert failed["examples"] == [f"row {row}: 'Bad'" for row in range(5)]
    assert failed["detail"] == "must be a reason code"


def test_validation_is_quiet(capfd):
    validate(rewards(), "rewards")
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_counts_by_reason_are_most_frequent_first():
    base = good_rows("quarantine")[0]
    reasons = ["not_json", "too_long", "too_long", "bad_id"]
    rows = [{**base, "source_row": row, "reason": reason} for row, reason in enumerate(reasons, start=1)]
    assert list(counts_by_reason(table_of("quarantine", rows)).items()) == [
        ("too_long", 2),
        ("bad_id", 1),
        ("not_json", 1),
    ]


def test_the_quick_check_is_quick():
    # 100,000 token_scores of 20 tokens: vectorised this takes about 0.1 s; row by row it would take seconds.
    num_rows = 100_000
    columns = {
        "rollout_id": pa.array([f"step-00001/a/{index}" for index in range(num_rows)], pa.large_string()),
        "segment": pa.array(np.zeros(num_rows, np.int64)),
        "scorer": pa.array(["old"] * num_rows, pa.large_string()),
        "model_id": pa.array(["m"] * num_rows, pa.large_string()),
        "values": pa.LargeListArray.from_arrays(
            np.arange(0, 20 * num_rows + 1, 20), np.zeros(20 * num_rows, np.float32)
        ),
    }
    table = pa.table(columns).cast(RECORDS["token_scores"].schema)
    began = time.process_time()
    check_table(table, "token_scores")
    assert time.process_time() - began < 2
