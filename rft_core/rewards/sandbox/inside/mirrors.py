"""Stand-ins for objects that live in the other process.

Each class over there gets a class here with the same name and bases, so isinstance, except clauses and class calls
work; its instances forward attributes and operators. An instance of a class derived from int, str, tuple, list or dict
carries the built-in value, and compares and computes with that alone.

In the tests' process (`strict`), an object of the program never gets to see a plain value that it is compared with: a
program could return one whose == , < , - or startswith() says what the test wants to hear. So == with a plain value is
False, < raises, arithmetic must give an object again, and methods of str, list, dict ... do not exist, except on
objects of a class that the tests name.
"""

from __future__ import annotations

import builtins

BASES = {kind.__name__: kind for kind in (int, float, str, bytes, tuple, list, dict, set, frozenset, complex)}
PLAIN_METHODS = frozenset(name for kind in BASES.values() for name in dir(kind) if not name.startswith("_"))
STATE = "__rft__"  # attribute of every stand-in: its Link


class Link:
    """Where a stand-in's object lives."""

    __slots__ = ("handle", "peer")

    def __init__(self, peer, handle: int) -> None:
        self.peer = peer
        self.handle = handle

    def ask(self, op: str, *args, **kwargs):
        return self.peer.request(op, args, kwargs)


class RemoteMeta(type):
    """The class of stand-in classes: calls, attributes and iteration (Enum) go to the class over there."""

    def __call__(cls, *args, **kwargs):
        return cls.__rft__.ask("call", cls, *args, **kwargs)

    def __getattr__(cls, name: str):
        if name.startswith("__") or name == STATE:
            raise AttributeError(name)
        return type.__getattribute__(cls, STATE).ask("getattr", cls, name)

    def __setattr__(cls, name: str, value) -> None:
        if name.startswith("__"):
            type.__setattr__(cls, name, value)
        else:
            cls.__rft__.ask("setattr", cls, name, value)

    def __iter__(cls):
        return iter(cls.__rft__.ask("iter", cls))

    def __len__(cls) -> int:
        return cls.__rft__.ask("len", cls)

    def __getitem__(cls, key):
        return cls.__rft__.ask("getitem", cls, key)

    def __contains__(cls, item) -> bool:
        return isinstance(item, cls) and cls.__rft__.ask("contains", cls, item)

    def __bool__(cls) -> bool:
        return True


class Remote(metaclass=RemoteMeta):
    """Base of all stand-ins for instances."""

    def __init_subclass__(cls) -> None:
        if STATE not in vars(cls):
            raise TypeError("tests cannot derive a class from one of the program's: it lives in another process")

    def __getattr__(self, name: str):
        link = object.__getattribute__(self, "__dict__").get(STATE)
        if link is None or (name.startswith("__") and name not in SHOWN):
            raise AttributeError(name)
        if link.peer.strict and name in PLAIN_METHODS and not _is_named(type(self), link):
            raise AttributeError(
                f"the program gave an object of its class {type(self).__name__} where a plain value must stand: "
                f"its {name} is not asked"
            )
        return link.ask("getattr", self, name)

    def __setattr__(self, name: str, value) -> None:
        if name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            self.__dict__[STATE].ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__[STATE].ask("delattr", self, name)


class RemoteException(Remote):
    """Base of stand-ins for exceptions; another base is the built-in exception that they derive from."""

    __rft__ = None

    def __str__(self) -> str:
        return self.__dict__.get("__text__", "")


def make_class(peer, handle: int, name: str, bases: list, ops: list, plain: type | None, exception: type | None):
    """The stand-in for a class. `bases` are stand-ins too; `ops` the special methods it defines over there."""
    namespace: dict = {op: FORWARDERS[op] for op in ops if op in (FORWARDERS if plain is None else SHOWING)}
    if "__await__" in namespace and name == "coroutine":
        namespace |= {"send": _send, "throw": _throw, "close": lambda self: None}  # so that event loops know it
    namespace[STATE] = Link(peer, handle)
    last = exception or plain
    if not bases:
        bases = [RemoteException if exception else Remote]
    if last is not None and not any(issubclass(base, last) for base in bases):
        extra = [RemoteException] if exception and not any(issubclass(base, RemoteException) for base in bases) else []
        bases = [*bases, *extra, last]
    try:
        return RemoteMeta(name, tuple(bases), namespace)
    except TypeError:  # bases that do not go together here
        return RemoteMeta(name, (Remote,), namespace)


def make_instance(cls: type, peer, handle: int, content):
    """A stand-in for an instance; `content` is its value as a built-in type, null without one."""
    kind = next((kind for kind in BASES.values() if issubclass(cls, kind)), None)
    if kind is None:
        made = object.__new__(cls) if not issubclass(cls, BaseException) else cls.__new__(cls)
    elif kind in (list, dict, set):
        made = kind.__new__(cls)
        (list.extend if kind is list else kind.update)(made, content)
    else:
        made = kind.__new__(cls, content)
    object.__setattr__(made, STATE, Link(peer, handle))
    return made


