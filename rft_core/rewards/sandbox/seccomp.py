"""A filter of system calls for bubblewrap's --seccomp: a classic BPF program, as bytes.

It closes what namespaces and limits leave open: memory that no limit counts (memfd_create, System V and POSIX queues
and segments), other processes' memory, new namespaces, the kernel's larger attack surfaces, and sockets of families
that a network namespace does not hold back (a virtual machine's AF_VSOCK). Denied calls fail with EPERM.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
X32_CALLS = 0x40000000  # the other ABI of x86_64
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

# System call numbers on x86_64 and aarch64; from 424 on they are the same everywhere.
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH


def filter_program(machine: str | None = None) -> bytes | None:
    """Instructions of eight bytes each; null for a machine whose numbers are not known here."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    column, architecture = known
    program = [
        _instruction(LOAD_WORD, ARCHITECTURE),
        _instruction(JUMP_EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD_WORD, NUMBER),
    ]
    if column == 0:
        program += _when(JUMP_AT_LEAST, X32_CALLS, ERRNO | errno.ENOSYS)
    program += _when(JUMP_EQUAL, CLONE3[column], ERRNO | errno.ENOSYS)  # its flags are in memory; libc then uses clone
    for numbers in DENIED.values():
        program += _when(JUMP_EQUAL, numbers[column], ERRNO | errno.EPERM)
    program += [
        _instruction(JUMP_EQUAL, CLONE[column], 0, 4),
        _instruction(LOAD_WORD, FIRST_ARGUMENT),
        _instruction(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
        _instruction(RETURN, ERRNO | errno.EPERM),
        _instruction(RETURN, ALLOW),
        _instruction(JUMP_EQUAL, SOCKET[column], 0, 1 + 2 * len(FAMILIES) + 1),
        _instruction(LOAD_WORD, FIRST_ARGUMENT),
    ]
    for family in FAMILIES:
        program += _when(JUMP_EQUAL, family, ALLOW)
    program += [_instruction(RETURN, ERRNO | errno.EAFNOSUPPORT), _instruction(RETURN, ALLOW)]
    return b"".join(program)


def _when(comparison: int, value: int, action: int) -> list[bytes]:
    return [_instruction(comparison, value, 0, 1), _instruction(RETURN, action)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
