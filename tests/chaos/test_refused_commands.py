"""The server answers, and refuses: a disk that is full, replicas that are missing, rights that are taken away, a script
that holds it. No worker ends by that, and what was done meanwhile is told when it takes commands again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
from celery import chain

from gpuflow.client import submit
from gpuflow.errors import BrokerUnavailable
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_ran_once
from tests.chaos.conftest import LEASE, MORTAL, SAYS_ALL
from tests.chaos.faults import Fault
from tests.support.fleet import Broker, TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient, promised

PLAIN = ("--include", "plain_tasks")
#: Terms that are longer than a refusal in these tests.
LONG_LEASE = {"GPUFLOW_LEASE_SEC": "60", **SAYS_ALL}


@contextmanager
def no_disk(broker: Broker) -> Iterator[None]:
    """MISCONF: the server cannot write its snapshot."""
    shutil.rmtree(broker.data)  # its open files go on; it finds no folder for new ones
    broker.client.config_set("save", "3600 1000000")
    broker.client.bgsave()
    eventually(
        lambda: broker.client.info("persistence")["rdb_last_bgsave_status"] == "err", what="a snapshot that fails"
    )
    with pytest.raises(redis.ResponseError, match="MISCONF"):
        broker.client.set("any", 1)
    yield
    broker.client.config_set("save", "")


@contextmanager
def no_replicas(broker: Broker) -> Iterator[None]:
    """NOREPLICAS."""
    broker.client.config_set("min-replicas-to-write", 1)
    yield
    broker.client.config_set("min-replicas-to-write", 0)


@contextmanager
def no_rights(broker: Broker) -> Iterator[None]:
    """NOPERM: the user may read alone."""
    broker.client.acl_setuser("default", enabled=True, commands=["-@write", "-@scripting"])
    yield
    broker.client.acl_setuser("default", enabled=True, commands=["+@all"])


@contextmanager
def busy(broker: Broker) -> Iterator[None]:
    """BUSY: a script of somebody holds the server."""
    broker.client.config_set("busy-reply-threshold", 1)

    def hold() -> None:
        with redis.Redis.from_url(broker.url, socket_timeout=None) as client, pytest.raises(redis.ResponseError):
            client.eval("while true do end", 0)

    holder = threading.Thread(target=hold)
    holder.start()

    def is_busy() -> bool:
        try:
            return not broker.client.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)

    eventually(is_busy, what="a server that is held up")
    yield
    broker.client.script_kill()
    holder.join()


Refusal = Callable[[Broker], AbstractContextManager[None]]


def says(worker: WorkerProcess, *words: str) -> Callable[[], bool]:
    return lambda: all(word in worker.log() for word in words)


@pytest.mark.parametrize("refusal", [no_disk, no_replicas, no_rights, busy])
def test_no_worker_ends_and_nothing_is_lost_while_the_server_refuses(
    fleet: TestFleet, tmp_path: Path, refusal: Refusal
) -> None:
    # Given tasks that are about to succeed, to fail for good and to be tried again, and one that waits
    gate, marks = tmp_path / "gate", tmp_path / "marks"
    marks.mkdir()
    workers = [fleet.start_worker(name, "--max-jobs", "2", *PLAIN, env=LONG_LEASE) for name in ("w1", "w2")]
    retry = {"retry": {"max_attempts": 3, "backoff_seconds": 0}}
    late = {"until_exists": str(gate)}
    tasks = [
        submit(fleet.echo(output="kept", **late), app=fleet.app),
        submit(fleet.echo(fail={"message": "for good"}, **late), app=fleet.app),
        submit(fleet.echo(fail={"retryable": True, "attempts": 1}, **late) | retry, app=fleet.app),
    ]
    eventually(lambda: all(task.state == "RUNNING" for task in tasks), what="all three running")

    with ExitStack() as stack:
        stack.enter_context(refusal(fleet.broker))
        gate.touch()
        eventually(lambda: not any(worker.supervised() for worker in workers), what="the end of the children")
        for worker in workers:
            eventually(says(worker, "leases_not_renewed"), what=f"{worker.name} without an answer")
        eventually(lambda: any(says(worker, "broker_away")() for worker in workers), what="an end that is not told")
        assert [worker.process.poll() for worker in workers] == [None, None]

    plain = fleet.app.send_task("plain_tasks.mark", args=(str(marks),))
    later = submit(fleet.echo(output="later"), app=fleet.app)
    records = check(fleet, [task.id for task in tasks] + [later.id], state=None)
    assert [record.state for record in records] == [
        TaskState.SUCCEEDED, TaskState.FAILED, TaskState.SUCCEEDED, TaskState.SUCCEEDED
    ]  # fmt: skip
    promised([record.attempt for record in records] == [1, 1, 2, 1], f"work was done again: {records}")
    eventually(plain.successful, what="a plain task")
    assert [worker.process.poll() for worker in workers] == [None, None]


@pytest.mark.parametrize("refusal", [no_disk, busy])
def test_a_server_that_takes_no_writes_of_anybody_ends_no_work_however_long(fleet: TestFleet, refusal: Refusal) -> None:
    worker = fleet.start_worker("w1", env=LEASE)
    gate = fleet.folder / "gate"
    task = submit(fleet.echo(output="kept", until_exists=str(gate)), app=fleet.app)
    eventually(lambda: task.state == "RUNNING", what="the task running")
    (child,) = eventually(worker.supervised, what="the child")

    with refusal(fleet.broker):
        began = len(worker.log())
        refused = "leases_not_renewed"
        # Its pauses between two tries are a twentieth of the term, at most a second: that many are twice the term.
        eventually(lambda: worker.log()[began:].count(refused) > 2 * 20, what="two terms without a renewal")
        assert child.is_running()
    gate.touch()

    (record,) = check(fleet, [task.id])
    check_ran_once([record])
    promised(record.result["pid"] == child.pid, "another child has done the work")


def test_what_follows_a_task_is_published_when_the_server_takes_it_again(fleet: TestFleet, fault: Fault) -> None:
    # Given a chain, whose first task is committed when the server begins to refuse
    worker = fleet.start_worker("w1", *MORTAL, env=LONG_LEASE | fault.env)
    fault.arm("committing_after", signal.SIGSTOP)
    steps = [fleet.app.signature("gpuflow.echo", kwargs={"spec": fleet.echo(output=n)}, immutable=True) for n in (1, 2)]
    last = chain(*steps, app=fleet.app).apply_async()
    eventually(fault.struck, what="the first task committed")

    with no_replicas(fleet.broker):
        worker.send(signal.SIGCONT)
        eventually(says(worker, "follow_up_not_published"), what="the next task refused")

    # Then nothing of the chain is lost, and the first task is not run again
    assert last.get(timeout=patient(30))["output"] == 2
    assert fleet.app.ledger.get(last.parent.id).attempt == 1


def test_a_submit_says_what_the_server_refuses(fleet: TestFleet) -> None:
    with fleet.hasty_client() as app:
        with no_replicas(fleet.broker), pytest.raises(BrokerUnavailable, match=r"refuses this for now.*NOREPLICAS"):
            submit(fleet.echo(output=1), app=app)
        with no_rights(fleet.broker), pytest.raises(BrokerUnavailable, match="denies this"):
            submit(fleet.echo(output=1), app=app)
    assert fleet.app.ledger.recent() == []


def test_commands_that_read_wait_for_no_disk(fleet: TestFleet) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    environment = {**os.environ, "REDIS_URL": fleet.broker.url, "HOME": str(fleet.folder)}
    program = str(Path(sys.executable).with_name("gpuflow"))
    with no_disk(fleet.broker):
        for command in ("status", "queues", "workers"):
            done = subprocess.run([program, command], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "waiting" not in done.stderr, done
        done = subprocess.run(
            [program, "cancel", task.id], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "the broker refuses this for now" in done.stderr
        assert "waiting" not in done.stderr
