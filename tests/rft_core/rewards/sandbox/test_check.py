"""Sandboxes are tried before they are trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rft_core.rewards.sandbox import Launcher, Problem, examine, sandbox_launcher
from rft_core.rewards.sandbox.check import problem_of

REPOSITORY = Path(__file__).parents[4]


def test_this_machine_has_sandboxes_that_hold():
    assert problem_of(sandbox_launcher()) is None


LEAKY = f"""#!{sys.executable}
import os, sys
end = sys.argv.index("--")
os.execv({shutil.which("bwrap")!r}, ["bwrap", *sys.argv[1:end], "--ro-bind", "/etc", "/etc", *sys.argv[end:]])
"""


def test_a_sandbox_with_a_leak_is_found_out(tmp_path, monkeypatch):
    """A bwrap that shows one folder too many: a problem, not a sandbox."""
    leaky = tmp_path / "bwrap"
    leaky.write_text(LEAKY)
    leaky.chmod(0o755)
    problem = problem_of(Launcher(str(leaky)))
    assert "it sees /etc/passwd" in problem
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    examined = examine()
    assert isinstance(examined, Problem)
    assert "does not hold: it sees /etc/passwd" in examined.found
    assert "user namespaces" in examined.mend


OTHER_USER = """
from rft_core.rewards.sandbox import Calls, Script, examine, judge_all

launcher = examine()
assert not launcher.has_own_user, launcher
tests = dict(kind="assert", code="assert f() == 1", names=["f"], words=["f"], num_tests=1, calls=[], function=None)
tests |= dict(modules=[], packages=[], tolerance=0)
bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: break\\n"
spy = "print('canary' in open('/proc/1/environ').read())"
jobs = [Calls("def f(): return 1", tests), Script(f"{bomb}print(1)", (("", "2"),)), Script(spy, (("", "False"),))]
print([judgement.passed for judgement in judge_all(launcher, jobs, is_partial=False, workers=2)])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_it_works_for_a_user_who_is_not_root():
    """With a user namespace, on the system's interpreter: this one's files may be root's alone."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    version = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"] if python else ["false"]
    if subprocess.run(version, check=False).returncode:
        pytest.skip("needs a Python of the system of version 3.11 or newer")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="rft-other-user-"))
    try:
        for name in ("rft_core/errors.py", "data_contracts/errors.py"):
            (folder / name).parent.mkdir(parents=True)
            shutil.copy(REPOSITORY / name, folder / name)
        shutil.copytree(REPOSITORY / "rft_core/rewards/sandbox", folder / "rft_core/rewards/sandbox")
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        ended = subprocess.run(
            [python, "-c", OTHER_USER],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "SECRET": "canary", "HOME": "/"},
            cwd="/",
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(folder)
    assert (ended.stdout, ended.returncode) == ("[1, 0, 1]\n", 0), ended.stderr
