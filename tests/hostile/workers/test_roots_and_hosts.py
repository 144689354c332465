"""Templates that name files and addresses of the worker: refused by a real one, which goes on with its other work."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit
from gpuflow.errors import TaskFailed
from tests.support.fleet import TestFleet
from tests.support.hostile_peer import HostilePeer
from tests.support.waiting import eventually, patient

#: A worker whose operator has listed nothing, as in a fleet.
CLOSED = {"GPUFLOW_READ_ROOTS": "", "GPUFLOW_WRITE_ROOTS": "", "GPUFLOW_ALLOW_HOSTS": "", "SOME_PATH": "/etc/passwd"}


@pytest.fixture
def peer() -> Iterator[HostilePeer]:
    with HostilePeer() as made:
        yield made


def failing(fleet: TestFleet, setting: str, owner: str | None = None, **spec: Any) -> None:
    task = submit({"taskType": "echo", "echo": {"output": 1}, **spec}, owner=owner, app=fleet.app)
    with pytest.raises(TaskFailed, match=setting):
        task.get(timeout=patient(60))
    record = task.record()
    assert (record.error or {})["type"] == "NotAllowed"
    assert record.attempt == 1


def test_a_closed_worker(fleet: TestFleet, peer: HostilePeer, tmp_path: Path) -> None:
    fleet.start_worker("w1", env=CLOSED)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    read, write, reach = "GPUFLOW_READ_ROOTS", "GPUFLOW_WRITE_ROOTS", "GPUFLOW_ALLOW_HOSTS"

    failing(fleet, read, data={"type": "jsonl", "path": str(rows)})
    failing(fleet, read, data={"type": "jsonl", "path": "~/.ssh/id_rsa"})
    failing(fleet, read, data={"type": "jsonl", "path": "/proc/self/environ"})
    failing(fleet, read, env={"P": "/etc/passwd"}, data={"type": "jsonl", "path": "${env:P}"})
    failing(fleet, read, checkpoint={"load": {"url": rows.as_uri()}})
    failing(fleet, read, echo={"until_exists": "/etc/passwd"})
    failing(fleet, write, output={"destination": {"type": "local", "path": str(tmp_path / "out")}})
    failing(fleet, reach, data={"type": "jsonl", "url": f"{peer.url}/large"})
    failing(fleet, reach, checkpoint={"load": {"url": f"{peer.url}/large"}})
    failing(fleet, reach, env={"U": f"{peer.url}/large"}, data={"type": "jsonl", "url": "${env:U}"})
    failing(fleet, "metadata", data={"type": "jsonl", "url": "http://169.254.169.254/latest"})
    failing(fleet, reach, data={"type": "jsonl", "url": f"http://{fleet.broker.url.rpartition('@')[2]}"})
    assert peer.asked == []
    assert not (tmp_path / "out").exists()

    assert submit(fleet.echo(output="fine"), app=fleet.app).get(timeout=patient(30))["output"] == "fine"


def test_results_of_other_owners(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env=CLOSED)
    first = submit(fleet.echo(output=1), owner="ann", app=fleet.app)
    first.get(timeout=patient(30))
    path = str(fleet.results / first.id / "responses.json")

    failing(fleet, "GPUFLOW_READ_ROOTS", owner="bob", data={"type": "jsonl", "path": path})
    failing(fleet, "GPUFLOW_READ_ROOTS", owner="bob", data={"type": "jsonl", "path": str(fleet.results)})
    own = submit(fleet.echo(output=2, until_exists=path), owner="ann", app=fleet.app)
    assert own.get(timeout=patient(30))["output"] == 2


def test_uploads_are_read_by_their_name_alone(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", env=CLOSED)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    sent = submit({"taskType": "echo", "echo": {}, "data": {"type": "jsonl", "upload": str(rows)}}, app=fleet.app)
    sent.get(timeout=patient(30))
    uploads = fleet.results / "uploads"
    assert len(list(uploads.iterdir())) == 1

    for folder in (uploads, fleet.results.parent / "cache"):
        failing(fleet, "GPUFLOW_READ_ROOTS", data={"type": "jsonl", "path": str(folder)})


def test_a_notice_that_is_not_allowed_is_told_in_the_tasks_events(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env=CLOSED)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/hidden"
        handle = submit({**fleet.echo(output=1), "notify": [{"on": ["finished"], "url": url}]}, app=fleet.app)
        handle.get(timeout=patient(60))

        def told() -> list[str]:
            found = [event.data for event in fleet.app.event_log.read(handle.id)]
            return [event["message"] for event in found if "notify" in event.get("message", "")]

        eventually(lambda: bool(told()), what="the event")
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "notify[0]" in told()[0] and "GPUFLOW_ALLOW_HOSTS" in told()[0] and "hidden" not in told()[0]
