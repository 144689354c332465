"""Events over HTTP (SSE): in order, from where a reader was, to the end of the work, for many readers at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.gateway import streams
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient


@pytest.fixture(scope="module")
def front(served: TestFleet) -> Iterator[Gateway]:
    """A gateway before a fleet with one worker."""
    with Gateway(served.folder, env={"REDIS_URL": served.broker.url}) as started:
        yield started


def parsed(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append({"id": fields.get("id"), "event": fields["event"], "data": json.loads(fields["data"])})
    return found


def events(gateway: Gateway, path: str, **headers: str) -> list[dict[str, Any]]:
    """Return the events of a stream to its end."""
    answer = httpx.get(f"{gateway.url}{path}", headers={**gateway.headers, **headers}, timeout=patient(60))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed(answer.text)


def connections(fleet: TestFleet) -> int:
    return int(fleet.broker.client.info("clients")["connected_clients"])


def test_a_stream_tells_all_events_in_order_and_ends_with_the_task(front: Gateway, served: TestFleet) -> None:
    task = submit(served.echo(message="x", steps=5, sleep_seconds=0.3), app=served.app)
    told = events(front, f"/api/v1/tasks/{task.id}/events")
    stored = [(event.id, event.name) for event in served.app.event_log.read(task.id)]

    assert [(event["id"], event["event"]) for event in told[:-1]] == stored
    assert told[-1] == {"id": None, "event": "end", "data": {"source": task.id, "state": "SUCCEEDED"}}
    assert [event["data"]["current"] for event in told if event["event"] == "progress"][-1] == 5
    assert events(front, f"/api/v1/tasks/{task.id}/events") == told, "it is told again to who comes later"


def test_a_reader_goes_on_from_any_event(front: Gateway, served: TestFleet) -> None:
    task = submit(served.echo(message="x", steps=3), app=served.app)
    path = f"/api/v1/tasks/{task.id}/events"
    told = events(front, path)

    for number, event in enumerate(told[:-2]):
        assert events(front, path, **{"Last-Event-ID": event["id"]}) == told[number + 1 :]
    last = {**front.headers, "Last-Event-ID": told[-2]["id"]}
    assert httpx.get(f"{front.url}{path}", headers=last, timeout=patient(30)).status_code == 204
    for text in ("$", "1-0.", "1-0.AAAA", "1-0.**", "1-0." + "A" * 9000, "-", "1-0." + "A" * 21):
        odd = httpx.get(f"{front.url}{path}", headers={**front.headers, "Last-Event-ID": text}, timeout=patient(30))
        assert odd.status_code == 400, text


def test_a_long_history_comes_whole(front: Gateway, served: TestFleet) -> None:
    task = submit({**served.echo(message="x"), "resources": {"labels": {"no": "where"}}}, app=served.app)
    for number in range(3000):
        served.app.event_log.append(task.id, {"event": "log", "message": str(number)}, maxlen=10_000)
    told: list[str] = []
    with httpx.stream(
        "GET", f"{front.url}/api/v1/tasks/{task.id}/events", headers=front.headers, timeout=patient(60)
    ) as answer:
        cancelled = False
        for line in answer.iter_lines():
            if line.startswith("data: ") and (text := json.loads(line[6:]).get("message", "")).isdigit():
                told.append(text)
            if len(told) == 3000 and not cancelled:
                task.cancel()
                cancelled = True
    assert told[:3000] == [str(number) for number in range(3000)]


def test_a_pipeline_tells_of_all_its_tasks(front: Gateway, served: TestFleet) -> None:
    stages = [{"name": name, "spec": served.echo(message=name)} for name in ("one", "two")]
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}, app=served.app)
    told = events(front, f"/api/v1/pipelines/{run.id}/events")

    tasks = {task.id for name in ("one", "two") for task in run[name].tasks}
    ended = {event["data"]["source"] for event in told if event["data"].get("state") == "SUCCEEDED"}
    assert tasks <= ended
    assert told[-1]["data"] == {"source": run.id, "state": "SUCCEEDED"}


def test_a_reader_of_several_streams_goes_on_where_one_is_far_behind(front: Gateway, served: TestFleet) -> None:
    nowhere = {"resources": {"labels": {"no": "where"}}}
    work = {**served.echo(message="x"), **nowhere}
    nodes = [{"name": name, "spec": work} for name in ("long", "short")]
    spec = {"taskType": "echo", "graph": {"nodes": nodes}}
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "spec": spec}, app=served.app)
    eventually(lambda: all(run[name].tasks for name in ("long", "short")), what="both tasks")
    for name, count in (("long", 1500), ("short", 8)):
        for number in range(count):
            served.app.event_log.append(run[name].tasks[0].id, {"event": "log", "message": f"{number}"}, maxlen=10_000)
    run.cancel()
    path = f"/api/v1/pipelines/{run.id}/events"
    told = events(front, path)[:-1]
    assert len(told) >= 1508

    def names(of: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return sorted((one["data"]["source"], json.dumps(one["data"])) for one in of)

    for cut in [*range(1, len(told), 250), len(told) - 2]:
        rest = events(front, path, **{"Last-Event-ID": told[cut]["id"]})[:-1]
        assert names(told[: cut + 1] + rest) == names(told), cut
    last = {**front.headers, "Last-Event-ID": told[-1]["id"]}
    assert httpx.get(f"{front.url}{path}", headers=last, timeout=patient(30)).status_code == 204


def test_a_poisoned_stream_ends_for_its_readers_alone(front: Gateway, served: TestFleet, tmp_path: Path) -> None:
    nowhere = {"resources": {"labels": {"no": "where"}}}
    task = submit({**served.echo(message="x"), **nowhere}, app=served.app)
    gate = tmp_path / "gate"
    good = submit(served.echo(message="x", until_exists=str(gate)), app=served.app)
    eventually(lambda: good.state == "RUNNING", what="a running task")

    def lines(id: str) -> Any:
        url = f"{front.url}/api/v1/tasks/{id}/events"
        return httpx.stream("GET", url, headers=front.headers, timeout=patient(30))

    with lines(task.id) as poisoned, lines(good.id) as other:
        told, rest = poisoned.iter_lines(), other.iter_lines()
        assert next(told).startswith("id: ")
        assert next(rest).startswith("id: ")
        served.broker.client.xadd(served.app.keys.events(task.id), {"event": b"\xff\xfe"})
        assert any('"state": "unreadable"' in line for line in told)
        gate.touch()
        assert any('"state": "SUCCEEDED"' in line for line in rest)
    again = events(front, f"/api/v1/tasks/{task.id}/events")
    assert again[-1]["data"] == {"source": task.id, "state": "unreadable"}
    task.cancel()


def test_hundreds_of_readers_share_one_poller(front: Gateway, served: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task = submit(served.echo(message="x", until_exists=str(gate)), app=served.app)
    eventually(lambda: task.state == "RUNNING", what="a running task")
    path = f"{front.url}/api/v1/tasks/{task.id}/events"
    process, before = psutil.Process(front.process.pid), connections(served)
    threads = process.num_threads()

    async def one(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> list[dict[str, Any]]:
        text = ""
        async with client.stream("GET", path, headers=front.headers) as answer:
            assert answer.status_code == 200
            first = True
            async for piece in answer.aiter_text():
                text += piece
                if first:
                    begun.release()
                    first = False
        return parsed(text)

    async def everyone() -> list[list[dict[str, Any]]]:
        begun = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(timeout=patient(60), limits=limits) as client:
            readers = [asyncio.create_task(one(client, begun)) for _ in range(300)]
            for _ in readers:
                await asyncio.wait_for(begun.acquire(), patient(60))
            assert connections(served) - before <= 40  # those of 32 threads at most, and 8
            assert process.num_threads() - threads <= 40
            gate.touch()
            return await asyncio.gather(*readers)

    told = asyncio.run(everyone())
    assert len(told) == 300
    assert all(one == told[0] for one in told)
    assert told[0][-1]["event"] == "end"


def test_a_new_stream_does_not_wait_for_the_poll_of_others(served: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of a silent stream is under way, for longer than the reader of the new one waits."""
    monkeypatch.setattr(streams, "_POLL_MS", 9000)
    keys, broker = served.app.keys, served.broker.client
    silent, new = "of-nobody", "of-somebody"

    async def read() -> list[str]:
        hub = streams.Hub(lambda: served.broker.url, keys, most_readers=10)
        try:
            async with streams.Reader(hub, silent) as first, streams.Reader(hub, new) as second:
                waiting = asyncio.create_task(first.next(8))
                await asyncio.to_thread(eventually, lambda: polls(served), what="a poll that waits")
                asked = asyncio.create_task(second.next(8))
                while hub.streams < 2:
                    await asyncio.sleep(0)
                broker.xadd(keys.events(new), {"event": json.dumps({"event": "log", "message": "here"})})
                found = [event.data["message"] for event in await asked]
                waiting.cancel()
                return found
        finally:
            await hub.aclose()

    try:
        assert asyncio.run(read()) == ["here"]
    finally:
        broker.delete(keys.events(new))