def make_exception(cls: type, args: tuple, text: str, link: Link | None):
    """An exception to raise here."""
    if issubclass(cls, Remote):
        made = BaseException.__new__(cls)
        object.__setattr__(made, STATE, link)
        object.__setattr__(made, "__text__", text)
    else:
        try:
            made = cls(*args)
        except (TypeError, ValueError):
            made = cls.__new__(cls)
    object.__setattr__(made, "args", args)
    return made


def content_of(value):
    """The built-in value inside an instance of a class derived from one, whatever its class overrides; else null."""
    kind = next((kind for kind in BASES.values() if isinstance(value, kind)), None)
    if kind is None:
        return None
    if kind in (list, tuple, set, frozenset):
        return kind(kind.__iter__(value))
    if kind is dict:
        return dict(dict.items(value))
    return getattr(kind, f"__{kind.__name__}__")(value)


def describe_class(cls: type) -> tuple[list, str | None, str | None]:
    """(special methods it defines, built-in type it derives from, built-in exception it derives from)."""
    own = [base for base in cls.__mro__ if getattr(builtins, base.__name__, None) is not base] or [cls]
    ops = [op for op in FORWARDERS if any(op in vars(base) for base in own)]
    plain = next((name for name, kind in BASES.items() if issubclass(cls, kind)), None)
    exception = next((base.__name__ for base in cls.__mro__ if base.__module__ == "builtins"), None)
    return ops, plain, exception if issubclass(cls, BaseException) else None


def _is_named(cls: type, link: Link) -> bool:
    """Whether the tests name the class (with a capital: a function replaced by a class is none)."""
    return any(base.__name__ in link.peer.named for base in cls.__mro__ if isinstance(base, RemoteMeta))


def _hash(self) -> int:
    return self.__rft__.ask("hash", self)


def _unary(op: str):
    """An operation on the object alone. After arithmetic with a plain value, an object of a class that the tests do
    not name must give an object again: it could give what was to come out."""

    def forward(self, *args, **kwargs):
        link = self.__rft__
        result = link.ask(op, self, *args, **kwargs)
        return result if link.handle not in link.peer.told or _is_named(type(self), link) else _untold(link, result)

    return forward


def _number(op: str):
    """A conversion to a number. After arithmetic with a plain value it must give an object again, of whatever class."""

    def forward(self, *args):
        link = self.__rft__
        result = link.ask(op, self, *args)
        return _untold(link, result) if link.handle in link.peer.told else result

    return forward


def _arithmetic(op: str, is_reflected: bool):
    def forward(self, other):
        link = self.__rft__
        result = link.ask(op, other, self) if is_reflected else link.ask(op, self, other)
        return result if not link.peer.strict or isinstance(other, Remote) else _untold(link, result)

    return forward


def _untold(link: Link, result):
    if not isinstance(result, Remote) or isinstance(result, tuple(BASES.values())):
        raise TypeError("arithmetic between an object of the program and a plain value must give an object again")
    link.peer.told.add(result.__rft__.handle)
    return result


def _comparison(op: str):
    def forward(self, other):
        link = self.__rft__
        if link.peer.strict and not isinstance(other, Remote):
            if op in ("eq", "ne"):
                return NotImplemented
            raise TypeError("an object of the program cannot be ordered against a plain value")
        return link.ask(op, self, other)

    return forward


def _contains(self, item) -> bool:
    link = self.__rft__
    if link.peer.strict and not isinstance(item, Remote) and not _is_named(type(self), link):
        raise TypeError("an object of the program cannot be asked whether it holds a plain value")
    return link.ask("contains", self, item)


def _exit(self, kind, value, traceback):
    return self.__rft__.ask("exit", self, value)


def _await(self):
    return self.__rft__.ask("await", self)
    yield  # makes it a generator, which is what `await` takes


def _send(self, value):
    raise StopIteration(self.__rft__.ask("await", self))


def _throw(self, error, *rest):
    raise error


ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor"),
)
NUMBERS = (
    *("int", "float", "complex", "index", "trunc", "floor", "ceil", "round"),
    *("abs", "neg", "pos", "invert"),
)
SHOWING = {f"__{name}__": _unary(name) for name in ("str", "repr", "format", "call")}
FORWARDERS = {
    **SHOWING,
    **{
        f"__{name}__": _unary(name)
        for name in ("len", "bool", "iter", "next", "reversed", "getitem", "setitem", "delitem", "enter")
    },
    **{f"__{name}__": _number(name) for name in NUMBERS},
    **{f"__{name}__": _arithmetic(name, False) for name in ARITHMETIC},
    **{f"__r{name}__": _arithmetic(name, True) for name in ARITHMETIC},
    **{f"__{name}__": _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "__hash__": _hash,
    "__contains__": _contains,
    "__exit__": _exit,
    "__await__": _await,
}
# Special attributes that either end may ask for.
SHOWN = frozenset({"__name__", "__qualname__", "__annotations__"})
