"""Cron expressions: which moments they mean, across changes of the clock too, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import InvalidTemplate
from gpuflow.schedules.cron import parse_cron


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def told(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M")


def following(cron: str, after: str, count: int, zone: str = "UTC") -> list[str]:
    parsed, at, found = parse_cron(cron, zone), moment(after), []
    for _ in range(count):
        at = parsed.next_after(at)
        found.append(told(at))
    return found


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("0 3 * * *", "2026-03-01T02:59", ["2026-03-01T03:00", "2026-03-02T03:00"]),
        ("0 3 * * *", "2026-03-01T03:00", ["2026-03-02T03:00"]),
        ("*/20 * * * *", "2026-03-01T23:30", ["2026-03-01T23:40", "2026-03-02T00:00", "2026-03-02T00:20"]),
        ("10-30/10 8,20 * * *", "2026-03-01T08:20", ["2026-03-01T08:30", "2026-03-01T20:10"]),
        ("50/5 0 * * *", "2026-03-01T00:00", ["2026-03-01T00:50", "2026-03-01T00:55", "2026-03-02T00:50"]),
        ("0 0 29 2 *", "2026-03-01T00:00", ["2028-02-29T00:00", "2032-02-29T00:00"]),
        ("0 0 31 * *", "2026-04-01T00:00", ["2026-05-31T00:00", "2026-07-31T00:00"]),
        ("0 9 * jan-feb mon-fri", "2026-02-27T10:00", ["2027-01-01T09:00", "2027-01-04T09:00"]),
        ("0 0 * * 7", "2026-03-02T00:00", ["2026-03-08T00:00", "2026-03-15T00:00"]),
        ("0 0 13 * fri", "2026-03-01T00:00", ["2026-03-06T00:00", "2026-03-13T00:00", "2026-03-20T00:00"]),
        ("0 0 */2 * mon", "2026-03-01T00:00", ["2026-03-09T00:00", "2026-03-23T00:00"]),
        ("@daily", "2026-12-31T00:00", ["2027-01-01T00:00"]),
        ("@Weekly", "2026-03-02T00:00", ["2026-03-08T00:00"]),
    ],
)
def test_the_moments_after(cron: str, after: str, expected: list[str]) -> None:
    assert following(cron, after, len(expected)) == expected


def test_a_zone_and_its_changes_of_the_clock() -> None:
    paris = "Europe/Paris"
    assert following("0 3 * * *", "2026-01-01T00:00", 1, paris) == ["2026-01-01T02:00"]
    # Spring: 02:30 does not come on 29 March; it is half an hour after the change
    spring = following("30 2 * * *", "2026-03-28T02:00", 2, paris)
    assert spring == ["2026-03-29T01:30", "2026-03-30T00:30"]
    # Autumn: 02:30 comes twice on 25 October and counts once
    assert following("30 2 * * *", "2026-10-24T12:00", 2, paris) == ["2026-10-25T00:30", "2026-10-26T01:30"]
    # An expression of every hour means a span
    autumn = following("30 * * * *", "2026-10-24T23:00", 4, paris)
    assert autumn == ["2026-10-24T23:30", "2026-10-25T00:30", "2026-10-25T01:30", "2026-10-25T02:30"]
    assert following("30 * * * *", "2026-03-29T00:00", 3, paris) == [
        "2026-03-29T00:30",
        "2026-03-29T01:30",
        "2026-03-29T02:30",
    ]


CRONS = ("0 3 * * *", "*/7 * * * *", "15 2 * * sun", "0 0 1 */3 *", "30 1-3 * * *")


@given(st.sampled_from(CRONS), st.sampled_from(("UTC", "Europe/Paris", "Asia/Kathmandu")), st.integers(0, 2**31))
def test_the_last_and_the_next_enclose_every_moment(cron: str, zone: str, at: int) -> None:
    parsed = parse_cron(cron, zone)
    last, after = parsed.last_until(at), parsed.next_after(at)
    assert after > at
    assert last is None or (last <= at and parsed.next_after(last) == after)


def test_an_expression_is_read_once() -> None:
    assert parse_cron("*/3 * * * *", "Europe/Paris") is parse_cron("*/3 * * * *", "Europe/Paris")
    assert parse_cron("*/3 * * * *", "Europe/Paris") != parse_cron("*/3 * * * *", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("cron", "zone", "cause"),
    [
        ("0 3 * *", "UTC", "has 4 fields"),
        ("60 * * * *", "UTC", "'60' is no minute; give 0 to 59"),
        ("* 24 * * *", "UTC", "'24' is no hour"),
        ("* * 0 * *", "UTC", "'0' is no day"),
        ("* * * 13 *", "UTC", "'13' is no month"),
        ("* * * * 8", "UTC", "'8' is no weekday"),
        ("5-1 * * * *", "UTC", "'5-1' is no minute"),
        ("*/0 * * * *", "UTC", "is no minute"),
        ("*/ * * * *", "UTC", "is no minute"),
        ("1,,2 * * * *", "UTC", "'' is no minute"),
        ("-1 * * * *", "UTC", "is no minute"),
        ("٣ * * * *", "UTC", "is no minute"),
        ("0 0 30 2 *", "UTC", "never comes"),
        ("@often", "UTC", "has 1 fields"),
        ("* * * * *", "Mars/Olympus", "time zone 'Mars/Olympus' is not known"),
        ("* * * * *", "../../etc/passwd", "is not known"),
        ("* * * * *", "", "is not known"),
    ],
)
def test_mistakes_are_named(cron: str, zone: str, cause: str) -> None:
    with pytest.raises(InvalidTemplate, match=cause):
        parse_cron(cron, zone)
