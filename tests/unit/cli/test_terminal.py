"""Text that is safe to show."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.terminal import clean, duration, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Grüße 世界 🚀", "Grüße 世界 🚀"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("a\x00b\x08c\x7f", "abc"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("tab\tnewline\n", "tab\tnewline\n"),
        ("ab\u202ecd", "abcd"),
        ("lone \ud800 surrogate", "lone  surrogate"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text())
def test_clean_leaves_nothing_that_steers(text: str) -> None:
    shown = clean(text)
    assert all(char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") for char in shown)
    assert clean(shown) == shown
    shown.encode()


def test_one_line_is_cut() -> None:
    assert one_line("a\n b\t c") == "a b c"
    assert one_line("x" * 300) == "x" * 197 + "..."


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0 s"), (4.23, "4.2 s"), (65, "1m 05s"), (3599.9, "1h 00m"), (7380, "2h 03m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
