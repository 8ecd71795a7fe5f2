"""Runs programs that a model wrote, apart from everything, and judges them from outside.

A program runs in a bubblewrap sandbox made for it alone (launch.py, process.py, seccomp.py). Tests that call its
functions run in another sandbox and talk to it over a socket (inside/); stdin and stdout are compared out here
(outputs.py). So expected values are never where the program is, and what it says about success counts for nothing.
"""

from rft_core.rewards.sandbox.check import Problem, examine, sandbox_launcher
from rft_core.rewards.sandbox.jobs import Calls, Judgement, Script
from rft_core.rewards.sandbox.launch import Launcher
from rft_core.rewards.sandbox.limits import MIB, Limits
from rft_core.rewards.sandbox.pool import Interrupts, judge_all

__all__ = [
    "MIB",
    "Calls",
    "Interrupts",
    "Judgement",
    "Launcher",
    "Limits",
    "Problem",
    "Script",
    "examine",
    "judge_all",
    "sandbox_launcher",
]
