"""Cron expressions: five fields in a time zone, and which moments they mean. Pure: time is a parameter.

    minute 0-59   hour 0-23   day of the month 1-31   month 1-12 or jan-dec   day of the week 0-7 or sun-sat

A field is `*`, a number, a range `1-5`, steps `*/15` or `10-50/20`, or several of these by commas. As in every cron, a
day is meant if either its day of the month or its day of the week is named, where both are restricted.

Where a clock is put forward, a time that is left out comes as much later. Where it is put back, an hour that comes
twice counts once, but twice for an expression of every hour, which means a span and no time of day.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from gpuflow.errors import InvalidTemplate

_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MACROS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_PART: Final = re.compile(r"(?P<star>\*)|(?P<first>\w+)(?:-(?P<last>\w+))?")
#: The 29th of February comes after eight years at the latest.
_MOST_DAYS: Final = 8 * 366 + 2
_MOST_LENGTH: Final = 500
#: So many expressions, and days of them, are kept read.
_KEPT_CRONS: Final = 2048
_KEPT_DAYS: Final = 128


@dataclass(frozen=True, kw_only=True)
class Cron:
    """One expression; moments are Unix seconds."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool
    zone: ZoneInfo

    def next_after(self, moment: float) -> float:
        """Return the first moment after this one."""
        day = datetime.fromtimestamp(moment, self.zone).date() - timedelta(days=1)
        for number in range(_MOST_DAYS):
            for found in self._on(day + timedelta(days=number)):
                if found > moment:
                    return found
        raise InvalidTemplate("the schedule never comes")

    def last_until(self, moment: float) -> float | None:
        """Return the last moment that is not after this one; None: there is none in the last years."""
        day = datetime.fromtimestamp(moment, self.zone).date() + timedelta(days=1)
        for number in range(_MOST_DAYS):
            for found in reversed(self._on(day - timedelta(days=number))):
                if found <= moment:
                    return found
        return None

    def _on(self, day: date) -> tuple[float, ...]:
        return _moments(self, day) if self._means(day) else ()

    def _means(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_day and by_weekday) if self.any_day or self.any_weekday else (by_day or by_weekday)

    def moments_of(self, day: date) -> Iterator[float]:
        """Yield the moments of a day on which it comes, in no order, and some twice."""
        folds = (0, 1) if len(self.hours) == 24 else (0,)
        for hour in self.hours:
            for minute in self.minutes:
                for fold in folds:
                    local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=self.zone, fold=fold)
                    at = local.timestamp()
                    # Of a time that is left out, fold 1 means an hour before the change: it is no such time.
                    if not fold or datetime.fromtimestamp(at, self.zone).hour == hour:
                        yield at


@lru_cache(maxsize=_KEPT_DAYS)
def _moments(cron: Cron, day: date) -> tuple[float, ...]:
    """Return the moments of a day on which it comes, in order. Those of every minute take milliseconds."""
    return tuple(sorted(set(cron.moments_of(day))))


@lru_cache(maxsize=_KEPT_CRONS)
def parse_cron(text: str, zone_name: str = "UTC") -> Cron:
    """Read an expression. Raises InvalidTemplate naming the field, the cause and the way out."""
    fields = _MACROS.get(text.strip().lower(), text).lower().split()
    if len(fields) != 5 or len(text) > _MOST_LENGTH:
        raise InvalidTemplate(
            f"cron {text[:60]!r} has {len(fields)} fields; give minute, hour, day, month, weekday: '0 3 * * *'"
        )
    minute, hour, day, month, weekday = fields
    weekdays = _field("weekday", weekday, 0, 7, dict(zip(_DAYS, range(7), strict=True)))
    cron = Cron(
        minutes=_field("minute", minute, 0, 59),
        hours=_field("hour", hour, 0, 23),
        days=_field("day", day, 1, 31),
        months=_field("month", month, 1, 12, dict(zip(_MONTHS, range(1, 13), strict=True))),
        weekdays=frozenset(number % 7 for number in weekdays),
        any_day=day.startswith("*"),
        any_weekday=weekday.startswith("*"),
        zone=_zone(zone_name),
    )
    try:
        cron.next_after(datetime(2000, 1, 1, tzinfo=UTC).timestamp())
    except InvalidTemplate:
        raise InvalidTemplate(f"cron {text[:60]!r} never comes: no such month has such a day") from None
    return cron


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InvalidTemplate(
            f"time zone {name[:60]!r} is not known; give one such as Europe/Paris (pip install tzdata where the "
            "system has none)"
        ) from None


def _field(name: str, text: str, least: int, most: int, names: dict[str, int] | None = None) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, _, step_text = part.partition("/")
        match = _PART.fullmatch(span)
        step = int(step_text) if step_text.isdecimal() else 0 if "/" in part else 1
        if match is None or step < 1:
            raise _wrong(name, part, least, most)
        if match["star"]:
            first, last = least, most
        else:
            first = _number(name, match["first"], least, most, names)
            # A single number with steps goes on to the end.
            last = _number(name, match["last"], least, most, names) if match["last"] else most if "/" in part else first
        if last < first:
            raise _wrong(name, part, least, most)
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(name: str, text: str, least: int, most: int, names: dict[str, int] | None) -> int:
    value = (names or {}).get(text)
    if value is None:
        value = int(text) if text.isdecimal() and text.isascii() and len(text) < 4 else -1
    if not least <= value <= most:
        raise _wrong(name, text, least, most)
    return value


def _wrong(name: str, part: str, least: int, most: int) -> InvalidTemplate:
    return InvalidTemplate(f"cron: {part[:40]!r} is no {name}; give {least} to {most}, a range, steps, or *")
