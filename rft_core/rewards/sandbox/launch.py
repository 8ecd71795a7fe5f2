"""The command line that starts a process in a sandbox, and what of this machine it shows.

Made by root, a sandbox gets a random user of its own, because the kernel does not count processes of root; made by
another user, it gets a user namespace. Either way: its own processes, mounts, network (without any device), IPC and
host name; an empty file system with the files that the interpreter needs, read-only; no capability.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rft_core.rewards.sandbox.inside import BARE, KEPT
from rft_core.rewards.sandbox.limits import Limits

INSIDE = Path(__file__).parent / "inside"
HOME = "/rft"  # where the package `inside` is mounted
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside import {role}; {role}.main()"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
# With packages: threads of their own would only run into the limits.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHARED_MEMORY_BYTES = 16 << 20
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


@dataclass(frozen=True)
class Launcher:
    """How sandboxes are made. `bubblewrap` null makes none: processes then run as they are, in a temporary folder.

    `readonly` are further paths of the machine to show, `packages` folders or files of importable packages.
    """

    bubblewrap: str | None
    limits: Limits = field(default_factory=Limits)
    has_own_user: bool = False  # a user that root chose, instead of a user namespace
    has_proc: bool = True
    shows_system: bool = False  # for other languages: all of /usr
    readonly: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    checker_packages: tuple[str, ...] = ()

    def environment(self, folder: str) -> dict[str, str]:
        """All that a process sees of it; nothing is inherited."""
        return {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder, **(ONE_THREAD if self.packages else {})}

    def command(self, role: str, channel: int, info: int, seccomp: int | None) -> list[str]:
        """`role` is a module of `inside`; the numbers are open descriptors of the parent's."""
        packages = self.packages if role == "program" else (*self.packages, *self.checker_packages)
        mounted = {path: f"{HOME}/packages/{Path(path).name}" for path in packages}
        if self.bubblewrap is None:
            folders = sorted({str(Path(path).parent) for path in packages})
            return [*_python(), BOOT.format(role=role), str(INSIDE.parent), str(channel), BARE, *folders]
        arguments = [self.bubblewrap, "--die-with-parent", "--new-session", *self._namespaces()]
        arguments += ["--info-fd", str(info)]
        if seccomp is not None:
            arguments += ["--seccomp", str(seccomp)]
        system = SYSTEM if self.shows_system else LIBRARIES
        shown = {path: path for path in (*system, *_python_files(), *self.readonly)}
        shown |= {str(INSIDE): f"{HOME}/inside", **mounted}
        # Made beforehand, because bubblewrap makes the folders on the way to a mount for its own user alone.
        for folder in dict.fromkeys(str(folder) for path in shown.values() for folder in _above(path)):
            arguments += ["--perms", "0755", "--dir", folder]
        for path, place in shown.items():
            arguments += _shown(path, place)
        if self.has_proc:
            arguments += ["--proc", "/proc"]
        arguments += ["--dev", "/dev", *_writable("/dev/shm", SHARED_MEMORY_BYTES), "--remount-ro", "/dev"]
        arguments += [*_writable("/tmp", self.limits.file_bytes), "--chdir", "/tmp", "--remount-ro", "/"]
        uid = str(_unused_uid()) if self.has_own_user else KEPT
        folders = [f"{HOME}/packages"] if mounted else []
        return [*arguments, "--", *_python(), BOOT.format(role=role), HOME, str(channel), uid, *folders]

    def _namespaces(self) -> list[str]:
        shared = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        shared += ["--hostname", "sandbox", "--cap-drop", "ALL"]
        if self.has_own_user:
            return [*shared, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return ["--unshare-user", *shared, "--uid", "1000", "--gid", "1000"]


def _python() -> list[str]:
    """An interpreter that reads no site, no user's and no environment's folders."""
    return [_interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c"]


def _interpreter() -> str:
    """That of the environment's base: a virtual environment's own is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _python_files() -> list[str]:
    prefix = os.path.realpath(sys.base_prefix)
    folders = [] if prefix == "/usr" else [f"{prefix}/lib", f"{prefix}/lib64"]
    return [_interpreter(), *folders]


def _above(path: str) -> list[Path]:
    return list(Path(path).parents)[-2::-1]


def _shown(path: str, place: str) -> list[str]:
    if path in (*SYSTEM, *LIBRARIES) and os.path.islink(path):  # /lib is a link to usr/lib on most systems
        return ["--symlink", os.readlink(path), place]
    return ["--ro-bind-try", path, place]


def _writable(path: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _unused_uid() -> int:
    """A user that nobody else is: chosen at random among those that exist here, far from people and services."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    start, _, count = max(ranges, key=lambda row: row[2])
    low, high = max(start, 1 << 20), min(start + count, 0x7FFFFFFF)
    if low >= high:
        low, high = start + count // 2, start + count
    return low + secrets.randbelow(high - low)
