"""Arrow columns -> plain JSON values: dict, list, str, int, float, bool, None; never numpy, never a tuple.

What JSON has no form for:

    dates, times, durations     text, as Arrow spells them (2020-01-02 03:04:05.000000Z; a duration in its own unit)
    decimals                    an integer without decimal places, a float up to 15 digits (exact), text beyond
    binary                      base64 text
    maps                        an object; keys that are not text become their JSON text
    JSON text, marked as such   what it says: `datasets` stores values of mixed types so
    NaN                         null: what pandas means by it
    infinities, a key twice     the row is faulty: fields_not_json, repeated_key

Empty lists and null, integers and floats stay apart. Integers keep all their digits.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_contracts.errors import ContractError
from data_contracts.formats.json_rows import RowFault, parse_value

KEPT_EXTENSIONS = (pa.UuidType, pa.Bool8Type, pa.JsonType)  # whose Python values say more than their storage
EXACT_DIGITS = 15  # decimal digits that a double always holds
Plain = Callable[[Any], Any]


def check_columns(schema: pa.Schema, source: str) -> list[str]:
    """Notes on columns whose values change their form. Raises ContractError for names that repeat (also in a struct)
    and for types without a JSON form.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ContractError(f"the columns of {source} must differ in name, found {', '.join(twice)} more than once")
    notes = []
    for field in schema:
        leaves = list(_leaves(field.type, source, field.name))
        # Arrow 26 loses values when it casts a list view.
        if "list_view<" in str(field.type) and any(_cast_type(leaf) != leaf for leaf in leaves):
            raise ContractError(
                f"column {field.name} of {source} must hold no times in list views, found {field.type}; cast it"
            )
        if any(_is_binary(leaf) for leaf in leaves):
            notes.append(
                f"{source}: column {field.name} is binary, its values become base64 text; if it is text, cast it"
            )
    return notes


def plain_columns(batch: pa.RecordBatch) -> tuple[dict[str, list[Any]], dict[int, RowFault]]:
    """Values by column, and the faults of rows by index. Raises UnicodeDecodeError for text that is not UTF-8."""
    columns: dict[str, list[Any]] = {}
    faults: dict[int, RowFault] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        array = _cast(name, array)
        values = array.to_pylist()
        plain = _plain(array.type, _has_odd_float(array))
        columns[name] = values if plain is None else _each(plain, values, name, faults)
    return columns, faults


def _cast(name: str, array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray) and not isinstance(array.type, KEPT_EXTENSIONS):
        array = array.storage
    target = _cast_type(array.type)
    if target == array.type:
        return array
    try:
        return array.cast(target)
    except pa.ArrowNotImplementedError as error:
        raise ContractError(f"column {name} must have a JSON form, found type {array.type}; cast it to text") from error


def _each(plain: Plain, values: list[Any], name: str, faults: dict[int, RowFault]) -> list[Any]:
    done = []
    for index, value in enumerate(values):
        try:
            done.append(plain(value))
        except RowFault as fault:
            faults.setdefault(index, RowFault(fault.reason, f"column {name}: {fault}"))
            done.append(None)
    return done


