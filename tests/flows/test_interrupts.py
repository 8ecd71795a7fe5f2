"""Ctrl-C ends a command whenever it comes, and a second one at once."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from flows.interrupts import EXIT_INTERRUPTED, MESSAGE
from tests.faults.harness import finish, output_of, rft, write_recipe
from tests.house.sources import REPOSITORY
from tests.tiny import make_tiny_model

MOMENTS = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.2, 3.0, 4.5, 6.0)  # seconds after the command's first line
MARK = "OF_THIS_TEST"

# A module, since it is under `python -m` that CPython may end by the signal instead of the exit code.
PROGRAM = """
import signal, sys, time, weakref
from flows.interrupts import EXIT_INTERRUPTED, end_at_once, interruptible

class Thing: pass

def interrupt(*_):
    signal.raise_signal(signal.SIGINT)

def drop():
    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    del thing

try:
    with interruptible():
        {body}
        time.sleep(5)
        print("went on")
except KeyboardInterrupt:
    print("caught")
    sys.exit(EXIT_INTERRUPTED)
"""


@pytest.fixture(autouse=True)
def not_ignored():
    """Tests that a shell started in the background ignore SIGINT, and what they start would too."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ended(tmp_path, body):
    (tmp_path / "interrupted.py").write_text(PROGRAM.format(body=body))
    command = [sys.executable, "-m", "interrupted"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_command_that_is_to_ignore_it_does(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert ended(tmp_path, "interrupt(); print('went on'); sys.exit(0)") == (0, "went on\n", "")


def test_what_python_drops_in_a_callback_is_raised_again(tmp_path):
    assert ended(tmp_path, "drop()") == (EXIT_INTERRUPTED, "caught\n", "")


def test_the_exit_code_is_ours_when_it_came_in_text_that_was_executed(tmp_path):
    body = 'exec("import signal; signal.raise_signal(signal.SIGINT)")'
    assert ended(tmp_path, body) == (EXIT_INTERRUPTED, "caught\n", "")


def test_a_second_one_does_not_wait_for_what_the_first_one_began(tmp_path):
    body = "try: interrupt()\n        finally: interrupt(); time.sleep(60)"
    assert ended(tmp_path, body) == (EXIT_INTERRUPTED, "", f"rft: {MESSAGE}\n")


def test_other_errors_in_callbacks_are_still_printed(tmp_path):
    code, out, err = ended(tmp_path, "interrupt = lambda _: 1 / 0\n        drop()\n        sys.exit(0)")
    assert (code, out) == (0, "")
    assert "ZeroDivisionError" in err


def test_handlers_are_put_back():
    from flows.interrupts import interruptible

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def has_begun(process):
    """Whether the command has run its first line: it then handles SIGTERM, which Python alone does not."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    handled = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(handled >> (signal.SIGTERM - 1) & 1)


def marked(mark):
    """Every process that inherited the mark, however it is related."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_run_can_be_interrupted_from_its_first_line_on(tmp_path):
    recipe = write_recipe(tmp_path, make_tiny_model(tmp_path / "model"), steps=2, evaluation__every=0)
    mark = uuid.uuid4().hex
    for moment in MOMENTS:
        process = rft("run", recipe, "--name", "x", root=tmp_path, environment={MARK: mark})
        while not has_begun(process):
            assert process.poll() is None, process.communicate()[0].decode()
            time.sleep(0.001)
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        output = output_of(process, 30)
        assert process.returncode in (EXIT_INTERRUPTED, 0), (moment, output)
        if process.returncode:
            assert output.endswith(f"rft: {MESSAGE}\n"), moment
            assert "Traceback" not in output, moment
        _, alive = psutil.wait_procs(marked(mark), timeout=5)
        assert not alive, moment
    finish(rft("run", recipe, "--name", "x", root=tmp_path))