def polls(fleet: TestFleet) -> list[Any]:
    """Return the clients that wait in XREAD."""
    return [one for one in fleet.broker.client.client_list() if one["cmd"] == "xread" and "b" in one["flags"]]


def test_a_reader_that_leaves_leaves_nothing(front: Gateway, served: TestFleet) -> None:
    task = submit({**served.echo(message="x"), "resources": {"labels": {"no": "where"}}}, app=served.app)
    process = psutil.Process(front.process.pid)
    eventually(lambda: len(process.net_connections()) < 60, what="the end of earlier readers' lines")
    before = len(process.net_connections())
    lines: list[Iterator[str]] = []
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            answer = stack.enter_context(
                httpx.stream(
                    "GET", f"{front.url}/api/v1/tasks/{task.id}/events", headers=front.headers, timeout=patient(30)
                )
            )
            lines.append(answer.iter_lines())
            assert next(lines[-1]).startswith("id: ")
        assert len(process.net_connections()) >= before + 50
        eventually(lambda: len(polls(served)) == 1, what="one poll for all of them")
    eventually(lambda: len(process.net_connections()) <= before + 10, what="the end of the readers' lines")
    eventually(lambda: not polls(served), what="the end of the polls")
    task.cancel()


def test_readers_are_limited_by_a_setting(served: TestFleet, tmp_path: Path) -> None:
    task = submit({**served.echo(message="x"), "resources": {"labels": {"no": "where"}}}, app=served.app)
    env = {"REDIS_URL": served.broker.url, "GPUFLOW_GATEWAY_MAX_STREAMS": "1"}
    with Gateway(tmp_path, env=env) as gateway:
        url = f"{gateway.url}/api/v1/tasks/{task.id}/events"
        with httpx.stream("GET", url, headers=gateway.headers, timeout=patient(30)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("id: ")
            refused = httpx.get(url, headers=gateway.headers, timeout=patient(30))
            assert refused.status_code == 429
            assert "GPUFLOW_GATEWAY_MAX_STREAMS" in refused.json()["detail"]
    task.cancel()


def test_a_gateway_that_stops_ends_its_streams_with_a_hint(served: TestFleet, tmp_path: Path) -> None:
    task = submit({**served.echo(message="x"), "resources": {"labels": {"no": "where"}}}, app=served.app)
    with Gateway(tmp_path, env={"REDIS_URL": served.broker.url, "GPUFLOW_GRACE_SEC": "60"}) as gateway:
        url = f"{gateway.url}/api/v1/tasks/{task.id}/events"
        with httpx.stream("GET", url, headers=gateway.headers, timeout=patient(30)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("id: ")
            began = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert "retry: 1000" in list(lines)
        assert gateway.process.wait(patient(20)) == 143
        assert time.monotonic() - began < 40
        assert "Traceback" not in gateway.log
    task.cancel()


def test_silence_is_filled_with_comments(front: Gateway, served: TestFleet) -> None:
    task = submit({**served.echo(message="x"), "resources": {"labels": {"no": "where"}}}, app=served.app)
    with httpx.stream(
        "GET", f"{front.url}/api/v1/tasks/{task.id}/events", headers=front.headers, timeout=patient(30)
    ) as answer:
        assert next(line for line in answer.iter_lines() if line.startswith(":"))
    task.cancel()


def test_a_broker_that_goes_ends_a_stream_that_can_be_gone_on_with(fleet: TestFleet) -> None:
    task = submit(fleet.echo(message="x"), app=fleet.app)
    with Gateway(fleet.folder, env={"REDIS_URL": fleet.broker.url}) as gateway:
        url = f"{gateway.url}/api/v1/tasks/{task.id}/events"
        with httpx.stream("GET", url, headers=gateway.headers, timeout=patient(60)) as answer:
            lines = answer.iter_lines()
            last = next(lines).removeprefix("id: ")
            fleet.broker.kill()
            assert any(line.startswith("retry: ") for line in lines)
        fleet.broker.restart()
        fleet.start_worker()
        told = events(gateway, f"/api/v1/tasks/{task.id}/events", **{"Last-Event-ID": last})
        assert told[-1]["data"]["state"] == "SUCCEEDED"
