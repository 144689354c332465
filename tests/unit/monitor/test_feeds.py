"""Feeds: only what has changed is sent, and many browsers cause one reading."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import pytest

from gpuflow.errors import UnknownTask
from gpuflow.monitor.feeds import MOST_FEEDS, MOST_VERSIONS, Body, Feed, Feeds, Rows


class Source:
    """Rows that a test changes; counts how often they are read."""

    def __init__(self, **rows: str) -> None:
        self.rows = rows
        self.reads = 0
        self.error: Exception | None = None

    def __call__(self) -> Rows:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return {"table": list(self.rows.items())}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def changes(feed: Feed, since: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(feed.changes(since).plain)
    return found


def test_a_browser_is_sent_the_rows_that_changed_since_its_version() -> None:
    source = Source(a="1", b="1")
    feed = Feed(source)
    feed.update()
    first = feed.label
    assert changes(feed, "")["containers"] == {"table": {"rows": {"a": "1", "b": "1"}, "order": ["a", "b"]}}
    source.rows = {"a": "1", "b": "2"}
    feed.update()
    second = feed.label
    assert changes(feed, first)["containers"] == {"table": {"rows": {"b": "2"}}}
    source.rows = {"c": "1", "b": "2"}
    feed.update()
    assert changes(feed, second)["containers"] == {"table": {"rows": {"c": "1"}, "order": ["c", "b"]}}
    assert changes(feed, first)["containers"] == {"table": {"rows": {"b": "2", "c": "1"}, "order": ["c", "b"]}}
    assert changes(feed, feed.label)["containers"] == {}


@pytest.mark.parametrize("since", ["", "junk", "0.", ".1", "another.1", "{epoch}.99", "{epoch}.x", "{epoch}.-1"])
def test_an_unknown_version_is_sent_everything(since: str) -> None:
    feed = Feed(Source(a="1"))
    feed.update()
    epoch = feed.label.split(".")[0]
    assert changes(feed, since.format(epoch=epoch))["containers"]["table"] == {"rows": {"a": "1"}, "order": ["a"]}


def test_a_browser_of_an_old_version_is_sent_everything_and_few_bodies_are_kept() -> None:
    source = Source(a="1", b="1")
    feed = Feed(source)
    feed.update()
    epoch = feed.label.split(".")[0]
    for number in range(3 * MOST_VERSIONS):
        source.rows = {"a": "1", "b": str(number)}
        feed.update()
    assert changes(feed, f"{epoch}.1")["containers"]["table"]["order"] == ["a", "b"]
    assert changes(feed, f"{epoch}.{feed.version - 1}")["containers"] == {"table": {"rows": {"b": source.rows["b"]}}}
    for base in range(feed.version + 1):
        feed.changes(f"{epoch}.{base}")
    assert len(feed._bodies) <= MOST_VERSIONS + 2


def test_a_row_that_leaves_and_comes_back_is_sent_again() -> None:
    source = Source(a="1", b="1")
    feed = Feed(source)
    feed.update()
    source.rows = {"b": "1"}
    feed.update()
    without = feed.label
    source.rows = {"a": "1", "b": "1"}
    feed.update()
    assert changes(feed, without)["containers"]["table"] == {"rows": {"a": "1"}, "order": ["a", "b"]}


def test_long_bodies_are_compressed_once() -> None:
    body = Body.of("x" * 5000)
    assert body.compressed is not None
    assert gzip.decompress(body.compressed) == body.plain
    assert Body.of("short").compressed is None


async def test_many_browsers_cause_one_reading() -> None:
    source, clock = Source(a="1"), Clock()
    feeds = Feeds(clock=clock)
    await asyncio.gather(*(feeds.fresh("fleet", source) for _ in range(20)))
    assert source.reads == 1
    await feeds.fresh("fleet", source)
    assert source.reads == 1, "a fresh feed was read again"
    clock.now += 60
    await asyncio.gather(*(feeds.fresh("fleet", source) for _ in range(20)))
    assert source.reads == 2
    feeds.expire()
    await feeds.fresh("fleet", source)
    assert source.reads == 3


async def test_reading_does_not_hold_the_loop() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> Rows:
        begun.set()
        go.wait(30)
        return {}

    feeds = Feeds()
    asked = asyncio.ensure_future(feeds.fresh("slow", slow))
    while not begun.is_set():
        await asyncio.sleep(0)
    assert not asked.done()
    go.set()
    await asked


async def test_what_an_action_changes_during_a_reading_is_read_again() -> None:
    begun, go = threading.Event(), threading.Event()
    rows = {"a": "before"}
    reads: list[dict[str, str]] = []

    def slow() -> Rows:
        found = dict(rows)
        reads.append(found)
        begun.set()
        go.wait(30)
        return {"table": list(found.items())}

    feeds = Feeds(clock=Clock())
    asked = asyncio.ensure_future(feeds.fresh("fleet", slow))
    while not begun.is_set():
        await asyncio.sleep(0)
    rows["a"] = "after"
    feeds.expire()
    meanwhile = asyncio.ensure_future(feeds.fresh("fleet", slow))
    await asyncio.sleep(0)
    go.set()
    await asked

    assert (await meanwhile).html("table") == "after"
    assert (await feeds.fresh("fleet", slow)).html("table") == "after"
    assert len(reads) == 2


async def test_an_error_reaches_everybody_and_is_not_for_ever() -> None:
    source, clock = Source(a="1"), Clock()
    feeds = Feeds(clock=clock)
    await feeds.fresh("fleet", source)
    clock.now += 60
    source.error = ConnectionError("away")
    found = await asyncio.gather(*(feeds.fresh("fleet", source) for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [ConnectionError] * 5
    assert source.reads == 2
    source.error = None
    clock.now += 60
    assert (await feeds.fresh("fleet", source)).html("table") == "1"


async def test_what_is_not_there_takes_no_place() -> None:
    source, feeds = Source(), Feeds()
    source.error = UnknownTask("no such pipeline")
    with pytest.raises(UnknownTask):
        await feeds.fresh("pipelines/x", source)
    assert not feeds._kept
    for number in range(MOST_FEEDS + 10):
        await feeds.fresh(f"pipelines/{number}", Source())
    assert len(feeds._kept) == MOST_FEEDS
