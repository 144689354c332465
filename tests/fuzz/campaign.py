"""Runs readers over many inputs and keeps count: errors by kind, the slowest input, crashes.

An input is made from the seed, the reader's name and its number alone, so each can be made again. A crash is an
exception that a reader does not declare; slow is what takes more than SLOW_SECONDS of processor time three times.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fuzz.mutation import MOST_BYTES
from tests.fuzz.reader import Reader

#: Most processor time for an input of at most MOST_BYTES.
SLOW_SECONDS = 0.1
#: An input that takes longer is measured again before it counts as the slowest.
LEAST_SECONDS = 0.005
#: Crashes and slow inputs that are kept of one reader.
MOST_KEPT = 20


@dataclass(kw_only=True)
class Finding:
    """One input that a reader did not take as it should."""

    reader: str
    number: int
    kind: str
    detail: str


@dataclass(kw_only=True)
class Figures:
    """What came of the inputs of one reader. Seconds are of processor time."""

    reader: str
    inputs: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    slowest_number: int = -1
    slowest_bytes: int = 0
    crashes: int = 0
    slow: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Add the figures of another share of the same reader."""
        self.inputs += other.inputs
        self.errors.update(other.errors)
        self.seconds += other.seconds
        if other.slowest_seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest_number = other.slowest_seconds, other.slowest_number
            self.slowest_bytes = other.slowest_bytes
        self.crashes, self.slow = self.crashes + other.crashes, self.slow + other.slow
        self.findings += other.findings


def input_of(reader: Reader, seed: str, number: int) -> bytes:
    """Return an input of a reader."""
    return reader.make(random.Random(f"{seed}/{reader.name}/{number}"))[:MOST_BYTES]


def run(reader: Reader, seed: str, numbers: Iterable[int], figures: Figures, *, times: bool = True) -> None:
    """Let a reader read inputs, and add what comes of it to its figures; `times`: look for slow ones."""
    for number in numbers:
        data = input_of(reader, seed, number)
        seconds, kind, error = _read(reader, data)
        figures.inputs += 1
        figures.seconds += seconds
        figures.errors[kind] += 1
        if error is not None and not isinstance(error, reader.declared):
            figures.crashes += 1
            _keep(figures, Finding(reader=reader.name, number=number, kind="crash", detail=_told(error)))
        if (
            seconds > max(figures.slowest_seconds, LEAST_SECONDS) or seconds > SLOW_SECONDS
        ):  # a pause is not the input's
            seconds = min(seconds, *(_read(reader, data)[0] for _ in range(2)))
        if seconds > figures.slowest_seconds:
            figures.slowest_seconds, figures.slowest_number = seconds, number
            figures.slowest_bytes = len(data)
        if times and seconds > SLOW_SECONDS:
            figures.slow += 1
            detail = f"{seconds * 1000:.0f} ms for {len(data)} bytes"
            _keep(figures, Finding(reader=reader.name, number=number, kind="slow", detail=detail))


def _read(reader: Reader, data: bytes) -> tuple[float, str, Exception | None]:
    """Return the seconds of processor time, what came of an input by name, and what was raised."""
    error, kind = None, "read"
    before = time.process_time()
    try:
        kind = reader.read(data) or kind
    except Exception as raised:
        error, kind = raised, type(raised).__name__
    return time.process_time() - before, kind, error


def _keep(figures: Figures, finding: Finding) -> None:
    if sum(one.kind == finding.kind for one in figures.findings) < MOST_KEPT:
        figures.findings.append(finding)


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-6))[-2000:]
