"""Whether sandboxes hold on this machine: tried with a program that attempts what none may do."""

from __future__ import annotations

import compileall
import functools
import json
import os
import shutil
from dataclasses import dataclass, replace

from rft_core.errors import SettingsError
from rft_core.rewards.sandbox.launch import INSIDE, Launcher
from rft_core.rewards.sandbox.limits import MIB, Limits
from rft_core.rewards.sandbox.process import ChannelClosed, Sandbox, SandboxFailed

PROBE_SECONDS = 30.0
PROBE_LIMITS = Limits(memory_bytes=256 * MIB, processes=16)
INSTALL = "install the system package bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"
ALLOW = (
    "allow user namespaces (as root: sysctl -w kernel.unprivileged_userns_clone=1, or "
    "kernel.apparmor_restrict_unprivileged_userns=0); in a container: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined, or --privileged"
)
# Prints what it could do, as JSON. It changes nothing, for it may turn out to run where it can.
PROBE = """
import json, os, socket, time
found = []
extra = set(os.environ) - {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "LC_CTYPE"}
if extra:
    found.append("it sees the environment's " + ", ".join(sorted(extra)))
for path in ("/etc/passwd", "/etc/hostname", "/sys/kernel", "/home", "/var"):
    if os.path.exists(path):
        found.append("it sees " + path)
for path in ("/", "/dev", os.path.dirname(os.__file__)):
    if os.access(path, os.W_OK):
        found.append("it can write " + path)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    found.append("it has a network")
except OSError:
    pass
if os.getuid() == 0:
    found.append("it is root")
if os.getppid() != 2:
    found.append("it sees other processes")
try:
    hoard = bytearray(LIMIT_OF_MEMORY)
    found.append("its memory is not limited")
except MemoryError:
    pass
children = 0
try:
    while children <= LIMIT_OF_PROCESSES:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    found.append("its processes are not limited")
except OSError:
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Problem:
    """Why no sandbox can be made here, and what mends it."""

    found: str
    mend: str


def examine() -> Launcher | Problem:
    """How sandboxes are made on this machine, tried once per process."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return Problem("bwrap is not on the PATH", INSTALL)
    return _examined(bubblewrap, os.geteuid() == 0)


def sandbox_launcher() -> Launcher:
    """How sandboxes are made here. Raises SettingsError with a mend."""
    examined = examine()
    if isinstance(examined, Problem):
        raise SettingsError(
            f"programs run in a sandbox of bubblewrap, and {examined.found}; {examined.mend}; where no program can be "
            "hostile, set code.sandbox: unsafe_unsandboxed"
        )
    return examined


@functools.cache
def _examined(bubblewrap: str, is_root: bool) -> Launcher | Problem:
    """The first way that holds: for root a user of its own, else a user namespace; with /proc, else without."""
    compileall.compile_dir(INSIDE, quiet=2)  # for interpreters that start in milliseconds; no harm where it cannot
    problems = []
    for has_own_user in (True, False) if is_root else (False,):
        for has_proc in (True, False):
            launcher = Launcher(bubblewrap, PROBE_LIMITS, has_own_user, has_proc)
            problem = problem_of(launcher)
            if problem is None:
                return launcher
            problems.append(problem)
    return Problem(f"{bubblewrap} does not hold: {problems[0]}", ALLOW)


def problem_of(launcher: Launcher) -> str | None:
    """What a program can do in such a sandbox that it must not, or why none starts; null when it holds."""
    launcher = replace(launcher, limits=PROBE_LIMITS)
    probe = PROBE.replace("LIMIT_OF_MEMORY", str(PROBE_LIMITS.memory_bytes))
    probe = probe.replace("LIMIT_OF_PROCESSES", str(PROBE_LIMITS.processes))
    order = {"mode": "cases", "program": probe, "file": "probe.py", "command": [], "output_bytes": 1 << 16}
    try:
        sandbox = Sandbox(launcher, "program")
    except SandboxFailed as error:
        return str(error)
    try:
        sandbox.wait_ready()
        sandbox.send({**order, "limits": PROBE_LIMITS.to_json(counts_processes=True)}, PROBE_SECONDS)
        sandbox.send("", PROBE_SECONDS)
        reply = sandbox.receive(PROBE_SECONDS)
        if reply is None:
            return "a program does not end in it"
        found = json.loads(reply["stdout"]) if reply["exit_code"] == 0 else [reply["error"]]
    except (SandboxFailed, ChannelClosed) as error:
        return str(error)
    finally:
        sandbox.end()
    return "; ".join(found) or None
