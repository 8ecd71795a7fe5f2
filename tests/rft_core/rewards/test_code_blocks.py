"""Which part of a completion is the program."""

from __future__ import annotations

import pytest

from rft_core.rewards.code_blocks import NoProgram, find_program

ADD = "def add(a, b):\n    return a + b"
USE = "print(add(1, 2))"


def fenced(code: str, info: str = "python") -> str:
    return f"```{info}\n{code}\n```\n"


def found(completion: str, *, wanted=("add",), finish="stop", language="python", raw=False):
    return find_program(completion, finish, language, wanted, raw)


@pytest.mark.parametrize(
    "completion",
    [
        fenced(ADD),
        f"Sure.\n\n{fenced(ADD)}\nRun it:\n{fenced('python add.py', 'bash')}",
        f"{fenced(USE)}Full:\n{fenced(ADD)}",  # rw-15: a usage example before
        f"{fenced(ADD)}Use:\n{fenced(USE)}",  # and after
        f"{fenced('def add(a, b): pass')}Better:\n{fenced(ADD)}",  # of two solutions the last
        f"{fenced(ADD, '')}",  # no language
        f"{fenced('3', '')}{fenced(ADD)}",  # an untagged sample before a tagged program
        f"{fenced(ADD)}Output:\n{fenced('3', '')}",
        f"{fenced(ADD, 'Python3')}",
        f"{fenced(ADD, '{.python}')}",
        f"{fenced(ADD, 'py title=add.py')}",
        f"~~~python\n{ADD}\n~~~",
        f"````python\n{ADD}\n````",
        "1. Step\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",  # in a list
        f"```python\n{ADD}```",  # closed on the last line
        f"```python\n{ADD}\n```python\n{USE}\n```",  # never closed before the next opens
        fenced(ADD).replace("\n", "\r\n"),
        f"<think>\n{fenced('def add(a, b): return 0')}</think>\n{fenced(ADD)}",
        f"<think>{fenced('def add(a, b): return 0')}</think>{fenced(ADD, 'py')}\n{fenced('x', 'text')}",
        f"{ADD}\n```",  # rw-15: a stray closing fence; the prompt may have opened it
    ],
)
def test_the_program_is_found(completion):
    assert found(completion) == ADD


def test_without_names_the_last_block_counts():
    assert found(fenced("a = 1") + fenced("b = 2"), wanted=()) == "b = 2"


def test_a_block_that_does_not_parse_still_defines():
    broken = "def add(a, b):\n    return (a + b"
    assert found(fenced(broken) + fenced(USE)) == broken


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("I cannot write that.", "no code block"),
        ("", "no code block"),
        (ADD, "no code block"),
        ("```", "no code block: it is empty"),
        ("```python\n```", "no code block: it is empty"),
        ("```python\n\n```\n", "no code block: it is empty"),
        (fenced("echo", "bash"), "no code block of python, only of bash"),
    ],
)
def test_no_program_has_a_reason(completion, reason):
    assert found(completion) == NoProgram(reason)


def test_raw_code_by_setting():
    assert found(ADD, raw=True) == ADD
    assert found("", raw=True) == NoProgram("no code block")


@pytest.mark.parametrize(("finish", "is_program"), [("stop", True), ("length", False), ("given", False)])
def test_an_unclosed_block_counts_only_where_the_completion_ended_by_itself(finish, is_program):
    program = found(f"```python\n{ADD}", finish=finish)
    assert program == (ADD if is_program else NoProgram(f"the code block is not closed (finish_reason {finish})"))


def test_another_language():
    completion = fenced("print(1)") + fenced("console.log(1)", "js")
    assert found(completion, language="javascript", wanted=()) == "console.log(1)"
    assert found(fenced("x", "zig"), language="zig", wanted=()) == "x"
