"""Python values as JSON and back, without running anything.

A scalar (None, bool, int, float, str) stands for itself; all else is a list that begins with a tag. Values are rebuilt
from exact built-in types, so nothing of the sender's classes arrives. Containers keep their identity within a message:
both ends number them in order of appearance (Memo), and a later mention is ["r", number].
"""

from __future__ import annotations

import importlib
import sys
from _collections import OrderedDict, defaultdict, deque
from _operator import is_

from .wire import BadMessage

SCALARS = frozenset({type(None), bool, int, float, str})
CLASSES = {"l": list, "s": set, "d": dict, "ba": bytearray, "dq": deque, "od": OrderedDict, "dd": defaultdict}
TAGS = {kind: tag for tag, kind in CLASSES.items()}
MAPPINGS = (dict, OrderedDict, defaultdict)
COUNTER = "collections.Counter"  # a class in Python, of a module that is slow to load


class Memo:
    """The containers of a request and its reply, numbered in order of appearance."""

    def __init__(self) -> None:
        self.items: list = []
        self._numbers: dict[int, int] = {}

    def first(self, count: int) -> Memo:
        """A memo of the first `count` containers."""
        kept = Memo()
        for container in self.items[:count]:
            kept.add(container)
        return kept

    def add(self, container: object) -> None:
        self._numbers[id(container)] = len(self.items)
        self.items.append(container)

    def number(self, container: object) -> int | None:
        return self._numbers.get(id(container))

    def at(self, number: object) -> object:
        if type(number) is not int or not 0 <= number < len(self.items):
            raise BadMessage("a container that was never sent")
        return self.items[number]


def contents(container) -> list:
    """What a container holds, flat: keys and values take turns; the bytes of a bytearray are one item."""
    kind = type(container)
    if kind in MAPPINGS:
        return [part for pair in container.items() for part in pair]
    return [bytes(container)] if kind is bytearray else list(container)


def refill(container, items: list) -> None:
    """Replace what a container holds by what `contents` gave. Raises BadMessage."""
    kind = type(container)
    try:
        if kind in MAPPINGS:
            pairs = list(zip(items[::2], items[1::2], strict=True))
            container.clear()
            for key, value in pairs:
                container[key] = value
        elif kind is bytearray:
            container[:] = bytes(items[0])
        elif kind is list:
            container[:] = items
        else:
            container.clear()
            container.update(items) if kind is set else container.extend(items)
    except (TypeError, ValueError, IndexError) as error:
        raise BadMessage(f"contents of a {kind.__name__}: {error}") from None


def is_unchanged(before: list, after: list) -> bool:
    """Whether two contents are the same objects; equal bytes count as the same."""
    if len(before) != len(after):
        return False
    return all(map(is_, before, after)) or (len(after) == 1 and type(after[0]) is bytes and before == after)


