"""One end of the conversation between the program's process and the tests'.

A request is ["ask", op, args, kwargs, extras], its reply ["ok" | "raise", value, changes, printed]. `changes` are the
new contents of containers that the request passed, so a function may work in place. While one end waits for a reply it
serves the other's requests: a test may pass a function, and the program call it.
"""

from __future__ import annotations

import builtins
import importlib
from _thread import RLock
from types import ModuleType

from .mirrors import (
    BASES,
    Link,
    Remote,
    RemoteMeta,
    content_of,
    describe_class,
    make_class,
    make_exception,
    make_instance,
)
from .ops import OPS
from .values import Memo, contents, decode, decode_items, encode, encode_items, is_unchanged, refill
from .wire import BadMessage, Closed, pack, receive, send

TYPE_CHECKING = False  # that of `typing`, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable

BUILTIN_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
TYPE_NAMES = {kind: name for name, kind in BUILTIN_TYPES.items()}
# Exceptions of the standard library that arrive as themselves. None of a test framework: no program may skip a test.
LIBRARY_EXCEPTIONS = (
    *("asyncio.exceptions", "binascii", "concurrent.futures._base", "dataclasses", "decimal", "json.decoder", "queue"),
    *("_queue", "re", "re._constants", "sqlite3", "statistics", "struct", "subprocess", "zlib"),
)


class Gone(BaseException):
    """The other process is gone, or talks nonsense. No `except Exception` of a test may catch it."""


class ForeignInterrupt(Exception):
    """Stands for an exception over there that would end this process."""


