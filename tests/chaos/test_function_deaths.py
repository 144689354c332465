"""A team's function whose worker is killed at each step of its way, before the broker takes it and after."""

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
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_dies_when(fleet: TestFleet, tmp_path: Path, way: str, passes: bool) -> None:
    name, script, at, result = WAYS[way]
    app, client = fleet.app, fleet.broker.client
    load_steps(fleet)
    args = [str(tmp_path)] if name == "third_time" else ["by a function"]
    with KillingProxy(fleet.broker.url, script, at=at, passes=passes) as proxy:
        dying = WorkerProcess(proxy.url, fleet.folder, "dying", *OPTIONS, env={**fleet.env, **LEASE})
        fleet.workers.append(dying.ready())
        proxy.kill = lambda: dying.send(signal.SIGKILL)
        sent = app.send_task(f"team_functions.{name}", args=args)
        eventually(lambda: dying.process.poll() is not None, what="its death")
        fleet.start_worker("next", *OPTIONS, env=LEASE)

        assert sent.get(timeout=patient(60)) == result

    record = app.ledger.get(sent.id)
    assert record.state == "SUCCEEDED" and record.result is not None and record.result["value"] == result
    eventually(lambda: not client.smembers(app.keys.unfinished), what="nothing unfinished")
    eventually(lambda: not client.hlen(app.keys.unacked), what="nothing unacknowledged")
    eventually(lambda: not client.zcard(app.keys.returned), what="no message remembered that has ended")
    if name == "third_time":
        tries = {path.name.rpartition("-")[2] for path in tmp_path.glob(f"{sent.id}-*")}
        assert tries == {"0", "1", "2"}
    with contextlib.suppress(ProcessLookupError):
        dying.process.wait(timeout=patient(10))
