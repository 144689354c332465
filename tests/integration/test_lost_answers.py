"""Steps whose answer never came, and steps that come late: each does what once does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuflow.broker.lease import Lease
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.scripts import broker_script
from gpuflow.broker.transport import Channel
from gpuflow.client import submit
from gpuflow.errors import TaskFailed
from gpuflow.fleet.registry import Fleet
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.states import TaskState
from tests.support.fleet import TestFleet
from tests.support.lost_answers import Calls
from tests.support.pops import POP_ONE, lose
from tests.support.waiting import eventually, patient

LEASE_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture
def table(fleet: TestFleet) -> Iterator[LeaseTable]:
    """The leases of a process that a test plays."""
    made = LeaseTable(fleet.app.keys, LEASE_SECONDS)
    made.connect(fleet.broker.client, keep=False)
    made.sweeper.sweep(fleet.broker.client)
    yield made
    fleet.broker.client.delete(*(key for key in fleet.broker.client.keys("gpuflow.*") if "queues" not in key), "cpu")


def popped(fleet: TestFleet, table: LeaseTable) -> tuple[str, str, str]:
    """Take the next message of `cpu`; return its tag, its list and its text."""
    keys = fleet.app.keys
    names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell, "cpu"]
    answer: Any = broker_script("pop")(fleet.broker.client, names, [table.owner, LEASE_SECONDS, POP_ONE])
    assert answer[0] == "cpu"
    return answer[4], answer[0], answer[1]


def test_a_cancel_whose_answer_was_lost_tells_celery_when_it_is_repeated(fleet: TestFleet) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    assert fleet.app.ledger.cancel(task.id) == ("cancelled", "CANCELLED")

    assert task.cancel() == "cancelled"

    assert fleet.app.backend.get_task_meta(task.id, cache=False)["status"] == "REVOKED"
    assert task.cancel() == "final"


def test_the_second_of_two_cancels_sent_again_leaves_the_next_life_alone(fleet: TestFleet, table: LeaseTable) -> None:
    # Given a running task that two users want cancelled
    ledger, client = fleet.app.ledger, fleet.broker.client
    task = submit(fleet.echo(output=1), app=fleet.app)
    tag, *_ = popped(fleet, table)
    begun = ledger.start(task.id, worker="w", owner_token=table.owner, tag=tag)
    calls = Calls(client)
    for user in ("ana", "bo"):
        with calls.of(user):
            assert ledger.cancel(task.id) == ("requested", "STARTING")
    # and that somebody queues again when it has ended
    holder = Holder(attempt=begun.attempt, token=table.owner)
    assert ledger.commit(task.id, TaskState.CANCELLED, holder=holder)
    assert ledger.retry_task(task.id)

    # When both cancels are sent again, then they change nothing
    for ago in (0, 1):
        calls.repeat(ago)
    assert task.record().state == TaskState.QUEUED


def test_a_return_sent_again_after_its_cancelled_task_came_here_once_more_changes_nothing(
    fleet: TestFleet, table: LeaseTable
) -> None:
    # Given a message that its process has put back and has again, and whose task is cancelled meanwhile
    ledger, client = fleet.app.ledger, fleet.broker.client
    task = submit(fleet.echo(output=1), app=fleet.app)
    tag, list_key, raw = popped(fleet, table)
    assert table.accept(tag, "cpu", list_key, raw, "0")
    calls = Calls(client)
    with calls.of("worker"):
        assert table.settle(tag, "front")
    popped(fleet, table)
    assert ledger.cancel(task.id) == ("cancelled", "CANCELLED")

    # When the return is sent again, then it puts nothing back: it is of an earlier delivery
    assert calls.again() == 0


def test_a_start_sent_again_after_its_message_went_back_begins_nothing(fleet: TestFleet, table: LeaseTable) -> None:
    # Given a START whose process has lost the lease to a sweep, and has the message again after another one began it
    ledger, client = fleet.app.ledger, fleet.broker.client
    task = submit(fleet.echo(output=1), app=fleet.app)
    tag, *_ = popped(fleet, table)
    calls = Calls(client)
    with calls.of("first"):
        assert ledger.start(task.id, worker="w", owner_token=table.owner, tag=tag).verdict == "begin"
    other = LeaseTable(fleet.app.keys, LEASE_SECONDS)
    other.connect(client, keep=False)
    lose(fleet.app.keys, fleet.broker.client, tag)
    popped(fleet, other)
    returned = str(client.zscore(fleet.app.keys.returned, tag))
    begun = ledger.start(task.id, worker="v", owner_token=other.owner, tag=tag, returned=returned)
    assert (begun.verdict, begun.attempt) == ("begin", 2)
    lose(fleet.app.keys, fleet.broker.client, tag)
    popped(fleet, table)

    # When the first START is sent again, then it changes nothing
    assert calls.again()[0] == "lost"
    assert task.record().attempt == 2


def test_work_without_a_record_takes_its_delayed_message_back_and_loses_none(
    fleet: TestFleet, table: LeaseTable
) -> None:
    # Given a message that went back for a moment later, while a renewal was under way that knows it as held
    submit(fleet.echo(output=1), app=fleet.app)
    tag, key, raw = popped(fleet, table)
    table.accept(tag, "cpu", key, raw)
    lease = table.held()[tag]
    assert isinstance(lease, Lease)
    assert table.settle(tag, "front", delay_seconds=30)
    keys, client = fleet.app.keys, fleet.broker.client
    assert client.hexists(keys.parked, tag)

    kept = fleet.app.ledger.reclaim({tag: lease}, table.owner, LEASE_SECONDS, new_run=False)

    # Then it is held again, and not gone
    assert kept == {tag}
    assert client.hget(keys.unacked, tag) == raw
    assert not client.hexists(keys.parked, tag)
    assert client.zcard(keys.delayed) == 0


def test_a_message_that_came_again_to_its_owner_is_not_lost_to_it(fleet: TestFleet, table: LeaseTable) -> None:
    submit(fleet.echo(output=1), app=fleet.app)
    tag, key, raw = popped(fleet, table)
    table.accept(tag, "cpu", key, raw)
    lease = table.held()[tag]

    assert fleet.app.ledger.reclaim({tag: lease}, table.owner, LEASE_SECONDS, new_run=False) == {tag}
    assert fleet.app.ledger.reclaim({tag: lease}, "another", LEASE_SECONDS, new_run=False) == set()


def test_a_retry_finds_a_queue_that_was_forgotten(fleet: TestFleet) -> None:
    # Given a task in a queue whose name does not say all, and that nobody remembers
    labels = {f"label-{number}-with-a-long-name": "value" for number in range(8)}
    spec = fleet.echo(fail={"attempts": 1}) | {"resources": {"labels": labels}}
    options = [part for name in labels for part in ("--label", f"{name}=value")]
    worker = fleet.start_worker("w1", *options)
    task = submit(spec, app=fleet.app)
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(30))
    worker.stop()
    queue = task.record().queue
    assert len(queue) <= 120
    assert queue in Fleet(fleet.app.redis, fleet.app.keys).forget_queues((), 0)

    task.retry()

    again = fleet.start_worker("w2", *options)
    assert task.get(timeout=patient(30))["attempt"] == 2
    again.stop()


def test_a_submit_whose_channel_is_closed_meanwhile_opens_another(
    fleet: TestFleet, table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a line that breaks between the choice of a channel and the use of it
    real, closed = Channel._put, []

    def closing(self: Channel, *args: Any, **kwargs: Any) -> None:
        if not closed:
            closed.append(self)
            self.close()
        real(self, *args, **kwargs)

    monkeypatch.setattr(Channel, "_put", closing)

    # When a task is submitted, then it is sent once, through another channel
    task = submit(fleet.echo(output=1), app=fleet.app)

    assert len(closed) == 1
    assert popped(fleet, table)[2] == fleet.broker.client.hget(fleet.app.keys.task(task.id), "message")
    assert fleet.broker.client.llen("cpu") == 0


def test_a_purge_takes_delayed_messages_too(fleet: TestFleet) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    for seconds in (0, 60, 60):
        fleet.app.send_task("plain_tasks.add", args=(1, 2), countdown=seconds)
    other = fleet.app.send_task("plain_tasks.add", args=(1, 2), countdown=60, queue="other")
    assert eventually(lambda: client.zcard(keys.delayed) == 3)

    assert fleet.app.control.purge() == 3

    assert client.zcard(keys.delayed) == client.hlen(keys.parked) == 1
    assert other.id in client.hvals(keys.parked)[0]


def test_messages_put_aside_are_shown_whoever_did_it(fleet: TestFleet) -> None:
    client, keys = fleet.broker.client, fleet.app.keys
    client.delete(keys.unreadable)
    client.lpush(keys.unreadable, b"{no json \xff", '{"properties": 3}')

    shown = fleet.app.ledger.unreadable()

    assert [one["message"] for one in shown] == ['{"properties": 3}', "{no json \ufffd"]
    assert fleet.app.ledger.forget_unreadable() == 2
    assert fleet.app.ledger.unreadable() == []
