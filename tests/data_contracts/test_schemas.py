"""Records: documented columns, canonical JSON, values that survive plain JSON."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from data_contracts.schemas import RECORDS, canonical_json, column_doc, from_plain, to_plain
from tests.data_contracts.samples import good_rows, table_of


def test_records_are_those_of_the_design_and_the_samplers():
    assert list(RECORDS) == [
        "prompts",
        "examples",
        "rollouts",
        "rewards",
        "token_scores",
        "advantages",
        "updates",
        "evaluations",
        "quarantine",
        "prompt_stats",
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_every_column_has_a_doc_and_says_what_its_null_means(name):
    record = RECORDS[name]
    assert set(record.key) <= set(record.schema.names)
    assert record.schema.metadata == {b"record": name.encode(), b"version": str(record.version).encode()}
    for field in record.schema:
        doc = column_doc(record, field.name)
        assert doc["doc"] and "unit" in doc
        assert bool(doc.get("null")) == field.nullable, field.name
    assert not any(record.schema.field(key).nullable for key in record.key)


@pytest.mark.parametrize("name", RECORDS)
def test_growing_texts_and_lists_use_large_types(name):
    for field in RECORDS[name].schema:
        assert field.type not in (pa.string(), pa.binary()), field.name
        assert not pa.types.is_list(field.type), field.name


@pytest.mark.parametrize("name", RECORDS)
def test_no_record_holds_a_time_or_place(name):
    words = {word for column in RECORDS[name].schema.names for word in column.split("_")}
    assert not words & {"time", "seconds", "duration", "host", "path", "run", "at"}


@pytest.mark.parametrize("name", RECORDS)
def test_sample_tables_have_the_schema_with_its_metadata(name):
    assert table_of(name, good_rows(name)).schema.equals(RECORDS[name].schema, check_metadata=True)


def test_canonical_json_is_one_text_per_value():
    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


@pytest.mark.parametrize(
    "value",
    [
        {"grid": ((0, 1), (2, 3)), "rows": [[0, 1]], "empty": ()},
        {1: "red", (0, 1): {"x": None}},
        {"__tuple__": "a key of the user's own", "other": 1},
        ["text", 1, 1.5, True, None, {}],
    ],
)
def test_plain_values_come_back_equal_through_json(value):
    assert from_plain(json.loads(json.dumps(to_plain(value)))) == value
