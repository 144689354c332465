"""Numbers that remember how they were written, for fields that want text: `3.10` of a variable is not 3.1.

Made by the reader of YAML, only where the number alone would read otherwise; in every other field they are numbers.
"""

from __future__ import annotations


class WrittenInt(int):
    """A whole number, and its text in the template: `1_000`, `0x10`."""

    text: str


class WrittenFloat(float):
    """A number with a fraction, and its text in the template: `3.10`, `.5`."""

    text: str


def written(value: float, text: str) -> float:
    """Return a number that remembers `text`, where `str` of it is another one."""
    if str(value) == text:
        return value
    number = WrittenInt(value) if isinstance(value, int) else WrittenFloat(value)
    number.text = text
    return number


def text_of(value: float) -> str:
    """Return a number as it was written."""
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else str(value)
