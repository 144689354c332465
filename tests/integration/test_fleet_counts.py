"""The counts that metrics show and the use of attempts, kept by the real Lua steps; a step sent twice counts once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from gpuflow.broker.scripts import broker_script, script_text
from gpuflow.client import submit
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.ledger.ledger import ledger_script
from gpuflow.ledger.records import Usage
from gpuflow.ledger.states import TaskState
from gpuflow.metrics.collector import FleetCollector
from gpuflow.metrics.counters import parse
from gpuflow.routing.capability import Capability
from tests.support.fleet import TestFleet
from tests.support.pops import begin, lose

USED = Usage(seconds=2.5, gpu_seconds=5, energy_joules=100.25, cost=0.5, artifact_bytes=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    made = TestFleet(tmp_path_factory.mktemp("brokered"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def brokered(server: TestFleet) -> TestFleet:
    """A broker without workers and without tasks."""
    server.broker.client.flushdb()
    return server


def counted(fleet: TestFleet, name: str) -> dict[tuple[str, ...], int]:
    """Return the counts of one name, by label, type and queue where they have them."""
    raw = fleet.broker.client.hgetall(fleet.app.keys.metrics)
    found = (count for count in parse(raw) if count.name == name)
    return {tuple(filter(None, (one.label, one.task_type, one.queue))): one.value for one in found}


def test_a_task_is_counted_from_submit_to_end(brokered: TestFleet) -> None:
    ledger = brokered.app.ledger
    task = submit(brokered.echo(output=1), app=brokered.app)
    assert counted(brokered, "submitted") == {("echo", "cpu"): 1}
    holder, _ = begin(brokered, "w1:1")
    assert counted(brokered, "started") == {("echo",): 1}
    assert sum(counted(brokered, "wait_bucket").values()) == 1
    for _ in range(2):  # the second as if the answer of the first had been lost
        assert ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=USED)
    assert counted(brokered, "ended") == {("SUCCEEDED", "echo", "cpu"): 1}
    assert counted(brokered, "attempts") == {("succeeded", "echo"): 1}
    assert sum(counted(brokered, "run_bucket").values()) == 1
    assert counted(brokered, "gpu_ms") == {("echo",): 5000}
    assert counted(brokered, "cost_millionths") == {("echo",): 500_000}
    assert counted(brokered, "energy_mj") == {("echo",): 100_250}
    assert counted(brokered, "artifact_bytes") == {("echo",): 10}
    assert task.record().usage == USED
    assert task.record().public()["usage"]["gpuSeconds"] == 5


def test_the_use_of_all_attempts_is_that_of_the_task(brokered: TestFleet) -> None:
    ledger = brokered.app.ledger
    task = submit(brokered.echo(output=1), app=brokered.app)
    error = {"type": "Bad", "message": "bad", "retryable": True}
    holder, tag = begin(brokered, "w1:1")
    ledger.yield_attempt(task.id, holder, tag, reason="failed", error=error, usage=USED)
    assert ledger.yield_attempt(task.id, holder, tag, reason="failed", error=error, usage=USED) == "refused"
    holder, tag = begin(brokered, "w1:1")
    lose(brokered.app.keys, brokered.broker.client, tag)
    holder, _ = begin(brokered, "w1:1")
    assert ledger.commit(task.id, TaskState.FAILED, holder=holder, error=error, usage=USED)
    assert counted(brokered, "attempts") == {("failed", "echo"): 2, ("lost", "echo"): 1}
    assert counted(brokered, "ended") == {("FAILED", "echo", "cpu"): 1}
    assert task.record().usage == USED + USED
    assert [entry.usage for entry in ledger.attempts(task.id)] == [USED, Usage(), USED]
    assert not counted(brokered, "run_bucket"), "only an attempt that succeeded tells how long one takes"


def test_a_cancelled_task_and_one_that_is_queued_again_are_counted(brokered: TestFleet) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    brokered.app.ledger.cancel(task.id)
    brokered.app.ledger.retry_task(task.id)
    assert counted(brokered, "ended") == {("CANCELLED", "echo", "cpu"): 1}
    assert counted(brokered, "submitted") == {("echo", "cpu"): 2}


def test_merged_calls_are_tasks_and_their_run_is_none(brokered: TestFleet) -> None:
    spec = {"taskType": "echo", "echo": {"output": 1}, "merge": "always"}
    callers = [submit(spec, app=brokered.app) for _ in range(3)]
    assert counted(brokered, "submitted") == {("echo", "cpu"): 3}
    for caller in callers:
        brokered.app.ledger.cancel(caller.id)
    assert counted(brokered, "ended") == {("CANCELLED", "echo", "cpu"): 3}


def test_names_that_users_choose_are_bounded(brokered: TestFleet) -> None:
    # Given a hash that has room for one more queue, and the bound as the Lua step has it
    client, keys = brokered.broker.client, brokered.app.keys
    assert "local MOST_SERIES = 5000" in script_text("gpuflow.broker", "common")
    client.hset(keys.metrics, mapping={f"x\n\ntype-{number}": 1 for number in range(4999)})
    # When a task comes, and goes when there is none
    task = submit(brokered.echo(output=1), app=brokered.app)
    brokered.app.ledger.cancel(task.id)
    # Then its end counts for its type all the same: none of that type is open
    assert counted(brokered, "submitted") == {("echo", "cpu"): 1}
    assert counted(brokered, "ended") == {("CANCELLED", "echo", "other"): 1}
    # And where there is no room for another type, either, it counts among the others
    client.delete(keys.metrics)
    client.hset(keys.metrics, mapping={f"x\n\ntype-{number}": 1 for number in range(10_000)})
    task = submit(brokered.echo(output=1), app=brokered.app)
    brokered.app.ledger.cancel(task.id)
    assert counted(brokered, "submitted") == {("other", "other"): 1}
    assert counted(brokered, "ended") == {("CANCELLED", "other", "other"): 1}


def test_use_without_bound_fails_no_step(brokered: TestFleet) -> None:
    # Given an attempt that says it has cost as much as a number can hold, and another one
    ledger, huge = brokered.app.ledger, Usage(seconds=1, cost=1.5e308)
    task = submit(brokered.echo(output=1), app=brokered.app)
    error = {"type": "Bad", "message": "bad", "retryable": True}
    holder, tag = begin(brokered, "w1:1")
    ledger.yield_attempt(task.id, holder, tag, reason="failed", error=error, usage=huge)
    holder, _ = begin(brokered, "w1:1")
    # When it ends, then it ends, and its sum can be read
    assert ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=huge)
    assert task.record().usage == Usage(seconds=2, cost=1e15)
    assert [entry.usage.cost for entry in ledger.attempts(task.id)] == [1e15, 1e15]


@pytest.mark.parametrize(
    "odd",
    [
        {"state": "HIBERNATING"},
        {"capability": "[1]"},
        {"capability": '{"gpus": ["a100"]}'},
        {"capability": '{"gpus": [{"uuid": "g", "index": 0, "names": ["a"], "vram_gb": "40GB", "total_mib": 1}]}'},
        {"load": "[]", "queues": "5"},
        {"load": '{"families": 5}'},
        {"pid": "many"},
    ],
    ids=["state", "capability", "GPU", "memory", "queues", "families", "pid"],
)
def test_an_entry_of_another_form_hides_no_other_metric(brokered: TestFleet, odd: dict[str, str]) -> None:
    client, keys = brokered.broker.client, brokered.app.keys
    fleet = Fleet(client, keys)
    for name in ("good", "odd"):
        able = Capability(cpu_count=4).to_dict()
        fleet.announce(
            WorkerEntry(id=name, state=WorkerState.IDLE, class_name=name, capability=able, timeout_seconds=600)
        )
    client.hset(keys.worker("odd"), mapping=odd)
    submit(brokered.echo(output=1), app=brokered.app)
    found = {metric.name: metric.samples for metric in FleetCollector(client, keys, "tasks").collect()}
    assert [one.value for one in found["gpuflow_workers_unreadable"]] == [1]
    assert [one.labels["worker"] for one in found["gpuflow_worker_tasks"]] == ["good"]
    assert {one.labels["queue"]: one.value for one in found["gpuflow_queue_workers"]}["cpu"] == 1


def test_a_look_that_fails_is_not_hidden_by_an_earlier_one(brokered: TestFleet) -> None:
    now = [0.0]
    looks = FleetCollector(brokered.broker.client, brokered.app.keys, "tasks", clock=lambda: now[0])
    assert list(looks.collect())
    now[0] += 2.0
    brokered.broker.client.hset(brokered.app.keys.machines, "m", "no JSON")
    for _ in range(2):
        with pytest.raises(ValueError, match="Expecting value"):
            list(looks.collect())


def test_a_count_that_cannot_be_kept_fails_no_step(brokered: TestFleet) -> None:
    client, keys = brokered.broker.client, brokered.app.keys
    task = submit(brokered.echo(output=1), app=brokered.app)
    holder, _ = begin(brokered, "w1:1")
    client.hset(keys.metrics, "gpu_ms\n\necho", 2**63 - 1)  # it would overflow
    assert brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=USED)
    client.delete(keys.metrics)
    client.set(keys.metrics, "no hash")
    task = submit(brokered.echo(output=1), app=brokered.app)
    holder, _ = begin(brokered, "w1:1")
    assert brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=USED)
    assert task.record().usage == USED


def test_a_label_cannot_forge_another_count(brokered: TestFleet) -> None:
    client, keys = brokered.broker.client, brokered.app.keys
    for task_type in ("a\nb", "x" * 200):
        task = submit(brokered.echo(output=1), app=brokered.app)
        client.hset(keys.task(task.id), "task_type", task_type)
        brokered.app.ledger.cancel(task.id)
    assert counted(brokered, "ended") == {("CANCELLED", "other", "cpu"): 2}


def test_the_collector_reads_the_broker_once_for_many_scrapers(brokered: TestFleet) -> None:
    client = brokered.broker.client
    now = [0.0]
    collector = FleetCollector(client, brokered.app.keys, "tasks", clock=lambda: now[0])

    def unfinished() -> float:
        found = {metric.name: metric for metric in collector.collect()}
        return float(found["gpuflow_tasks_unfinished"].samples[0].value)

    assert unfinished() == 0
    submit(brokered.echo(output=1), app=brokered.app)
    assert unfinished() == 0, "an answer is given again for a moment"
    now[0] += 2.0
    assert unfinished() == 1
    waiting = next(metric for metric in collector.collect() if metric.name == "gpuflow_queue_tasks")
    assert {one.labels["queue"]: one.value for one in waiting.samples if one.labels["state"] == "waiting"}["cpu"] == 1
    served = next(metric for metric in collector.collect() if metric.name == "gpuflow_queue_workers")
    assert {one.labels["queue"]: one.value for one in served.samples}["cpu"] == 0


def test_an_error_of_the_broker_is_told_to_all_who_asked_at_that_time(brokered: TestFleet) -> None:
    now, asked = [0.0], []

    class Away:
        def pipeline(self, **_: object) -> object:
            asked.append(now[0])
            raise redis.ConnectionError("away")

    collector = FleetCollector(Away(), brokered.app.keys, "tasks", clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(redis.ConnectionError):
            list(collector.collect())
    assert asked == [0.0]
    now[0] += 2.0
    with pytest.raises(redis.ConnectionError):
        list(collector.collect())
    assert asked == [0.0, 2.0]


def test_a_login_that_may_not_ask_the_server_gets_all_else(brokered: TestFleet) -> None:
    client, keys = brokered.broker.client, brokered.app.keys
    client.execute_command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-info")
    pool = client.connection_pool.connection_kwargs
    blind = type(client)(
        host=pool["host"], port=pool["port"], username="blind", password="secret", decode_responses=True
    )
    try:
        names = {metric.name for metric in FleetCollector(blind, keys, "tasks").collect() if metric.samples}
    finally:
        blind.close()
    assert "gpuflow_tasks_unfinished" in names and "gpuflow_broker_memory_used_bytes" not in names


def test_the_steps_share_one_counter() -> None:
    assert "gpuflow.metrics" in ledger_script("commit").text and "gpuflow.metrics" in broker_script("publish").text
