"""Each kind of command that a worker sends is answered by an error: nothing ends, is lost, or is done again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from celery import chain, chord

from gpuflow.client import submit
from gpuflow.ledger.ledger import ledger_script
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_ran_once
from tests.chaos.refusals import RefusingProxy
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

ANSWERS = {
    "MISCONF": "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "BUSY": "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
    "NOPERM": "NOPERM User default has no permissions to run the command",
    "LOADING": "LOADING Valkey is loading the dataset in memory",
    "READONLY": "READONLY You can't write against a read only replica.",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'.",
    "MASTERDOWN": "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN": "CLUSTERDOWN The cluster is down",
    "TRYAGAIN": "TRYAGAIN Multiple keys request during rehashing of slot",
    "NOSCRIPT": "NOSCRIPT No matching script. Please use EVAL.",
}
#: One of each kind of handling; `tox -e refusals` takes all.
USUAL = ("MISCONF", "NOPERM", "OOM", "TRYAGAIN", "NOSCRIPT")
#: Rounds of work after which each kind of command that a worker sends has been refused as often as it is to be.
MOST_ROUNDS = 40
TIMES = 2
RECLAIM = f"EVALSHA {ledger_script('reclaim').sha[:8]}"


@pytest.fixture(scope="module")
def proxy(long_fleet: TestFleet) -> Iterator[RefusingProxy]:
    with RefusingProxy(long_fleet.broker.url) as made:
        yield made


@pytest.fixture(scope="module")
def worker(long_fleet: TestFleet, proxy: RefusingProxy) -> WorkerProcess:
    env = {"REDIS_URL": proxy.url, "GPUFLOW_LEASE_SEC": "12"}
    return long_fleet.start_worker("w1", "--include", "plain_tasks", env=env)


def one_round(fleet: TestFleet, marks: Path) -> None:
    """Let the worker do one of each kind of work, and look that each was done once."""
    app = fleet.app
    specs = [fleet.echo(output=n) for n in range(8)] + [fleet.echo(fail={"message": "for good"})]
    echo = [app.signature("gpuflow.echo", kwargs={"spec": spec}, immutable=True) for spec in specs]
    retry = {"retry": {"max_attempts": 3, "backoff_seconds": 0.1}}
    again = submit(fleet.echo(output=1, fail={"retryable": True, "attempts": 1}) | retry, app=app)
    bad = submit(fleet.echo(fail={"message": "for good"}), app=app)
    chained = chain(*echo[:2], app=app).apply_async()
    joined = chord(echo[2:4], app=app)(echo[4])
    marked = chord(echo[5:6], app=app)(app.signature("plain_tasks.mark", args=(str(marks),), immutable=True))
    halted = chord([chain(echo[8], echo[6], app=app), echo[7]], app=app)(echo[4].clone())
    plain = [app.send_task("plain_tasks.add", args=(n, 1), countdown=n / 10) for n in range(2)]
    slow = submit(fleet.echo(until_exists="/nowhere"), app=app)
    eventually(lambda: slow.state == "RUNNING", what="a task that is to be cancelled")
    slow.cancel()

    assert [one.get(timeout=patient(60)) for one in plain] == [1, 2]
    assert (chained.get(timeout=patient(60))["output"], joined.get(timeout=patient(60))["output"]) == (1, 4)
    marked.get(timeout=patient(60))
    assert (marks / marked.id).stat().st_size == 1, "the body of a chord ran twice"
    assert isinstance(halted.get(timeout=patient(60), propagate=False), Exception), "its part failed"
    once = [chained.parent.id, chained.id, *(part.id for part in joined.parent.results), joined.id]
    check_ran_once(check(fleet, once))
    (tried,) = check(fleet, [again.id])
    assert tried.attempt == 2
    (failed,) = check(fleet, [bad.id], state=TaskState.FAILED)
    assert failed.attempt == 1
    (cancelled,) = check(fleet, [slow.id], state=TaskState.CANCELLED)
    assert cancelled.attempt == 1


def often(refused: Mapping[str, int]) -> dict[str, int]:
    """Return the counts without the step that is sent only after an error made a lease look missing."""
    return {command: count for command, count in refused.items() if command != RECLAIM}


@pytest.mark.parametrize("answer", list(ANSWERS) if "ALL_REFUSALS" in os.environ else USUAL)
def test_an_error_at_any_command_ends_nothing_and_loses_nothing(
    long_fleet: TestFleet, proxy: RefusingProxy, worker: WorkerProcess, answer: str, tmp_path: Path
) -> None:
    # A script that the server has been told again is not forgotten at once.
    times = 1 if answer == "NOSCRIPT" else TIMES
    proxy.begin(ANSWERS[answer], times)

    for _ in range(MOST_ROUNDS):
        one_round(long_fleet, tmp_path)
        if min(often(proxy.refused).values()) == times:
            break

    refused = often(proxy.refused)
    proxy.end()
    one_round(long_fleet, tmp_path)
    assert worker.process.poll() is None
    assert len(refused) > 12, f"{refused}: the worker sent too little"
    assert min(refused.values()) == times, f"{refused}: some were never refused"
