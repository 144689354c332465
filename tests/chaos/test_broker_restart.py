"""The broker crashes, comes back from an older copy of its files, or is full: what runs goes on, and ends once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.errors import BrokerUnavailable
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_ran_once
from tests.chaos.conftest import LEASE, LEASE_SECONDS
from tests.chaos.freezing import frozen
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

#: Servers that crash under load: nothing else should load the machine.
pytestmark = pytest.mark.alone

PLAIN = ("--include", "plain_tasks")


def test_two_hundred_tasks_flow_over_a_crash_of_the_broker(fleet: TestFleet, tmp_path: Path) -> None:
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.mkdir()
    workers = [fleet.start_worker(name, "--max-jobs", "2", *PLAIN, env=LEASE) for name in ("w1", "w2")]
    plain, supervised = [], []
    for number in range(200):
        if number % 4:
            plain.append(fleet.app.send_task("plain_tasks.mark", args=(str(marks),)))
        else:
            # The later ones end after the crash: whenever it comes, some run and many wait.
            late = {"until_exists": str(gate)} if number >= 80 else {}
            supervised.append(submit(fleet.echo(output=number, sleep_seconds=0.2, **late), app=fleet.app))

    eventually(lambda: sum(task.state.final for task in supervised[:20]) >= 10, what="ten tasks done")
    fleet.broker.kill()
    eventually(lambda: all("leases_not_renewed" in worker.log() for worker in workers), what="workers without a broker")
    fleet.broker.restart()
    gate.touch()

    records = check(fleet, [task.id for task in supervised])
    check_ran_once(records)
    eventually(lambda: len(list(marks.iterdir())) == len(plain), what="all plain tasks run")
    eventually(lambda: all(result.successful() for result in plain), what="results of all plain tasks")
    assert [path.name for path in marks.iterdir() if path.stat().st_size != 1] == []
    assert all(worker.process.poll() is None for worker in workers)


# -- an older copy of the files ---------------------------------------------------------------------------------------


def _gate(fleet: TestFleet) -> Path:
    """The tasks of these tests work until this exists."""
    return fleet.folder / "gate"


def _submitted(fleet: TestFleet, countdown: float | None = None) -> list[str]:
    specs = [fleet.echo(output=number, steps=3, until_exists=str(_gate(fleet))) for number in range(2)]
    return [fleet.app.send_task("gpuflow.echo", kwargs={"spec": spec}, countdown=countdown).id for spec in specs]


def _before_the_pop(fleet: TestFleet, workers: list[WorkerProcess]) -> tuple[list[str], Path]:
    with frozen(*(worker.pid for worker in workers)):
        return _submitted(fleet), fleet.broker.snapshot()


def _while_they_are_delayed(fleet: TestFleet, workers: list[WorkerProcess]) -> tuple[list[str], Path]:
    with frozen(*(worker.pid for worker in workers)):  # nobody is there who would pass them on
        ids = _submitted(fleet, countdown=0.5)
        assert fleet.broker.client.zcard(fleet.app.keys.delayed) == 2
        return ids, fleet.broker.snapshot()


def _after_the_start(fleet: TestFleet, workers: list[WorkerProcess]) -> tuple[list[str], Path]:
    ids = _submitted(fleet)
    eventually(lambda: all(Task(task_id, fleet.app).state == "RUNNING" for task_id in ids))
    return ids, fleet.broker.snapshot()


def _renewed_beyond_a_lease(fleet: TestFleet, task_ids: list[str]) -> None:
    """Wait until what runs has been renewed when every lease of the copy is over."""
    client, keys = fleet.broker.client, fleet.app.keys
    seconds, _ = client.time()

    def ends(task_id: str) -> float:
        tag = client.hget(keys.task(task_id), "tag")
        return float((tag and client.zscore(keys.leases, tag)) or 0)

    enough = seconds + 2 * LEASE_SECONDS
    eventually(lambda: all(ends(task_id) > enough for task_id in task_ids), what="leases that are renewed")


@pytest.mark.parametrize("taken", [_before_the_pop, _while_they_are_delayed, _after_the_start])
def test_what_runs_goes_on_over_an_older_copy_of_the_files(
    fleet: TestFleet, taken: Callable[[TestFleet, list[WorkerProcess]], tuple[list[str], Path]]
) -> None:
    # Given two workers with one task each, and a copy from before
    workers = [fleet.start_worker(name, "--max-jobs", "1", env=LEASE) for name in ("w1", "w2")]
    ids, snapshot = taken(fleet, workers)
    eventually(lambda: all(fleet.state(task_id) == "RUNNING" for task_id in ids), what="both running")
    pids = {process.pid for worker in workers for process in eventually(worker.supervised, what="a child")}
    assert len(pids) == 2

    # When the server comes back from the copy
    fleet.broker.restart_from(snapshot)
    _renewed_beyond_a_lease(fleet, ids)
    _gate(fleet).touch()

    # Then the same children bring the same attempts to their end
    records = check(fleet, ids, rolled_back=True)
    assert {record.result["pid"] for record in records} == pids
    check_ran_once(records)
    for task_id in ids:
        assert [path.name for path in (fleet.results / task_id).glob("attempt-*")] == ["attempt-1"]
    assert not any(word in worker.log() for worker in workers for word in ("lease_lost", "leases_lost"))


def test_a_second_attempt_goes_on_where_the_copy_knows_only_the_first(fleet: TestFleet) -> None:
    first = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = submit(fleet.echo(steps=3, until_exists=str(_gate(fleet))), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    snapshot = fleet.broker.snapshot()
    second = fleet.start_worker("w2", "--max-jobs", "1", env=LEASE)
    first.send(signal.SIGKILL)
    eventually(lambda: task.record().attempt == 2 and task.state == "RUNNING", what="the second attempt running")
    (child,) = eventually(second.supervised, what="the child")

    fleet.broker.restart_from(snapshot)
    _renewed_beyond_a_lease(fleet, [task.id])
    _gate(fleet).touch()

    (record,) = check(fleet, [task.id], rolled_back=True)
    assert (record.attempt, record.worker, record.result["pid"]) == (2, "w2", child.pid)
    assert sorted(path.name for path in (fleet.results / task.id).glob("attempt-*")) == ["attempt-1", "attempt-2"]


# -- a full server, a volatile server ---------------------------------------------------------------------------------


def test_a_full_broker_refuses_clearly_and_work_goes_on_when_it_has_room(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    running = submit(fleet.echo(output="before", until_exists=str(_gate(fleet))), app=fleet.app)
    eventually(lambda: running.state == "RUNNING")
    waiting = submit(fleet.echo(output="waiting"), app=fleet.app)
    tasks_before = fleet.broker.client.zcard(fleet.app.keys.tasks)

    fleet.broker.client.config_set("maxmemory", "1mb")
    with fleet.hasty_client() as app, pytest.raises(BrokerUnavailable, match="memory"):
        submit(fleet.echo(output="refused"), app=app)
    assert fleet.broker.client.zcard(fleet.app.keys.tasks) == tasks_before
    _gate(fleet).touch()
    eventually(lambda: not worker.supervised(), what="the end of the child while the server is full")
    eventually(lambda: "OOM" in worker.log() or "maxmemory" in worker.log(), what="the worker to notice")
    assert worker.process.poll() is None
    fleet.broker.client.config_set("maxmemory", "0")

    later = submit(fleet.echo(output="later"), app=fleet.app)
    records = check(fleet, [running.id, waiting.id, later.id], state=TaskState.SUCCEEDED)
    assert [record.result["output"] for record in records] == ["before", "waiting", "later"]
    check_ran_once(records)


def test_a_worker_refuses_a_broker_without_an_append_only_file(fleet: TestFleet) -> None:
    fleet.broker.client.config_set("appendonly", "no")

    refused = fleet.spawn_worker("w1", env=LEASE)
    assert refused.process.wait(timeout=patient(30)) == 2
    assert "no append-only file" in refused.log()
    assert "GPUFLOW_ALLOW_VOLATILE=1" in refused.log()

    fleet.start_worker("w2", env={**LEASE, "GPUFLOW_ALLOW_VOLATILE": "1"})
    check(fleet, [submit(fleet.echo(output=1), app=fleet.app).id])


# -- a backup ---------------------------------------------------------------------------------------------------------


def test_a_restored_backup_loses_what_came_after_it_and_ends_what_was_before(fleet: TestFleet, tmp_path: Path) -> None:
    """As docs/howto/back-up-the-broker.md says: what is lost, what runs again, and how both are found."""
    workers = [fleet.start_worker(name, "--max-jobs", "2", env=LEASE) for name in ("w1", "w2")]
    gate = _gate(fleet)
    nodes = [
        {"name": "first", "spec": fleet.echo(output=1)},
        {"name": "second", "dependsOn": ["first"], "spec": fleet.echo(until_exists=str(gate), output=2)},
        {"name": "third", "dependsOn": ["second"], "spec": fleet.echo(output=3)},
    ]
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "kept"},
            "spec": {"taskType": "echo", "graph": {"nodes": nodes}},
        },
        app=fleet.app,
    )
    eventually(
        lambda: run["second"].tasks and run["second"].tasks[0].state == "RUNNING", what="the second stage running"
    )
    before = submit(fleet.echo(output="before"), app=fleet.app)
    before.get(timeout=patient(30))
    again = submit(fleet.echo(until_exists=str(tmp_path / "now"), output="again"), app=fleet.app)
    eventually(lambda: again.state == "RUNNING")
    backup = fleet.broker.snapshot()

    # Given work that goes on after the backup: a task that ends, and one that comes and ends
    (tmp_path / "now").touch()
    first_result = again.get(timeout=patient(30))
    lost = submit(fleet.echo(output="lost"), app=fleet.app)
    lost.get(timeout=patient(30))
    stray = submit(fleet.echo(until_exists=str(tmp_path / "later")), app=fleet.app)
    eventually(lambda: stray.state == "RUNNING")

    # When the server comes back from the backup
    fleet.broker.restart_from(backup)
    eventually(lambda: fleet.state(lost.id) == "UNKNOWN", what="the server with the backup")
    gate.touch()
    (tmp_path / "later").touch()

    # Then what was before ends, each task with one result
    eventually(lambda: run.state.final, within=60, what="the end of the pipeline")
    eventually(
        lambda: fleet.state(again.id) == "SUCCEEDED", within=60, what="the end of what had ended after the backup"
    )
    assert run.state == "SUCCEEDED"
    ids = [*(run[name].tasks[0].id for name in ("first", "second", "third")), before.id, again.id]
    # What came after the backup and still ran is known again by its message, which its worker has: it runs to a result.
    eventually(lambda: fleet.state(stray.id) == "SUCCEEDED", within=60, what="the end of what ran")
    ids.append(stray.id)
    records = check(fleet, ids, rolled_back=True)
    second = next(record for record in records if record.id == again.id)
    assert second.attempt == 2 and second.result["output"] == first_result["output"] == "again"
    assert {path.name for path in (fleet.results / again.id).glob("attempt-*")} == {"attempt-1", "attempt-2"}

    # and what came after it is unknown; its folder of results names it
    names = {path.name for path in fleet.results.iterdir() if not path.name.startswith(".")}  # as `ls` does
    known = {record.id for record in fleet.app.ledger.find_many(list(names)) if record}
    assert names - known == {lost.id}
    assert fleet.state(lost.id) == "UNKNOWN"
    assert all(worker.process.poll() is None for worker in workers)
