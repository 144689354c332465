"""A team's function whose worker is killed at each step of its way, before the broker takes it and after.

The workers of all steps die beside each other, each with a call that it alone may take; another one then goes on.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from gpuflow.broker.scripts import broker_script
from gpuflow.ledger.ledger import ledger_script
from tests.chaos.conftest import LEASE
from tests.chaos.killing import KillingProxy, load_steps
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

OPTIONS = ("--include", "team_functions")

#: What runs, the step at whose so many-th time its worker dies, and what comes of it.
WAYS = {
    "a retry goes back": ("third_time", ledger_script("yield"), 1, 20),
    "the last try begins": ("third_time", ledger_script("start"), 3, 20),
    "the result is committed": ("third_time", ledger_script("commit"), 1, 20),
    "its record makes room": ("replaced", ledger_script("replace"), 1, 24),
    "what replaces it is sent": ("replaced", broker_script("publish"), 1, 24),
    "what replaces it is committed": ("replaced", ledger_script("commit"), 1, 24),
}


@pytest.mark.parametrize("passes", [False, True], ids=["before", "after"])
def test_workers_that_die_at_each_step(fleet: TestFleet, tmp_path: Path, passes: bool) -> None:
    app, client = fleet.app, fleet.broker.client
    load_steps(fleet)
    labels = {way: f"way-{number}" for number, way in enumerate(WAYS)}
    with contextlib.ExitStack() as stack:
        proxies, dying, sent = {}, {}, {}
        for way, (_, script, at, _) in WAYS.items():
            proxies[way] = stack.enter_context(KillingProxy(fleet.broker.url, script, at=at, passes=passes))
            own = ("--label", f"{labels[way]}=1")
            dying[way] = WorkerProcess(
                proxies[way].url, fleet.folder, labels[way], *OPTIONS, *own, env={**fleet.env, **LEASE}
            )
            fleet.workers.append(dying[way])
        for way, (name, *_) in WAYS.items():
            worker = dying[way].ready()
            proxies[way].kill = lambda worker=worker: worker.send(signal.SIGKILL)  # type: ignore[misc]
            resources = {"labels": {labels[way]: "1"}, "hardware": {"gpu": {"count": 0}}}
            args = [str(tmp_path)] if name == "third_time" else ["by a function", resources]
            sent[way] = app.send_task(f"team_functions.{name}", args=args, resources=resources)
        for way, worker in dying.items():
            eventually(lambda: worker.process.poll() is not None, what=f"the death when {way}")  # noqa: B023
        fleet.start_worker(
            "next", *OPTIONS, *(word for one in labels.values() for word in ("--label", f"{one}=1")), env=LEASE
        )

        answers = {way: call.get(timeout=patient(60)) for way, call in sent.items()}

    assert answers == {way: result for way, (*_, result) in WAYS.items()}
    records = {way: app.ledger.get(call.id) for way, call in sent.items()}
    assert {way: (one.state, (one.result or {})["value"]) for way, one in records.items()} == {
        way: ("SUCCEEDED", result) for way, (*_, result) in WAYS.items()
    }
    eventually(lambda: not client.smembers(app.keys.unfinished), what="nothing unfinished")
    eventually(lambda: not client.hlen(app.keys.unacked), what="nothing unacknowledged")
    eventually(lambda: not client.zcard(app.keys.returned), what="no message remembered that has ended")
    for way, (name, *_) in WAYS.items():
        tries = {path.name.rpartition("-")[2] for path in tmp_path.glob(f"{sent[way].id}-*")}
        assert tries == ({"0", "1", "2"} if name == "third_time" else set()), way
