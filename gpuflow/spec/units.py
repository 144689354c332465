"""Amounts as people write them: durations and memory. Pure functions that anyone may call."""

from __future__ import annotations

import math
import re
from typing import Any, Final

_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Longer than any duration, in seconds.
_MOST_SECONDS: Final = 1e15
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)", re.I)
_DURATION: Final = re.compile(rf"\s*(?:{_PART.pattern}\s*)+", re.I)
_MEMORY: Final = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kmgtp])(i?)b?\s*", re.I)
_POWER: Final = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER: Final = re.compile(r"\s*[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,4})?\s*", re.I)


def duration_seconds(value: Any) -> float:
    """Return a duration in seconds: a number is seconds; text is as `90s`, `2h`, `1h30m`, `500ms`.

    Raises ValueError with cause and mend for anything else, a negative one included.
    """
    number = as_number(value)
    if number is not None:
        if not 0 <= number <= _MOST_SECONDS:
            raise ValueError("is not a duration; give seconds, or text such as 90s, 2h or 1h30m")
        return float(number)
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise ValueError("is not a duration; give seconds, or text such as 90s, 2h or 1h30m")
    return sum(float(amount) * _SECONDS[unit.lower()] for amount, unit in _PART.findall(value))


def memory_mib(value: Any) -> int:
    """Return memory of a machine in MiB, rounded up: `32Gi` and `32GiB` count in 1024, `40GB` and `40G` in 1000.

    A bare number is refused, for its unit would be a guess. Raises ValueError with cause and mend.
    """
    found = _MEMORY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("is not an amount of memory; give a number and a unit, such as 32Gi or 40GB")
    unit = float((1024 if found[3] else 1000) ** _POWER[found[2].lower()])
    return math.ceil(float(found[1]) * unit / 2**20)


def cpu_count(value: Any) -> float:
    """Return a number of CPUs: 8, `"8"`, 0.5 or `"500m"` (thousandths). Raises ValueError with cause and mend."""
    thousandths = isinstance(value, str) and value.strip().endswith("m")
    number = as_number(value.strip()[:-1] if thousandths else value)
    if number is None or not 0 < number <= 1_000_000:
        raise ValueError("is not a number of CPUs; give one such as 8, 0.5 or 500m")
    return number / 1000 if thousandths else float(number)


def as_number(value: Any) -> int | float | None:
    """Return a number, or text that is one (`1e-3`, which YAML 1.1 reads as text) as a number; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return None
    text = value.strip()
    return int(text) if text.lstrip("+-").isdigit() else float(text)
