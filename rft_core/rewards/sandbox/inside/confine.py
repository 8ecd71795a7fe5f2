"""What a process inside does to itself before it runs anything: another user, limits, no leftovers."""

from __future__ import annotations

import os
import resource
import sys

from . import BARE, FOLDER_PREFIX, KEPT

MAX_OPEN_FILES = 256
SIGKILL = 9  # the module `signal` takes long to load
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_is_alone = False


def enter() -> int:
    """Take the arguments: the folder of this package, the channel's descriptor, the user to become (KEPT or BARE for
    none), further folders of packages. Gives the channel."""
    global _is_alone
    home, channel, uid, *folders = sys.argv[1:]
    _is_alone = uid != BARE
    if uid not in (KEPT, BARE):  # made by root: become nobody else's user, for good
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    if not is_alone():
        import ctypes

        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # orphans become ours, to be found and killed
    sys.path.remove(home)
    sys.path.extend(folders)
    sys.argv = [""]
    sys.set_int_max_str_digits(0)  # what data sets expect was printed by interpreters without that limit
    os.environ.pop("PYTHONHASHSEED", None)  # it fixes the order of sets in this interpreter; programs need not see it
    return int(channel)


def set_limits(limits: dict) -> None:
    """Limits from now on, of this process and its children: processes are counted over the sandbox, the rest each.

    `limits`: cpu_seconds, memory_bytes, file_bytes, processes (null: not limited), is_reserving (whether the program
    may reserve more addresses than it uses, as most virtual machines do).
    """
    cpu_seconds = int(limits["cpu_seconds"] + sum(os.times()[:2])) + 1
    wanted = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES, MAX_OPEN_FILES),
    ]
    memory = resource.RLIMIT_DATA if limits["is_reserving"] else resource.RLIMIT_AS
    wanted.append((memory, limits["memory_bytes"], limits["memory_bytes"]))
    if limits["processes"] is not None:
        wanted.append((resource.RLIMIT_NPROC, limits["processes"], limits["processes"]))
    for kind, soft, hard in wanted:
        highest = resource.getrlimit(kind)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(kind, (soft, hard))


def is_alone() -> bool:
    """Whether this process lives in a process namespace of its own: who started it says so, no process number does."""
    return _is_alone


def kill_rest() -> None:
    """Kill what a child that has ended left behind."""
    try:
        if is_alone():
            os.kill(-1, SIGKILL)  # all of the namespace but its first process and this one
        else:
            _kill_children()
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except (ProcessLookupError, ChildProcessError):
        pass


def _kill_children() -> None:
    """Until there is none: what a killed child leaves becomes a child too."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            pids = file.read().split()
        if not pids:
            return
        for pid in pids:
            os.kill(int(pid), SIGKILL)
            os.waitpid(int(pid), 0)


def clear_folder(keep: str) -> None:
    """Remove what a program left in the working folder, but for one file; only in a folder made for it alone."""
    is_own = os.getcwd() == "/tmp" if is_alone() else os.path.basename(os.getcwd()).startswith(FOLDER_PREFIX)
    if not is_own:
        return
    for entry in os.scandir("."):
        if entry.name == keep:
            continue
        if entry.is_dir(follow_symlinks=False):
            import shutil

            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def add_exit_functions() -> None:
    """`exit` and `quit`, which the module `site` adds in a plain interpreter."""
    import builtins
    from _sitebuiltins import Quitter

    builtins.exit = Quitter("exit", "Ctrl-D")
    builtins.quit = Quitter("quit", "Ctrl-D")


def silence() -> None:
    """Standard streams at the null device: what a program prints is nobody's verdict."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)
