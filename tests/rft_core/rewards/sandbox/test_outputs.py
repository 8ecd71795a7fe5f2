"""What counts as the expected output."""

from __future__ import annotations

import pytest

from rft_core.rewards.sandbox.outputs import difference


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("6\n", "6"),
        ("6", "6\n\n"),
        ("a \r\nb\r\n", "a\nb"),
        ("  x", "  x"),
        ("0.333333", "0.333333333333"),
        ("666666.0001", "666666.0"),  # 1.5e-10 relative
        ("1e-7", "0.0"),  # 1e-7 absolute
        ("5.0", "5"),
        ("-0.0", "0.0"),
        ("1   2", "1 2"),
        ("Z\u00fc \u6771", "Z\u00fc \u6771"),
        ("1e3", "1000.0"),
        ("+1.5", "1.5"),
        ("nan", "nan"),
        ("", ""),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_equal(printed, expected):
    assert difference(printed, expected, 1e-6) is None


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", "6"),
        ("6", ""),
        ("6 7", "6\n7"),
        ("1000000008", "1000000007"),
        ("1000000007.5", "1000000007"),
        ("0.33333", "0.333333333"),  # off by 3.3e-6
        ("nan", "1.0"),
        ("inf", "1.0"),
        ("1.0", "nan"),
        ("1_000.0", "1000.0"),
        ("yes", "YES"),
        ("True", "1"),
        ("1.0", "one"),
        ("\u0661", "1"),
        ("a\n\nb", "a\nb"),
        ("9" * 4999 + "8", "9" * 5000),
    ],
)
def test_different(printed, expected):
    assert difference(printed, expected, 1e-6) is not None


def test_zero_tolerance_is_exact():
    assert difference("0.30000000000000004", "0.3", 0.0) is not None
    assert difference("0.30", "0.3", 0.0) is None
