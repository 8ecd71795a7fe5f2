"""Values cross between processes as themselves, and what nobody sends is refused."""

from __future__ import annotations

import collections
import datetime
import json
import math
from decimal import Decimal
from fractions import Fraction

import pytest

from rft_core.rewards.sandbox.inside.mirrors import content_of, describe_class
from rft_core.rewards.sandbox.inside.values import Memo, contents, decode, encode, is_unchanged, refill
from rft_core.rewards.sandbox.inside.wire import BadMessage, pack, unpack


def refuse(value, memo):
    raise BadMessage(f"{value!r}")


def crossed(value):
    """Encoded, sent as bytes, decoded."""
    return decode(unpack(pack(encode(value, Memo(), refuse))[4:]), Memo(), refuse)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**400),
        1.5,
        math.inf,
        "Z\u00fc\U0001f680\ud800\0",
        [],
        [1, [2, (3, [None])]],
        (1, (2,), ()),
        {1, 2},
        frozenset({"a"}),
        {"a": 1, (1, 2): [3], None: {}},
        b"\0\xff",
        bytearray(b"xy"),
        1 - 2j,
        range(1, 9, 2),
        slice(None, 3),
        ...,
        collections.deque([1, [2]], maxlen=3),
        collections.Counter("aab"),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.defaultdict(None, {"k": [1]}),
        Decimal("1.10"),
        Fraction(1, 3),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.timedelta(days=-1, microseconds=7),
    ],
    ids=repr,
)
def test_a_value_arrives_as_itself(value):
    arrived = crossed(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_containers_keep_their_identity():
    inner = [1]
    outer = [inner, inner, {"x": inner}]
    outer.append(outer)
    arrived = crossed(outer)
    assert arrived[0] is arrived[1] is arrived[2]["x"]
    assert arrived[3] is arrived


def test_nan_arrives():
    assert math.isnan(crossed(math.nan))


@pytest.mark.parametrize(
    "data",
    [
        {"a": 1},
        [],
        ["zz"],
        [5],
        [["l"]],
        ["l"],
        ["l", 5],
        ["l", [{}]],
        ["r", 0],
        ["r", -1],
        ["s", [["l", []]]],
        ["d", [1]],
        ["d", [["l", []], 1]],
        ["b", 5],
        ["b", "\u6771"],
        ["c", "x", 1],
        ["v", "os.system", "ls"],
        ["v", "decimal.Decimal", "x"],
        ["v", "datetime.date", 5],
        ["dq", [], "x"],
        ["ba", []],
        ["rg", 1, 2, 0],
    ],
    ids=json.dumps,
)
def test_what_nobody_sends_is_refused(data):
    with pytest.raises(BadMessage):
        decode(data, Memo(), refuse)


@pytest.mark.parametrize("data", [b"", b"[1", b"[1]x", b"\xff", b"[" * 100_000, b"nothing"])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(BadMessage):
        unpack(data)


def test_changes_are_seen_by_identity():
    first, second = [1], [1]
    container = [first, 2]
    before = contents(container)
    assert is_unchanged(before, contents(container))
    container[0] = second  # equal, but another object
    assert not is_unchanged(before, contents(container))
    data = bytearray(b"x")
    assert is_unchanged(contents(data), contents(data))


def test_refilling_keeps_the_container():
    ordered = collections.OrderedDict(a=1, b=2)
    refill(ordered, ["b", 3, "a", 4])
    assert list(ordered.items()) == [("b", 3), ("a", 4)]
    with pytest.raises(BadMessage):
        refill({}, [1])


def test_the_built_in_value_inside_ignores_what_its_class_says():
    class Liar(list):
        def __iter__(self):
            return iter([9])

        def __eq__(self, other):
            return True

    class Number(int):
        def __int__(self):
            return 9

    assert content_of(Liar([1, 2])) == [1, 2]
    assert content_of(Number(3)) == 3
    assert content_of(object()) is None
    ops, plain, exception = describe_class(Number)
    assert (ops, plain, exception) == (["__int__"], "int", None)
    assert describe_class(KeyError)[2] == "KeyError"