class Peer:
    """Objects that only have an identity are kept here and known over there by a number, their handle."""

    strict = False
    named: frozenset = frozenset()  # classes that the tests name

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_gone = False  # whether the other process ended, or talked nonsense
        self.told: set[int] = set()  # handles of objects that came out of arithmetic with plain values
        self.deferred: list | None = None  # changes to apply later; null applies them at once
        self._lock = RLock()
        self._own: list = []
        self._handles: dict[int, int] = {}
        self._described: set[int] = set()  # handles of classes that the other end has a description of
        self._undelivered: list[int] = []  # those whose description is in the message being made
        self._classes: dict[int, type] = {}
        self._proxies: dict[int, object] = {}

    # What the two processes do differently.

    def allow(self, op: str, args: list) -> None:
        """Raise PermissionError when the other end may not ask this."""

    def run(self, op: str, args: list, kwargs: dict):
        return OPS[op](*args, **kwargs)

    def extras(self, memo: Memo) -> list:
        """What goes with a request besides its arguments."""
        return []

    def prepare(self, extras: list, memo: Memo) -> None:
        """Take the extras of a request before it runs."""

    def printed(self) -> str:
        """What was printed since the last call."""
        return ""

    def show(self, text: str) -> None:
        """Take what the other end printed."""

    # Requests.

    def request(self, op: str, args: tuple | list = (), kwargs: dict | None = None):
        """Ask the other end; raises what the call raised there. Raises Gone."""
        memo = Memo()
        with self._lock:
            try:
                flat = [part for pair in (kwargs or {}).items() for part in pair]
                message = ["ask", op, self._encode_all(args, memo), self._encode_all(flat, memo), self.extras(memo)]
                self._send(message)
                while True:
                    reply = receive(self.fd)
                    if type(reply) is not list or not reply or reply[0] != "ask":
                        break
                    self.serve(reply)
                return self.take(reply, memo)
            except (Closed, BadMessage) as error:
                self.is_gone = True
                raise Gone(str(error)) from None
            finally:
                self._described.difference_update(self._undelivered)
                self._undelivered.clear()

    def serve(self, message: list) -> None:
        """Run one request of the other end and reply."""
        memo = Memo()
        try:
            _, op, args, kwargs, extras = message
            args = decode_items(args, memo, self._decode_other)
            flat = decode_items(kwargs, memo, self._decode_other)
            kwargs = dict(zip(flat[::2], flat[1::2], strict=True))
            before = [contents(container) for container in memo.items]
        except (TypeError, ValueError) as error:
            raise BadMessage(f"a request: {error}") from None
        self.prepare(extras, memo)
        self.answer(lambda: self._allowed(op, args, kwargs), memo, before)

    def answer(self, work: Callable[[], object], memo: Memo | None = None, before: list | None = None) -> None:
        """Do it and send what came of it. `before` are the contents of the memo's containers before."""
        memo, before = memo or Memo(), before or []
        try:
            self._reply("ok", work(), memo, before)
        except (Gone, Closed, BadMessage):
            raise
        except BaseException as error:  # noqa: BLE001 (it goes to whoever asked)
            self._described.difference_update(self._undelivered)
            self._undelivered.clear()
            self._reply("raise", error, memo.first(len(before)), before)

    def _allowed(self, op: str, args: list, kwargs: dict):
        self.allow(op, args)
        return self.run(op, args, kwargs)

    def _send(self, message: list) -> None:
        data = pack(message)
        self._undelivered.clear()
        send(self.fd, data)

    def _reply(self, verb: str, value, memo: Memo, before: list) -> None:
        if verb == "ok":
            data = encode(value, memo, self._encode_other)
        else:
            data = self.encode_exception(value, memo)
        changes = []
        for number, old in enumerate(before):
            new = contents(memo.items[number])
            if not is_unchanged(old, new):
                changes += [number, encode_items(new, memo, self._encode_other)]
        self._send([verb, data, changes, self.printed()])

    def take(self, reply, memo: Memo):
        """The value of a reply; raises the exception that it holds."""
        try:
            verb, data, changes, printed = reply
            numbers, new = changes[::2], changes[1::2]
            originals = [memo.at(number) for number in numbers]
        except (TypeError, ValueError) as error:
            raise BadMessage(f"a reply: {error}") from None
        if type(printed) is str and printed:
            self.show(printed)
        targets = originals
        if self.deferred is not None:
            targets = [type(original)() for original in originals]
            for number, target in zip(numbers, targets, strict=True):
                memo.items[number] = target
            self.deferred += zip(originals, targets, strict=True)
        value = self.decode_exception(data, memo) if verb == "raise" else decode(data, memo, self._decode_other)
        for target, items in zip(targets, new, strict=True):
            refill(target, decode_items(items, memo, self._decode_other))
        if verb == "raise":
            raise value
        return value

    def apply_deferred(self) -> None:
        """Let the changes that calls made to their arguments reach the arguments."""
        deferred, self.deferred = self.deferred, None
        for original, changed in deferred or ():
            refill(original, contents(changed))

    @property
    def isolated(self) -> _Isolated:
        """A context in which changes to arguments are deferred to its end: no function may edit both sides of a
        comparison."""
        return _Isolated(self)

    # Objects, classes and exceptions.

    def _encode_all(self, values, memo: Memo) -> list:
        return [encode(value, memo, self._encode_other) for value in values]

    def _encode_other(self, value, memo: Memo) -> list:
        if isinstance(value, type):
            return self._encode_class(value)
        if isinstance(value, ModuleType):
            return ["m", value.__name__]
        if isinstance(value, Remote) and value.__rft__.peer is self:
            return ["o", value.__rft__.handle]
        if isinstance(value, BaseException):
            return ["E", *self.encode_exception(value, memo)]
        content = encode(content_of(value), memo, self._encode_other)
        return ["h", self.handle(value), self._describe(type(value)), content]

    def _encode_class(self, cls: type) -> list:
        if cls in TYPE_NAMES:
            return ["k", TYPE_NAMES[cls]]
        if isinstance(cls, RemoteMeta) and cls.__rft__.peer is self:
            return ["o", cls.__rft__.handle]
        if issubclass(cls, Exception) and cls.__module__ in LIBRARY_EXCEPTIONS:
            return ["x", cls.__module__, cls.__name__]
        return self._describe(cls)

    def _describe(self, cls: type) -> list:
        handle = self.handle(cls)
        if handle in self._described:
            return ["K", handle]
        self._described.add(handle)
        self._undelivered.append(handle)
        bases = [self._encode_class(base) for base in cls.__bases__ if base not in TYPE_NAMES]
        return ["K", handle, cls.__name__, bases, *describe_class(cls)]

    def encode_exception(self, error: BaseException, memo: Memo) -> list:
        try:
            text = str(error)
        except Exception as broken:  # noqa: BLE001 (the program's own __str__)
            text = f"its __str__ raises {type(broken).__name__}"
        args = self._encode_all(error.args if type(error.args) is tuple else (), memo)
        return [self._encode_class(type(error)), args, text, self.handle(error)]

    def decode_exception(self, data, memo: Memo) -> BaseException:
        try:
            cls, args, text, handle = data
        except (TypeError, ValueError):
            raise BadMessage("an exception") from None
        cls = decode(cls, memo, self._decode_other)
        args = tuple(decode_items(args, memo, self._decode_other))
        if not isinstance(cls, type) or not issubclass(cls, BaseException):
            raise BadMessage("an exception of no exception class")
        if not issubclass(cls, Exception | SystemExit):
            cls = ForeignInterrupt
        error = make_exception(cls, args, text if type(text) is str else "", Link(self, handle))
        error.__dict__["__foreign__"] = True
        return error

    def _decode_other(self, data, memo: Memo):
        if not data:
            raise BadMessage("an empty value")
        tag = data[0]
        if tag == "o" and data[1] >= 0:
            return self._own[data[1]]
        if tag == "k":
            return BUILTIN_TYPES[data[1]]
        if tag == "x" and data[1] in LIBRARY_EXCEPTIONS:
            cls = getattr(importlib.import_module(data[1]), data[2])
            if isinstance(cls, type) and issubclass(cls, Exception):
                return cls
        if tag == "m":
            return self.module(data[1])
        if tag == "K":
            return self._decode_class(data, memo)
        if tag == "h":
            return self._decode_instance(data, memo)
        if tag == "E":
            return self.decode_exception(data[1:], memo)
        raise BadMessage(f"the tag {tag!r}")

    def module(self, name: str):
        """The module here that stands for one over there."""
        raise BadMessage(f"the module {name!r}")

    def _decode_class(self, data: list, memo: Memo) -> type:
        if len(data) == 2:
            return self._classes[data[1]]
        _, handle, name, bases, ops, plain, exception = data
        made = [decode(base, memo, self._decode_other) for base in bases]
        made = [base for base in made if isinstance(base, RemoteMeta)]
        kind = BUILTIN_TYPES[exception] if exception else None
        if kind is not None and not issubclass(kind, Exception | SystemExit):
            kind = ForeignInterrupt
        cls = make_class(self, handle, name, made, ops, BASES[plain] if plain else None, kind)
        self._classes[handle] = cls
        return cls

    def _decode_instance(self, data: list, memo: Memo):
        _, handle, cls, content = data
        cls = decode(cls, memo, self._decode_other)
        content = decode(content, memo, self._decode_other)
        if not isinstance(cls, RemoteMeta):
            raise BadMessage("an object of no class of its own")
        known = self._proxies.get(handle)
        if known is not None and type(known) is cls and content is None:
            return known
        made = make_instance(cls, self, handle, content)
        if content is None:
            self._proxies[handle] = made
        return made

    def handle(self, value) -> int:
        """The number of an object of ours; the object is kept from now on."""
        handle = self._handles.get(id(value))
        if handle is None:
            handle = self._handles[id(value)] = len(self._own)
            self._own.append(value)
        return handle


class _Isolated:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def __enter__(self) -> None:
        self.peer.deferred = []

    def __exit__(self, *_) -> None:
        self.peer.apply_deferred()
