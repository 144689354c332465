"""A reader of several event streams goes on after any event: nothing is lost, and nothing is told twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpuflow.gateway import event_routes, positions
from gpuflow.gateway.positions import Positions
from gpuflow.gateway.streams import Feed
from gpuflow.ledger.eventlog import LoggedEvent, as_event, order_of

Entries = list[tuple[str, dict[str, Any]]]


class StoredStreams:
    """What a reader asks of a hub; every page is read from these streams, and is short."""

    page = 3
    readers, most_readers = 0, 10

    def __init__(self, streams: dict[str, Entries]) -> None:
        self.streams = streams
        self.stopping = asyncio.Event()

    async def open(self, source: str, reader: asyncio.Event) -> Feed:
        return Feed(source=source, start="99999999999999-0", last="99999999999999-0")

    def close(self, feed: Feed, reader: asyncio.Event) -> None:
        pass

    async def read(self, source: str, after: str) -> list[LoggedEvent]:
        stored = [(id, data) for id, data in self.streams.get(source, []) if order_of(id) > order_of(after)]
        return [as_event(source, id, {"event": json.dumps(data)}) for id, data in stored[: self.page]]


class AtOnce:
    """The calls to the fleet of a gateway."""

    async def run(self, look: Any) -> Any:
        return look(None)


def log(source: str, *ids: str, **more: Any) -> Entries:
    return [(id, {"event": "log", "message": f"{source} {id}", **more}) for id in ids]


def told(streams: dict[str, Entries], tasks: list[str], last_id: str | None = None) -> list[dict[str, str]]:
    async def read() -> str:
        def look(_: Any) -> tuple[str, bool, list[str]]:
            return "SUCCEEDED", True, tasks

        hub: Any = StoredStreams(streams)
        calls: Any = AtOnce()
        return "".join(
            [one.decode() async for one in event_routes._events(calls, hub, "p", look, Positions("p", last_id))]
        )

    return list(_blocks(asyncio.run(read())))


def _blocks(text: str) -> Iterator[dict[str, str]]:
    for block in text.strip().split("\n\n"):
        yield dict(line.split(": ", 1) for line in block.splitlines())


def names(of: list[dict[str, str]]) -> list[str]:
    return sorted(one["data"] for one in of if one["event"] != "end")


PIPELINE: dict[str, Entries] = {
    "p": log("p", "5-0", "9-1", "30-0"),
    "a": log("a", *[f"{number}-0" for number in range(1, 30)]),
    "b": log("b", "5-0", "9-0", "9-1", "20-0", "28-0"),
    "c": log("c", "29-0"),
}
MERGED: dict[str, Entries] = {
    "p": log("p", "1-0"),
    "a": [("7-0", {"event": "state", "state": "MERGED", "run": "r", "call": "x"}), *log("a", "9-0", "12-0")],
    "b": [("8-0", {"event": "state", "state": "MERGED", "run": "r", "call": "x"}), *log("b", "9-0")],
    "r": log("r", "2-0", "3-0", "8-0", "9-0", "9-1", "12-0", "13-0"),
}


@pytest.mark.parametrize("streams", [PIPELINE, MERGED], ids=["pipeline", "merged"])
def test_a_cut_after_any_event_loses_none_and_repeats_none(streams: dict[str, Entries]) -> None:
    tasks = [name for name in streams if name not in "pr"]
    whole = told(streams, tasks)
    assert len(names(whole)) >= 14

    for number in range(len(whole) - 1):
        rest = told(streams, tasks, whole[number]["id"])
        assert names(whole[: number + 1] + rest) == names(whole), whole[number]["id"]
        for again in range(len(rest) - 1):  # and once more, with an id of the second part
            third = told(streams, tasks, rest[again]["id"])
            assert names(whole[: number + 1] + rest[: again + 1] + third) == names(whole)


def test_what_comes_late_into_a_stream_that_was_not_known_is_told() -> None:
    before = {name: PIPELINE[name] for name in ("p", "a")}
    whole = told(before, ["a"])
    rest = told(PIPELINE, ["a", "b", "c"], whole[-2]["id"])
    assert names(whole + rest) == names(told(PIPELINE, ["a", "b", "c"]))


def test_many_streams_lose_nothing_and_the_end_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "MOST", 4)
    monkeypatch.setattr(event_routes, "MOST", 4)
    streams = {f"t{number}": log(f"t{number}", "1-0", f"{number + 2}-0") for number in range(20)}
    whole = told(streams, list(streams))

    held = [number for number, one in enumerate(whole[:-1]) if "id" in one]
    for number in held:
        rest = told(streams, list(streams), whole[number]["id"])
        assert set(names(whole[: number + 1] + rest)) == set(names(whole))
    assert whole[-1]["id"].endswith(".*")
    assert told(streams, list(streams), whole[-1]["id"])[:-1] == []
    streams["t3"] += log("t3", "50-0", "51-0")
    more = told(streams, list(streams), whole[-1]["id"])
    assert [json.loads(one["data"])["message"] for one in more[:-1]] == ["t3 50-0", "t3 51-0"]
    assert names(told(streams, list(streams), more[-2]["id"])) == []


def test_ids_are_bounded() -> None:
    place = Positions("p")
    for number in range(5000):
        place.tell(LoggedEvent(id=f"{1_700_000_000_000 + number}-{2**40}", source=f"t{number}", name="log", data={}))
    assert len(place.id_of("p")) < 6000
    assert Positions("p", place.id_of("p")).was_told(
        LoggedEvent(id="1700000004999-5", source="t4999", name="log", data={})
    )


def test_a_single_stream_has_the_ids_of_its_entries() -> None:
    assert [one.get("id") for one in told({"p": log("p", "1-0", "2-0")}, [])] == ["1-0", "2-0", None]


@pytest.mark.parametrize("text", ["", "$", "1-0.", "1-0.A", "1-0.AAAA", "1-0.**", "x-1", "1-0." + "A" * 9000, "1-0\n"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no id"):
        Positions("p", text)
