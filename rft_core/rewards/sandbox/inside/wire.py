"""Messages over a file descriptor: four bytes of length (big-endian), then JSON."""

from __future__ import annotations

import os

try:  # the package json loads regular expressions first, which takes longer than the interpreter's own start
    from _json import encode_basestring_ascii, make_encoder, make_scanner
except ImportError:
    import json

    _dumps, _loads = json.dumps, json.loads
else:

    class _Plain:
        """What the scanner asks of a decoder."""

        strict, object_hook, object_pairs_hook, memo = True, None, None, None
        parse_int, parse_float, parse_constant = int, float, float

    _scan = make_scanner(_Plain)
    _encode = make_encoder(None, None, encode_basestring_ascii, None, ":", ",", False, False, True)

    def _dumps(message: object) -> str:
        return "".join(_encode(message, 0))

    def _loads(text: str) -> object:
        try:
            message, end = _scan(text, 0)
        except StopIteration:
            raise ValueError("no value") from None
        if end != len(text):
            raise ValueError("more than one value")
        return message


MAX_MESSAGE_BYTES = 64 << 20

# Bound now: a program may replace the functions of the module for its own purposes.
_read, _write = os.read, os.write


class Closed(Exception):
    """The other end is gone."""


class BadMessage(Exception):
    """The other end wrote what cannot be read."""


def pack(message: object) -> bytes:
    """Raises OverflowError when the message is too long."""
    data = _dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise OverflowError(f"what is passed may have {MAX_MESSAGE_BYTES} bytes, this has {len(data)}")
    return len(data).to_bytes(4, "big") + data


def unpack(data: bytes) -> object:
    """The message in a body. Raises BadMessage."""
    try:
        return _loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no JSON: {type(error).__name__}") from None


def send(fd: int, data: bytes) -> None:
    """All of `data`. Raises Closed."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[_write(fd, rest) :]
    except OSError as error:
        raise Closed(str(error)) from None


def receive(fd: int) -> object:
    """The next message. Raises Closed or BadMessage."""
    length = int.from_bytes(_exactly(fd, 4), "big")
    if length > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message may have {MAX_MESSAGE_BYTES} bytes, the next has {length}")
    return unpack(_exactly(fd, length))


def _exactly(fd: int, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = _read(fd, min(count, 1 << 16))
        except OSError as error:
            raise Closed(str(error)) from None
        if not part:
            raise Closed("end of messages")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
