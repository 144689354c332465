"""What the lines of a program say: events of the protocol, or progress and metrics in text. Pure.

A program that knows the protocol (docs/reference/events.md) is understood as it is. Of any other one, progress bars as
tqdm draws them and counts such as `step 30/60` become progress, and what the patterns of `command.metrics` find becomes
metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpuflow.protocol import MAX_LINE_BYTES

#: `desc: 42%|####      | 420/1000 [00:42<00:58, 10.00it/s]`; sizes may be shortened (1.2k).
_BAR: Final = re.compile(r"\d{1,3}%\|[^|]*\|\s*([\d.]+)([kMGT]?)i?B?/([\d.]+)([kMGT]?)i?B?(?:\s*\[|\s*$)")
#: `epoch 3/10`, `step: 30 of 60`, `[step 30/60]`.
_COUNT: Final = re.compile(
    r"\b(step|epoch|iteration|iter|batch|sample|item|round|file)s?\b[ :=#]*\[?(\d{1,12})\s*(?:/|of)\s*(\d{1,12})\b",
    re.IGNORECASE,
)
_UNITS: Final = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000, "T": 1_000_000_000_000}
#: Longer lines are no progress; a pattern is not tried on more of a line.
_MOST_CHARACTERS: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a program is, by what it prints. `is_bar`: it draws over the line before."""

    current: float
    total: float
    unit: str
    is_bar: bool


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream without their ends; a carriage return ends a line, too.

    An endless line is cut at the protocol's limit. Empty lines are passed over.
    """
    parts: list[bytes] = []  # of a line that has not ended: none of them is looked at twice
    size = 0
    for chunk in chunks:
        first, *more = re.split(rb"[\r\n]+", chunk)
        parts.append(first)
        size += len(first)
        if more or size > MAX_LINE_BYTES:
            yield from filter(None, (b"".join(parts), *more[:-1]))
            parts, size = more[-1:], len(more[-1]) if more else 0
    if size:
        yield b"".join(parts)


def shortened(text: str, most: int) -> str:
    """Return a text of `most` characters at most: of a longer one, its beginning and its end."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def progress_in(text: str) -> Progress | None:
    """Return the progress that a line tells of, None for none."""
    if len(text) > _MOST_CHARACTERS:
        return None
    bar = _BAR.search(text)
    if bar is not None:
        current, total = _number(bar[1], bar[2]), _number(bar[3], bar[4])
        return Progress(current=current, total=total, unit="it", is_bar=True) if 0 <= current <= total > 0 else None
    count = _COUNT.search(text)
    if count is None or not 0 < int(count[3]) >= int(count[2]):
        return None
    return Progress(current=int(count[2]), total=int(count[3]), unit=count[1].lower(), is_bar=False)


def metrics_in(text: str, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, float]:
    """Return the numbers that the patterns find in a line, in their first group. NaN and infinities are none."""
    found = {}
    for name, pattern in patterns.items():
        for match in pattern.finditer(text[:_MOST_CHARACTERS]):
            try:
                value = float(match[1])
            except (TypeError, ValueError):
                continue
            if math.isfinite(value):
                found[name] = value
    return found


def _number(digits: str, unit: str) -> float:
    try:
        return float(digits) * _UNITS[unit]
    except ValueError:
        return -1.0
