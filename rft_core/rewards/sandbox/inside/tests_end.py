"""The tests' end of the conversation, and the program as a module that tests import."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import sys
from types import ModuleType

from .mirrors import SHOWN
from .peer import Gone, Peer
from .values import Memo, encode
from .wire import BadMessage

MODULE_OF_TESTS = "tests_of_program"
# Modules that tests judge with. A test that names one without importing it relies on the program's import; taken from
# the program it could be anything.
MODULES = {
    **{name: name for name in ("cmath", "collections", "copy", "decimal", "fractions", "functools", "itertools")},
    **{name: name for name in ("json", "math", "numpy", "operator", "pandas", "pytest", "random", "re", "statistics")},
    "unittest": "unittest",
    "np": "numpy",
    "pd": "pandas",
}


class TestsEnd(Peer):
    """Trusts nothing: the program may ask of a test's object only what an argument is for."""

    __test__ = False  # no class of tests, whatever its name
    strict = True

    def __init__(self, fd: int, job: dict) -> None:
        super().__init__(fd)
        # With a capital: a class in place of a function keeps the function's name.
        self.named = frozenset(name for name in job["names"] if name[:1].isupper())
        self._packages = frozenset([*job["packages"], "pytest"])
        self._stdin, self._input = sys.stdin, builtins.input
        self.own_modules = {MODULE_OF_TESTS}

    def allow(self, op: str, args: list) -> None:
        asked = args[:1] if op in ("call", "getattr", "setattr", "delattr") else args
        if not any(id(value) in self._handles for value in asked):
            raise PermissionError("only what the tests passed can be asked")
        if op in ("getattr", "setattr", "delattr"):
            owner, name = type(args[0]), args[1]
            is_reading = op == "getattr"
            if is_reading and name in SHOWN and callable(args[0]):
                return
            if not isinstance(name, str) or name.startswith("_"):
                raise AttributeError(f"{name!r} of an argument is private")
            if owner.__module__ not in self.own_modules and not (is_reading and owner.__module__ == "unittest.mock"):
                raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r}")
            if not is_reading and callable(getattr(owner, name, None)):
                raise PermissionError(f"{name!r} of an argument is a method")

    def module(self, name: str) -> ModuleType:
        """Modules are those of this process: a test must not reach the program's functions through `math`."""
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in self._packages:
            raise BadMessage(f"the module {name!r}")
        return importlib.import_module(name)

    def extras(self, memo: Memo) -> list:
        """Where tests replaced `input` or sys.stdin, the program reads what they put there."""
        if builtins.input is not self._input:
            return ["input", encode(builtins.input, memo, self._encode_other)]
        if sys.stdin is not self._stdin and isinstance(sys.stdin, io.StringIO | io.TextIOWrapper):
            return ["stdin", sys.stdin.read()]
        return []

    def show(self, text: str) -> None:
        sys.stdout.write(text)


def known_names(peer: TestsEnd) -> set[str]:
    """Names that the program defines. Raises Gone when it gives something else."""
    known = peer.request("names")
    if type(known) is not list or not {str}.issuperset(map(type, known)):
        peer.is_gone = True
        raise Gone("names that are no texts")
    return set(known)


def names_of(peer: TestsEnd, wanted: list[str]) -> dict:
    """What the program defines of the wanted names. Names that mean modules are this process's own modules."""
    known = known_names(peer)
    found = {}
    for name in wanted:
        if name in MODULES:
            with contextlib.suppress(BadMessage, ImportError):
                found[name] = peer.module(MODULES[name])
        elif name in known:
            found[name] = peer.request("global", [name])
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType) or name in MODULES}


class ProgramModule(ModuleType):
    """The program under a name that tests import. `import *` brings what the tests mention, no more."""

    def __init__(self, name: str, peer: TestsEnd, words: list[str]) -> None:
        super().__init__(name)
        vars(self)["__peer__"] = peer
        vars(self)["__words__"] = words
        vars(self)["__replaced__"] = {}

    def __getattr__(self, name: str):
        if name == "__all__":
            known = known_names(self.__peer__)
            return [word for word in self.__words__ if word in known]
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__peer__.request("global", [name])

    def __setattr__(self, name: str, value) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
            return
        if name not in self.__replaced__ and hasattr(self, name):
            self.__replaced__[name] = getattr(self, name)
        self.__peer__.request("setglobal", [name, value])

    def __delattr__(self, name: str) -> None:
        """Undo a replacement, as tools that patch modules do."""
        if name in self.__replaced__:
            self.__peer__.request("setglobal", [name, self.__replaced__.pop(name)])
        else:
            self.__peer__.request("delglobal", [name])


def install_modules(peer: TestsEnd, job: dict) -> None:
    for name in job["modules"]:
        sys.modules[name] = ProgramModule(name, peer, job["words"])
