"""What a child says is hostile: it fills neither the broker nor the log, and the worker goes on with its other work."""

from __future__ import annotations

import sys
from typing import Any

from gpuflow.client import submit
from gpuflow.ledger.ledger import Holder, Ledger
from tests.support.fleet import TestFleet
from tests.support.waiting import patient

#: Bytes of events that a task keeps here.
MOST_BYTES = 1 << 20
ENV = {"GPUFLOW_EVENTS_MAX_BYTES": str(MOST_BYTES)}
#: Prints 15 events of a megabyte, then 2,000 small ones, one that is too large, and a last one.
FLOOD = """
import json
for n in range(15):
    print(json.dumps({"event": "note", "text": "x" * 1_000_000}), flush=True)
for n in range(2_000):
    print(json.dumps({"event": "note", "n": n}))
print(json.dumps({"event": "progress", "current": 1, "metrics": {"m" * 2_000_000: 1}}), flush=True)
"""


def events_of(fleet: TestFleet, task_id: str) -> list[Any]:
    return fleet.broker.client.xrange(fleet.app.keys.events(task_id))


def weight(events: list[Any]) -> int:
    return sum(len(text) for _, fields in events for text in fields.values())


def test_a_flood_of_events(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "2", env=ENV)
    spec = {"taskType": "command", "command": {"command": [sys.executable, "-c", FLOOD]}}

    task = submit(spec, app=fleet.app)
    assert task.get(timeout=patient(120))["exit_code"] == 0

    events = events_of(fleet, task.id)
    assert weight(events) < MOST_BYTES + (64 << 10)
    assert not task.record().progress
    assert worker.log().count("events_dropped") == 1
    assert worker.log().count("events_were_dropped") == 1
    assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2


def test_the_stream_of_a_task_is_trimmed_by_bytes(fleet: TestFleet) -> None:
    ledger: Ledger = fleet.app.ledger
    ledger.events_max_bytes = 100_000
    fleet.broker.client.hset(fleet.app.keys.task("t1"), mapping={"state": "RUNNING", "attempt": 1, "owner_token": "o"})
    holder = Holder(attempt=1, token="o")
    for number in range(50):
        assert ledger.report("t1", holder, [f"{number:04d}" + "x" * 9_996]) == "ok"
        assert weight(events_of(fleet, "t1")) <= 101_000

    assert events_of(fleet, "t1")[-1][1]["event"].startswith("0049")
    assert ledger.report("t1", holder, ["y" * 500_000]) == "ok"
    assert [fields["event"][:1] for _, fields in events_of(fleet, "t1")] == ["y"]
