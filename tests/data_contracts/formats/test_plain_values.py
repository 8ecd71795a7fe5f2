"""Arrow values without a JSON form of their own: what each becomes."""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal

import pyarrow as pa
import pytest

from data_contracts.errors import ContractError
from data_contracts.formats.plain_values import check_columns, plain_columns
from tests.data_contracts.formats.reading import is_plain

MOMENT = datetime.datetime(2020, 1, 2, 3, 4, 5, 600)
SPELLED = "2020-01-02 03:04:05.000600"
JSON_TEXTS = pa.array(['{"role": "user"}', "1"]).cast(pa.json_())
JSON_LIST = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), JSON_TEXTS)
PAIR = pa.array([[1, 2]], pa.list_(pa.int32(), 2))
TENSOR = pa.FixedShapeTensorArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), PAIR)


def plain(array: pa.Array) -> list:
    columns, faults = plain_columns(pa.RecordBatch.from_arrays([array], names=["a"]))
    assert faults == {} and is_plain(columns["a"])
    return columns["a"]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([MOMENT, None]), [SPELLED, None]),
        (pa.array([MOMENT], pa.timestamp("us", "UTC")), [f"{SPELLED}Z"]),
        (pa.array([1], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001"]),
        (pa.array([datetime.date(2020, 1, 2)]), ["2020-01-02"]),
        (pa.array([datetime.time(1, 2, 3)]), ["01:02:03.000000"]),
        (pa.array([datetime.timedelta(seconds=2)]), ["2000000"]),
        (pa.array([[MOMENT, None], None, []]), [[SPELLED, None], None, []]),
        (pa.array([[MOMENT, MOMENT]], pa.list_(pa.timestamp("us"), 2)), [[SPELLED, SPELLED]]),
        (pa.array([{"at": MOMENT, "n": 1}, None]), [{"at": SPELLED, "n": 1}, None]),
        (pa.array([[("k", MOMENT)]], pa.map_(pa.string(), pa.timestamp("us"))), [{"k": SPELLED}]),
        (pa.array([MOMENT, None, MOMENT]).dictionary_encode(), [SPELLED, None, SPELLED]),
    ],
)
def test_times_become_text(array, expected):
    assert plain(array) == expected


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("1.50", pa.decimal128(3, 2), 1.5),
        ("0.3", pa.decimal128(2, 1), 0.3),
        ("123456789012.345", pa.decimal128(15, 3), 123456789012.345),
        ("0.1234567890123456", pa.decimal128(16, 16), "0.1234567890123456"),
        ("1E-18", pa.decimal128(38, 18), "0.000000000000000001"),
        ("12345678901234567890123", pa.decimal128(38, 0), 12345678901234567890123),
        ("1500", pa.decimal128(5, -2), 1500),
    ],
)
def test_decimals_become_exact_numbers_or_text(value, kind, expected):
    [found, none] = plain(pa.array([Decimal(value), None], kind))
    assert none is None and found == expected and type(found) is type(expected)


def test_binary_becomes_base64_text():
    assert plain(pa.array([b"\x00\xff", None, b""])) == ["AP8=", None, ""]
    assert plain(pa.array([{"bytes": b"a", "path": None}])) == [{"bytes": "YQ==", "path": None}]


def test_maps_become_objects():
    assert plain(pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64()))) == [
        {"a": 1, "b": None},
        None,
        {},
    ]
    assert plain(pa.array([[(1, ["x"])]], pa.map_(pa.int64(), pa.list_(pa.string())))) == [{"1": ["x"]}]


def test_a_map_with_a_key_twice_is_a_fault():
    maps = pa.array([[("k", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))
    columns, faults = plain_columns(pa.RecordBatch.from_arrays([maps], names=["a"]))
    assert columns["a"][0] == {"k": 1}
    assert {index: fault.reason for index, fault in faults.items()} == {1: "repeated_key"}


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ('{"a": 1', "not_json", "column a: Expecting"),
        ('{"a": 1, "a": 2}', "repeated_key", "column a: keys of an object"),
    ],
)
def test_a_json_column_that_is_no_json_is_a_fault(text, reason, words):
    _, faults = plain_columns(pa.RecordBatch.from_arrays([pa.array([text]).cast(pa.json_())], names=["a"]))
    assert faults[0].reason == reason and str(faults[0]).startswith(words)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"s": [{"t": x}]}])
def test_nan_becomes_null_and_an_infinity_is_a_fault(wrap):
    array = pa.array([wrap(float("nan")), wrap(1.0), wrap(None), wrap(float("-inf"))])
    columns, faults = plain_columns(pa.RecordBatch.from_arrays([array], names=["reward"]))
    assert columns["reward"][:3] == [wrap(None), wrap(1.0), wrap(None)]
    assert [(index, fault.reason, str(fault)) for index, fault in faults.items()] == [
        (3, "fields_not_json", "column reward: numbers must be finite, found -inf")
    ]


def test_nan_in_other_forms_of_floats():
    assert plain(pa.array([float("nan"), 1.5], pa.float16())) == [None, 1.5]
    assert plain(pa.array([float("nan"), 1.5]).dictionary_encode()) == [None, 1.5]
    assert plain(pa.array([[("k", float("nan"))]], pa.map_(pa.string(), pa.float64()))) == [{"k": None}]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.nulls(2), [None, None]),
        (pa.array([[], None], pa.list_(pa.null())), [[], None]),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (pa.array(["a", None], pa.string_view()), ["a", None]),
        (pa.array([[1], None], pa.large_list(pa.uint8())), [[1], None]),
        (pa.array([[b"a"], None, [b"b"]], pa.list_view(pa.binary())), [["YQ=="], None, ["Yg=="]]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", "b"])), ["a", "a", "b"]),
        (pa.array([uuid.UUID(int=1).bytes], pa.binary(16)).cast(pa.uuid()), [str(uuid.UUID(int=1))]),
        (pa.array(['{"a": [1, 1.0]}', None, "null", '"x"']).cast(pa.json_()), [{"a": [1, 1.0]}, None, None, "x"]),
        (JSON_LIST, [[{"role": "user"}, 1], []]),
        (pa.array([1, 0], pa.int8()).cast(pa.bool8()), [True, False]),
        (TENSOR, [[1, 2]]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_other_types_give_the_values_they_hold(array, expected):
    assert plain(array) == expected


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.month_day_nano_interval(), "must have a JSON form, found type month_day_nano_interval"),
        (pa.list_(pa.dense_union([pa.field("x", pa.int8()), pa.field("y", pa.string())])), "must have a JSON form"),
        (pa.list_view(pa.timestamp("us")), "must hold no times in list views"),
        (pa.struct([("x", pa.int8()), ("x", pa.int8())]), "fields of column a of f must differ in name, found x, x"),
    ],
)
def test_types_without_a_json_form_are_an_error(kind, words):
    with pytest.raises(ContractError, match=words):
        check_columns(pa.schema([pa.field("a", kind)]), "f")