def encode(value, memo: Memo, other):
    """`other(value, memo)` encodes what is no plain value."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in TAGS:
        return _encode_container(value, memo, other)
    if kind is tuple or kind is frozenset:
        return ["t" if kind is tuple else "fs", encode_items(value, memo, other)]
    if kind is bytes:
        return ["b", value.decode("latin-1")]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range or kind is slice:
        return ["rg" if kind is range else "sl", *(encode(part, memo, other) for part in _bounds(value))]
    if kind is type({}.keys()):
        return ["dk", encode_items(value, memo, other)]
    if value is ... or value is NotImplemented:
        return ["e", value is ...]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == COUNTER and kind is sys.modules["collections"].Counter:
        return ["ct", encode(dict(value), memo, other)]
    if name in LIBRARY:
        return ["v", name, encode(LIBRARY[name][0](value), memo, other)]
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "item"):
        return _encode_numpy(value, memo, other)
    return other(value, memo)


def encode_items(items, memo: Memo, other) -> list:
    if SCALARS.issuperset(map(type, items)):
        return list(items)
    return [encode(item, memo, other) for item in items]


def _encode_container(value, memo: Memo, other) -> list:
    number = memo.number(value)
    if number is not None:
        return ["r", number]
    memo.add(value)
    encoded = [TAGS[type(value)], encode_items(contents(value), memo, other)]
    if type(value) is deque:
        encoded.append(value.maxlen)
    elif type(value) is defaultdict:
        encoded.append(encode(value.default_factory, memo, other))
    return encoded


def _bounds(value) -> tuple:
    return value.start, value.stop, value.step


def _encode_numpy(value, memo: Memo, other):
    if getattr(value, "shape", None) == ():
        return encode(value.item(), memo, other)
    if type(value).__name__ != "ndarray" or value.dtype.hasobject:
        return other(value, memo)
    return ["np", value.dtype.str, list(value.shape), encode_items(value.ravel().tolist(), memo, other)]


def decode(data, memo: Memo, other):
    """`other(data, memo)` decodes what is no plain value. Raises BadMessage for what `encode` never writes."""
    if type(data) is not list:
        if type(data) in SCALARS:
            return data
        raise BadMessage("an object")
    decoder = DECODERS.get(data[0]) if data and type(data[0]) is str else None
    try:
        return decoder(data, memo, other) if decoder else other(data, memo)
    except (TypeError, ValueError, IndexError, KeyError, ArithmeticError, ImportError, AttributeError) as error:
        raise BadMessage(f"{data[0] if data else data!r}: {type(error).__name__}: {error}") from None


def decode_items(items, memo: Memo, other) -> list:
    if type(items) is not list:
        raise BadMessage("items that are no list")
    if SCALARS.issuperset(map(type, items)):
        return items
    return [decode(item, memo, other) for item in items]


def _decode_container(data, memo: Memo, other):
    kind = CLASSES[data[0]]
    if kind is deque:
        container = deque(maxlen=data[2])
    elif kind is defaultdict:
        factory = decode(data[2], memo, other)
        container = defaultdict(factory)
    else:
        container = kind()
    memo.add(container)
    refill(container, decode_items(data[1], memo, other))
    return container


def _decode_numpy(data, memo: Memo, other):
    array = importlib.import_module("numpy").array(decode_items(data[3], memo, other), dtype=data[1])
    return array.reshape(data[2])


def _decode_library(data, memo: Memo, other):
    return LIBRARY[data[1]][1](decode(data[2], memo, other))


def _library(name: str):
    module, _, attribute = name.partition(".")
    return lambda *parts: getattr(importlib.import_module(module), attribute)(*parts)


def _from_iso(kind: str):
    return lambda text: getattr(importlib.import_module("datetime"), kind).fromisoformat(text)


# Values of the standard library that cross as values: name of the class, to plain, from plain.
LIBRARY = {
    "decimal.Decimal": (str, _library("decimal.Decimal")),
    "fractions.Fraction": (
        lambda value: (value.numerator, value.denominator),
        lambda parts: _library("fractions.Fraction")(*parts),
    ),
    "datetime.date": (lambda value: value.isoformat(), _from_iso("date")),
    "datetime.time": (lambda value: value.isoformat(), _from_iso("time")),
    "datetime.datetime": (lambda value: value.isoformat(), _from_iso("datetime")),
    "datetime.timedelta": (
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda parts: _library("datetime.timedelta")(*parts),
    ),
    "uuid.UUID": (str, _library("uuid.UUID")),
    "pathlib.PosixPath": (str, _library("pathlib.Path")),
}

DECODERS = {
    **dict.fromkeys(CLASSES, _decode_container),
    "r": lambda data, memo, other: memo.at(data[1]),
    "t": lambda data, memo, other: tuple(decode_items(data[1], memo, other)),
    "fs": lambda data, memo, other: frozenset(decode_items(data[1], memo, other)),
    "b": lambda data, memo, other: data[1].encode("latin-1"),
    "c": lambda data, memo, other: complex(data[1], data[2]),
    "rg": lambda data, memo, other: range(*decode_items(data[1:], memo, other)),
    "sl": lambda data, memo, other: slice(*decode_items(data[1:], memo, other)),
    "dk": lambda data, memo, other: dict.fromkeys(decode_items(data[1], memo, other)).keys(),
    "e": lambda data, memo, other: ... if data[1] else NotImplemented,
    "np": _decode_numpy,
    "ct": lambda data, memo, other: _library(COUNTER)(decode(data[1], memo, other)),
    "v": _decode_library,
}