def _leaves(kind: pa.DataType, source: str, column: str) -> list[pa.DataType]:
    """The types of the values inside a type. Raises ContractError for one that has no JSON form."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type, source, column)
    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        return _leaves(kind.value_type, source, column)
    if kinds.is_map(kind):
        return [*_leaves(kind.key_type, source, column), *_leaves(kind.item_type, source, column)]
    if _is_list(kind):
        return _leaves(kind.value_type, source, column)
    if kinds.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise ContractError(
                f"the fields of column {column} of {source} must differ in name, found {', '.join(names)}"
            )
        return [leaf for field in kind for leaf in _leaves(field.type, source, column)]
    if kinds.is_union(kind) or kinds.is_interval(kind):
        raise ContractError(f"column {column} of {source} must have a JSON form, found type {kind}; cast it to text")
    return [kind]


def _is_list(kind: pa.DataType) -> bool:
    tests = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list, kinds.is_list_view, kinds.is_large_list_view)
    return any(test(kind) for test in tests)


def _is_binary(kind: pa.DataType) -> bool:
    tests = (kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary, kinds.is_binary_view)
    return any(test(kind) for test in tests)


def _cast_type(kind: pa.DataType) -> pa.DataType:
    """The type with text for what Arrow itself spells, all the way down."""
    if kinds.is_dictionary(kind):
        return _cast_type(kind.value_type)
    if kinds.is_temporal(kind) and not kinds.is_interval(kind):
        return pa.large_string()
    if kinds.is_map(kind):
        return pa.map_(_cast_type(kind.key_type), _cast_type(kind.item_type))
    if kinds.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_cast_type(kind.value_type)))
    if kinds.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_cast_type(kind.value_type)), kind.list_size)
    if kinds.is_list(kind):
        return pa.list_(kind.value_field.with_type(_cast_type(kind.value_type)))
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(_cast_type(field.type)) for field in kind])
    return kind


def _has_odd_float(array: pa.Array) -> bool:
    """Whether there may be a NaN or an infinity in the array."""
    if isinstance(array, pa.ExtensionArray):
        return _has_odd_float(array.storage)
    kind = array.type
    if kinds.is_floating(kind):
        return pc.all(pc.is_finite(array)).as_py() is False
    if kinds.is_struct(kind):
        return any(_has_odd_float(field) for field in array.flatten())
    if kinds.is_map(kind):
        return _has_odd_float(array.items)
    if kinds.is_dictionary(kind):
        return _has_odd_float(array.dictionary)
    return _is_list(kind) and _has_odd_float(array.flatten())


def _plain(kind: pa.DataType, has_odd_float: bool) -> Plain | None:
    """What makes plain JSON of the Python values that Arrow gives for a type; null where they are plain already."""
    if isinstance(kind, pa.UuidType):
        return _uuid_text
    if isinstance(kind, pa.JsonType):
        return _json_value
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type, has_odd_float)
    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        return _plain(kind.value_type, has_odd_float)
    if kinds.is_decimal(kind):
        return _decimal(kind)
    if kinds.is_floating(kind):
        return _finite_or_null if has_odd_float else None
    if _is_binary(kind):
        return _base64
    if kinds.is_map(kind):
        return _map(_plain(kind.key_type, has_odd_float), _plain(kind.item_type, has_odd_float))
    if kinds.is_struct(kind):
        return _struct({field.name: _plain(field.type, has_odd_float) for field in kind})
    if _is_list(kind):
        return _list(_plain(kind.value_type, has_odd_float))
    return None


def _list(plain: Plain | None) -> Plain | None:
    if plain is None:
        return None
    return lambda value: None if value is None else [plain(item) for item in value]


def _struct(fields: dict[str, Plain | None]) -> Plain | None:
    changed = {name: plain for name, plain in fields.items() if plain is not None}
    if not changed:
        return None

    def change(value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value and {name: changed[name](item) if name in changed else item for name, item in value.items()}

    return change


def _map(plain_key: Plain | None, plain_item: Plain | None) -> Plain:
    def change(value: list[tuple[Any, Any]] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        done: dict[str, Any] = {}
        for key, item in value:
            key = plain_key(key) if plain_key else key
            name = key if isinstance(key, str) else json.dumps(key)
            if name in done:
                raise RowFault("repeated_key", f"keys of an object must differ, found {name!r} twice")
            done[name] = plain_item(item) if plain_item else item
        return done

    return change


def _decimal(kind: pa.DataType) -> Plain:
    def change(value: Decimal | None) -> int | float | str | None:
        if value is None:
            return None
        if kind.scale <= 0:
            return int(value)
        return float(value) if kind.precision <= EXACT_DIGITS else f"{value:f}"

    return change


def _finite_or_null(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        raise RowFault("fields_not_json", f"numbers must be finite, found {value}")
    return value


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _json_value(value: str | None) -> Any:
    return None if value is None else parse_value(value)


def _uuid_text(value: UUID | None) -> str | None:
    return None if value is None else str(value)
