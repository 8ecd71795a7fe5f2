"""The filter, run by an interpreter of its rules."""

from __future__ import annotations

import errno
import functools
import struct

import pytest

from rft_core.rewards.sandbox.seccomp import DENIED, filter_program

ALLOWED, DENIAL = 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@functools.cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", filter_program(machine)))


def outcome(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """What the kernel would answer: an interpreter of the five instructions in use (linux/filter.h)."""
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, argument, 0, 0, 0, 0, 0)
    program = instructions(machine)
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_what_is_denied_and_what_is_not(machine, column):
    assert {outcome(machine, numbers[column]) for numbers in DENIED.values()} == {DENIAL | errno.EPERM}
    read, clone, clone3, socket = {"x86_64": (0, 56, 435, 41), "aarch64": (63, 220, 435, 198)}[machine]
    assert outcome(machine, read) == ALLOWED
    assert outcome(machine, clone, 0x01200011) == ALLOWED  # fork
    assert outcome(machine, clone, 0x10000011) == DENIAL | errno.EPERM  # CLONE_NEWUSER
    assert outcome(machine, clone3) == DENIAL | errno.ENOSYS
    families = {family: outcome(machine, socket, family) == ALLOWED for family in (1, 2, 10, 16, 17, 38, 40)}
    assert families == {1: True, 2: True, 10: True, 16: False, 17: False, 38: False, 40: False}
    assert outcome(machine, read, architecture=0x40000003) == 0x80000000  # i386: killed


def test_the_other_abi_of_x86_is_denied():
    assert outcome("x86_64", 0x40000000 + 101) == DENIAL | errno.ENOSYS


def test_an_unknown_machine_has_no_filter():
    assert filter_program("pdp11") is None
