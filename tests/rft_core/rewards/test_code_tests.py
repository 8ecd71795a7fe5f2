"""Forms of tests, and the names that they use of a program."""

from __future__ import annotations

import json

import pytest

from rft_core.rewards.code_tests import NoTests, read_tests

MODULES = ("solution", "main")


def read(raw, **metadata):
    return read_tests(None, {"tests": raw, **metadata}, "tests", MODULES)


def test_asserts_use_what_they_do_not_define():
    tests = read(
        "import math\ntable = [(1, 2)]\nfor a, want in table:\n    got = f(a)\n    assert math.isclose(got, want)\n"
    )
    assert (tests.kind, tests.num_tests, tests.names) == ("assert", 1, ("f",))


def test_a_builtin_is_under_test_only_where_nothing_else_is():
    assert read("assert sum(10, 15) == 6").names == ("sum",)
    assert read("assert abs(half(5) - 2.5) < 1e-9").names == ("half",)


def test_names_by_import():
    code = "import solution as s\nfrom main import g\ndef test_f():\n    assert s.f(1) == g(1)\n"
    tests = read(code)
    assert (tests.kind, tests.num_tests, tests.names) == ("pytest", 1, ("f", "g"))


def test_skipped_tests_are_none():
    code = "import pytest\n@pytest.mark.skip(reason='x')\ndef test_a(): assert f()\ndef test_b(): assert f()\n"
    assert read(code).num_tests == 1
    methods = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(f())\n"
    assert (read(methods).kind, read(methods).num_tests) == ("pytest", 1)


def test_tests_that_run_themselves_are_a_script():
    assert read("def test_a():\n    assert f()\ntest_a()\n").kind == "assert"


def test_setup_code_goes_first():
    assert read(["assert f(Pair(1))"], test_setup_code="class Pair:\n    pass").names == ("f",)


def test_check_is_called_with_the_entry_point():
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert read(check, entry_point="f").code.endswith("check(f)\n")
    assert read({"test": check, "entry_point": "f"}).names == ("f",)
    assert read(f"{check}check(g)\n", entry_point="f").names == ("g",)


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "stdio", "cases": [{"stdin": "1\n2", "expected_stdout": "3"}]},
        {"inputs": ["1\n2"], "outputs": ["3"]},
        {"inputs": [["1", "2"]], "outputs": [["3"]]},
        [{"input": "1\n2", "output": "3", "testtype": "stdin"}],
        json.dumps({"inputs": ["1\n2"], "outputs": ["3"]}),
        json.dumps(json.dumps({"inputs": ["1\n2"], "outputs": ["3"]})),
    ],
)
def test_forms_of_cases(raw):
    tests = read(raw)
    assert (tests.kind, tests.cases) == ("stdio", (("1\n2", "3"),))


@pytest.mark.parametrize(
    "raw",
    [
        {"inputs": [[[1, 2], 3]], "outputs": [4], "fn_name": "f"},
        [{"input": "[1, 2]\n3", "output": "4", "testtype": "functional", "func_name": "f"}],
    ],
)
def test_forms_of_calls(raw):
    tests = read(raw, func_name="f")
    assert (tests.kind, tests.cases, tests.function) == ("calls", (([[1, 2], 3], 4),), "f")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "metadata has no tests, and there is no answer"),
        ([], "the list of tests is empty"),
        ("", "no assert"),
        ("x = 1", "no assert"),
        ("gAAAA-not-base64", "tests that are a text must be Python"),
        ("assert f(1", "tests that are a text must be Python"),
        ("assert f()\0", "tests that are a text must be Python"),
        (7, "tests must be a text, a list or a mapping, got int"),
        ([1], "a list of tests must hold texts, or mappings"),
        ({}, "tests must have one of the keys kind, inputs"),
        ({"kind": "assert", "code": "\n"}, "no assert"),
        ({"kind": "stdio", "cases": []}, "the list of tests is empty"),
        ({"kind": "stdio"}, "tests of kind stdio need cases"),
        ({"kind": "shell", "code": "x"}, "got kind 'shell'"),
        ({"inputs": ["1"], "outputs": []}, "must be lists of one length"),
        ({"inputs": [], "outputs": []}, "there is no case"),
        ({"inputs": [1], "outputs": ["1"]}, "an input must be a text or a list of lines, got int"),
        ({"inputs": ["{1}"], "outputs": ["1"], "fn_name": "f"}, "must be JSON, one a line"),
        ({"inputs": [5], "outputs": [1], "fn_name": "f"}, "the arguments of a call must be a list, got int"),
        ("def check(candidate):\n    assert candidate()\n", "there is no entry_point"),
        ("import pytest\npytestmark = pytest.mark.skip\ndef test_a(): assert f()\n", "no test function that is not"),
    ],
)
def test_no_tests_has_a_reason(raw, message):
    with pytest.raises(NoTests, match=message):
        read(raw)
