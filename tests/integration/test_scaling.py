"""Elastic scaling by real beats and workers: what a disabled worker does, who leads, launching and retiring."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError

from gpuflow.client import submit
from gpuflow.errors import BrokerUnavailable, GPUFlowError
from gpuflow.explaining import explain_records, find_records
from gpuflow.fleet.desired import AUTOMATIC, DesiredState
from gpuflow.fleet.identity import fleet_id, fleet_tag
from gpuflow.fleet.registry import FORSAKEN_SECONDS
from gpuflow.outages import Outage, SymptomFilter
from gpuflow.routing.capability import Capability
from gpuflow.scaling.autoscaler import Autoscaler, start
from gpuflow.scaling.model import Action, Family, Kind, Policy
from gpuflow.scaling.policy_file import Launching, LoadedPolicy
from gpuflow.scaling.provisioners import ProvisionerError, UnknownMachine, Wanted
from gpuflow.scaling.provisioners.local import LocalProcesses
from gpuflow.scaling.snapshot import read
from gpuflow.scaling.store import Leadership, Machine, NoLeader, ScalingStore, scaling_status
from tests.support.fleet import TestFleet, keep_log
from tests.support.waiting import eventually, patient

QUICK = {
    "HEARTBEAT_INTERVAL_SEC": "5",
    "GPUFLOW_LEASE_SEC": "10",
    "ELASTIC_AUTO_POLL_INTERVAL_SEC": "0.3",
    "ELASTIC_AUTO_TOGGLE_COOLDOWN_SEC": "0.5",
    "ELASTIC_AUTO_DISABLE_IDLE_SEC": "1",
    "ELASTIC_AUTO_MIN_ACTIVE_WORKERS": "0",
}
POLICY = """
schema: 1
families:
  - {name: local, provisioner: {kind: local}, max: 1, maxJobs: 4, launchDeadline: 60, workerOptions: [-c, "8"]}
"""


class Beat:
    """One real beat process."""

    def __init__(self, fleet: TestFleet, name: str, **env: str) -> None:
        self.log_path = fleet.folder / f"{name}.log"
        keep_log(self)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "INFO"],
                env={**_environment(fleet), **env},
                cwd=fleet.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=patient(10))


def _environment(fleet: TestFleet) -> dict[str, str]:
    return {
        **os.environ,
        **fleet.env,
        "REDIS_URL": fleet.broker.url,
        "RESULTS_DIR": str(fleet.results),
        "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir),
        "GPUFLOW_CACHE_DIR": str(fleet.folder / "cache"),
        "GPUFLOW_LOCK_DIR": str(fleet.folder / "locks"),
    }


def gpuflow(fleet: TestFleet, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments],
        env=_environment(fleet),
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def launched_by(fleet: TestFleet) -> LocalProcesses:
    """The machines of a fleet: those that bear the tag of its broker."""
    keys = fleet.app.keys
    tag = fleet_tag(fleet_id(fleet.app.redis, keys), keys)
    return LocalProcesses(fleet.settings, fleet.broker.url, tag)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[TestFleet]:
    """A fleet whose intervals are short; what was launched ends with it."""
    (tmp_path / "scaling.yaml").write_text(POLICY)
    made = TestFleet(tmp_path, env={**QUICK, "GPUFLOW_SCALING_POLICY": str(tmp_path / "scaling.yaml")})
    beats: list[Beat] = []
    made.beats = beats  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        for beat in beats:
            beat.close()
        launched = launched_by(made)
        for machine_id in launched.machines():
            launched.terminate(machine_id)
        made.close()


def beat(fleet: TestFleet, name: str, **env: str) -> Beat:
    made = Beat(fleet, name, **env)
    fleet.beats.append(made)  # type: ignore[attr-defined]
    return made


class Pretended:
    """A provisioner without machines; it fails when told to."""

    listed_within_seconds = 10.0

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.calls: list[str] = []
        self.fails = 0

    def launch(self, wanted: Wanted) -> None:
        self.calls.append(f"launch {wanted.id}")
        if self.fails:
            self.fails -= 1
            raise ProvisionerError("no quota")
        self.there[wanted.id] = wanted.family

    def terminate(self, machine_id: str) -> None:
        self.calls.append(f"terminate {machine_id}")
        self.there.pop(machine_id, None)

    def machines(self) -> dict[str, str]:
        return dict(self.there)

    def unknown(self) -> list[UnknownMachine]:
        return [UnknownMachine(id="box-old", family="box", fleet="gpuflow-old", host="gpu-box-2", pid=7)]


def scaler(fleet: TestFleet, provisioner: Pretended, name: str = "a", deadline: float = 60.0, **knobs: Any) -> Any:
    here = Capability(cpu_count=64, memory_mib=1 << 20, disk_free_mib=1 << 30)
    policy = Policy(**{"min_active": 0, "families": (Family(name="box", capability=here, most=2),), **knobs})
    loaded = LoadedPolicy(policy=policy, launching=(Launching(family="box", deadline_seconds=deadline),))
    made = Autoscaler(fleet.app, loaded, lambda one, tag: provisioner, name=name)
    made._leader.lead()
    return made


# -- without processes but the broker -------------------------------------------------------------------------------


def test_a_paused_leader_changes_nothing(fleet: TestFleet) -> None:
    client, keys = fleet.app.redis, fleet.app.keys
    first, second = Leadership(client, keys, 0.2, "first"), Leadership(client, keys, 60, "second")
    assert first.lead() and first.epoch == 1
    assert not second.lead() or second.epoch == 2
    eventually(second.lead, within=5)
    assert second.epoch == 2
    store = ScalingStore(client, keys)
    with pytest.raises(NoLeader):
        store.step("begin", Machine(id="m", family="box"), first)
    with pytest.raises(NoLeader):
        first.go_on()
    assert store.machines() == []
    client.set(keys.heartbeat("w"), 1)
    client.hset(keys.worker("w"), "state", "IDLE")
    for name, epoch in (("first", 1), ("second", 1), ("first", 2)):
        leader = (name, epoch)
        assert fleet.registry.desire("w", DesiredState.DISABLED, by=AUTOMATIC, leader=leader) == "fenced"
    assert fleet.registry.desire("w", DesiredState.DISABLED, by=AUTOMATIC, leader=("second", 2)) == "written"


def test_a_leader_that_lets_its_term_end_begins_a_new_epoch(fleet: TestFleet) -> None:
    leader = Leadership(fleet.app.redis, fleet.app.keys, 0.1, "one")
    assert leader.lead()

    def fenced() -> bool:
        try:
            ScalingStore(fleet.app.redis, fleet.app.keys).step("note", Machine(id="m", family="box"), leader)
        except NoLeader:
            return True
        return False

    eventually(fenced, within=5)
    with pytest.raises(NoLeader):
        leader.go_on()
    assert leader.epoch == 2


def test_a_beat_that_dies_before_the_launch_is_finished_by_the_next(fleet: TestFleet) -> None:
    submit(fleet.echo(), app=fleet.app)
    provider = Pretended()
    first = scaler(fleet, provider, "first")
    first._start = lambda *_: None  # it dies after it wrote what it is about to do
    first.round()
    (machine,) = ScalingStore(fleet.app.redis, fleet.app.keys).machines()
    assert provider.calls == []
    fleet.app.redis.hset(fleet.app.keys.scaling_leader, "until", "0")
    second = scaler(fleet, provider, "second")
    second.round()
    second.round()
    assert provider.calls == [f"launch {machine.id}"]
    assert [one.id for one in ScalingStore(fleet.app.redis, fleet.app.keys).machines()] == [machine.id]


def test_launches_that_fail_wait_and_machines_that_never_register_end(fleet: TestFleet) -> None:
    submit(fleet.echo(), app=fleet.app)
    provider = Pretended()
    provider.fails = 1
    one = scaler(fleet, provider, deadline=0.0)
    store = ScalingStore(fleet.app.redis, fleet.app.keys)
    one.round()
    counts = store.counts()
    assert counts["launch_failures"] == counts["failures:box"] == 1 and store.machines() == []
    assert one.round() == (), "it is held back"
    fleet.app.redis.hset(fleet.app.keys.scaling, "retry_at:box", "0")
    assert [action.kind for action in one.round()] == [Kind.LAUNCH]
    (machine,) = store.machines()
    one.round()
    assert store.counts()["never_registered"] == 1 and store.counts()["failures:box"] == 2
    assert provider.calls[-1] == f"terminate {machine.id}" and provider.there == {}
    late = fleet.registry.order(machine.id)[0]
    assert late.state is DesiredState.RETIRED, "a worker that comes after all is told to end"


def test_a_machine_of_ours_that_no_record_knows_ends_unless_its_worker_lives(fleet: TestFleet) -> None:
    provider = Pretended()
    provider.there = {"box-lost": "box", "box-works": "box"}
    client, keys = fleet.app.redis, fleet.app.keys
    _hold(fleet, "box-works")
    one = scaler(fleet, provider)
    one.round()
    assert provider.calls == ["terminate box-lost"]
    assert [machine.id for machine in ScalingStore(client, keys).machines()] == ["box-works"]
    one.round()
    assert provider.calls == ["terminate box-lost"], "one that holds work is never ended"
    _let_go(fleet)
    one.round()
    assert provider.there == {}


def test_work_whose_lease_has_ended_is_demand(fleet: TestFleet) -> None:
    provider = Pretended()
    one = scaler(fleet, provider)
    _hold(fleet, "box-gone")
    assert not one.round(), "what is held waits for nobody"
    fleet.app.redis.zadd(fleet.app.keys.leases, {"tag": _server_time(fleet) - 3600})
    assert [action.kind for action in one.round()] == [Kind.LAUNCH]


def test_a_flushed_broker_is_another_fleet_and_ends_nothing_of_the_first(fleet: TestFleet) -> None:
    # Given a leader of epoch 1 that has listed its machines, when the broker is flushed
    provider = Pretended()
    provider.there = {"box-works": "box"}
    one = scaler(fleet, provider)
    one._follow_fleet()
    before = one._tag
    sources = {family: one._source(provisioner) for family, provisioner in one._provisioners.items()}
    fleet.app.redis.flushall()
    # Then the round that goes on ends nothing
    with pytest.raises(NoLeader):
        one._tend(sources)
    assert provider.calls == [] and ScalingStore(fleet.app.redis, fleet.app.keys).machines() == []
    # And the next one has another tag
    tags: list[str] = []
    one._make = lambda launching, tag: tags.append(tag) or Pretended()
    one.round()
    assert tags == [one._tag] and one._tag != before


def test_while_a_provisioner_cannot_be_made_nothing_is_launched_and_the_cause_is_written(
    fleet: TestFleet, caplog: pytest.LogCaptureFixture
) -> None:
    # Given work for a machine, and a provisioner that cannot be made
    submit(fleet.echo(), app=fleet.app)
    provider, store = Pretended(), ScalingStore(fleet.app.redis, fleet.app.keys)
    one = scaler(fleet, provider)
    tries: list[str] = []

    def broken(_: Launching, tag: str) -> Pretended:
        tries.append(tag)
        raise ProvisionerError("no such profile")

    one._make = broken
    assert one.round() == one.round() == ()
    assert len(tries) == 2 and store.machines() == [] and store.counts().get("launched", 0) == 0
    # Then its cause is said once, as no outage of the broker
    one._poll_seconds = one._step_seconds = 0.01
    one.start()
    try:
        eventually(lambda: len(tries) >= 5, within=10, what="some rounds")
        said = [record for record in caplog.records if "no such profile" in record.getMessage()]
        assert [record.gpuflow["event"] for record in said] == ["scaling_failed"]  # type: ignore[attr-defined]
        assert all(SymptomFilter(Outage(lambda *_, **__: None)).filter(record) for record in said)
        # And when it can be made, the machine is launched
        one._make = lambda _, tag: provider
        eventually(lambda: provider.there, within=10, what="the machine")
    finally:
        one.stop()
        one.join()
    # And a broker that was flushed gets none of the provisioners of before
    fleet.app.redis.flushall()
    submit(fleet.echo(), app=fleet.app)
    calls, one._make = list(provider.calls), broken
    one._leader.lead()
    assert one.round() == one.round() == ()
    assert provider.calls == calls and store.machines() == []


def test_while_a_provisioner_cannot_be_made_workers_are_enabled_all_the_same(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scaler(fleet, Pretended())
    _disabled(fleet, "w1", AUTOMATIC, None)
    fleet.app.redis.set(fleet.app.keys.heartbeat("w1"), 1)
    one._leader.lead()

    def broken(*_: object) -> Pretended:
        raise ProvisionerError("no such profile")

    one._make = broken
    enable = Action(kind=Kind.ENABLE, worker="w1", reason="work waits")
    launch = Action(kind=Kind.LAUNCH, family="box", reason="work waits")
    monkeypatch.setattr("gpuflow.scaling.autoscaler.decide", lambda *_: (enable, launch))
    assert one.round() == (enable,)
    assert fleet.registry.order("w1")[0].state is DesiredState.ENABLED
    assert ScalingStore(fleet.app.redis, fleet.app.keys).machines() == []


def test_a_broker_that_is_away_is_an_outage_and_nothing_else_is(
    fleet: TestFleet, caplog: pytest.LogCaptureFixture
) -> None:
    one = scaler(fleet, Pretended())
    one._poll_seconds = one._step_seconds = 0.01
    causes = [GPUFlowError("gone"), RedisConnectionError("gone"), OperationalError("gone"), BrokerUnavailable("gone")]

    def away() -> bool:
        if not causes:
            one.stop()
            return False
        raise causes.pop(0)

    one._leader.lead = away
    one.run()
    said = [record for record in caplog.records if "gone" in record.getMessage()]
    events = [record.gpuflow["event"] for record in said]  # type: ignore[attr-defined]
    assert events == ["scaling_failed", *["scaling_not_done"] * 3]


def test_a_beat_takes_over_the_machines_of_a_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two machines in the place of before, of which this broker knows one
    (tmp_path / "scaling.yaml").write_text(POLICY)
    fleet = TestFleet(tmp_path, env={"GPUFLOW_SCALING_POLICY": str(tmp_path / "scaling.yaml")})
    folder = fleet.settings.state_dir / "machines"
    folder.mkdir(parents=True)
    me = psutil.Process()
    record = {"pid": me.pid, "created": me.create_time(), "family": "local"}
    for machine_id in ("local-ours", "local-theirs"):
        (folder / f"{machine_id}.json").write_text(json.dumps(record))
    machine = Machine(id="local-ours", family="local")
    fleet.app.redis.hset(fleet.app.keys.machines, machine.id, machine.to_json())
    # When a beat leads
    monkeypatch.setattr(Autoscaler, "start", lambda self: None)
    try:
        one = start(fleet.app)
        assert one is not None and one._leader.lead()
        one._follow_fleet()
        # Then that one is a machine of this fleet, and the other one is shown
        assert launched_by(fleet).machines() == {"local-ours": "local"}
        assert [other.id for other in ScalingStore(fleet.app.redis, fleet.app.keys).unknown()] == ["local-theirs"]
    finally:
        fleet.close()


def test_machines_of_others_are_listed_with_what_ends_them(fleet: TestFleet) -> None:
    provider = Pretended()
    scaler(fleet, provider).round()
    assert provider.calls == []
    (shown,) = scaling_status(fleet.app.redis, fleet.app.keys)["unknown"]
    assert (shown["id"], shown["fleet"]) == ("box-old", "gpuflow-old")
    assert shown["end"] == "kill 7  # on gpu-box-2"
    for text in (
        "[",
        "7",
        "[7]",
        '[{"id": "x", "pid": "seven"}]',
        '[{"id": "x", "newer": 1, "pid": "7", "host": "a"}]',
    ):
        fleet.app.redis.set(fleet.app.keys.unknown_machines, text)
        assert [one["end"] for one in scaling_status(fleet.app.redis, fleet.app.keys)["unknown"]] == (
            ["kill 7  # on a"] if "newer" in text else []
        )


def test_the_snapshot_counts_by_priority_and_keeps_the_prefix(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env={"GPUFLOW_KEY_PREFIX": "team1:"})
    try:
        for priority in (9, 5, 5, 0):
            submit({**fleet.echo(), "priority": priority}, app=fleet.app)
        seen = read(fleet.app.redis, fleet.app.keys, "celery").snapshot
        demand = next(one for one in seen.demands if one.queue == "cpu")
        assert demand.waiting == {9: 1, 5: 2, 0: 1} and demand.requirement is not None
        assert 0 <= demand.oldest_seconds < 60 and demand.task_seconds is None
        assert not seen.gathering
    finally:
        fleet.close()


def test_a_machine_that_ends_is_terminated_only_when_its_worker_holds_nothing(fleet: TestFleet) -> None:
    provider = Pretended()
    provider.there = {"box-late": "box"}
    client, keys = fleet.app.redis, fleet.app.keys
    one = scaler(fleet, provider)
    ScalingStore(client, keys).step("begin", Machine(id="box-late", family="box", state="ending"), one._leader)
    _hold(fleet, "box-late")
    one.round()
    assert provider.calls == []
    _let_go(fleet)
    one.round()
    assert provider.calls == ["terminate box-late"] and ScalingStore(client, keys).machines() == []


def test_a_provisioner_slower_than_the_term_does_not_end_it(fleet: TestFleet) -> None:
    submit(fleet.echo(), app=fleet.app)
    provider = Pretended()
    one = scaler(fleet, provider, "slow")
    client, key = fleet.app.redis, fleet.app.keys.scaling_leader
    one._leader._term_seconds, one._step_seconds = patient(0.3), patient(0.05)
    one._leader.go_on()  # the term that it began with is longer than anybody waits here

    def renewed() -> None:
        """Return when the term that ran at the beginning has ended: whoever still leads has renewed it."""
        until = float(client.hget(key, "until"))
        eventually(lambda: _server_time(fleet) > until, within=10, what="the end of the term")

    list_now, launch_now = provider.machines, provider.launch
    provider.machines = lambda: (renewed(), list_now())[1]  # type: ignore[method-assign]
    provider.launch = lambda wanted: (renewed(), launch_now(wanted))[1]  # type: ignore[method-assign]
    assert [action.kind for action in one.round()] == [Kind.LAUNCH]
    assert len(provider.there) == 1 and one._leader.epoch == 1


def _hold(fleet: TestFleet, worker: str) -> None:
    """Let a worker hold a message, under a lease that goes on."""
    client, keys = fleet.app.redis, fleet.app.keys
    client.hset(keys.owners, "tag", f"{worker}:token\n{keys.prefix}cpu")
    client.zadd(keys.leases, {"tag": _server_time(fleet) + 3600})


def _let_go(fleet: TestFleet) -> None:
    fleet.app.redis.hdel(fleet.app.keys.owners, "tag")
    fleet.app.redis.zrem(fleet.app.keys.leases, "tag")


def _disabled(fleet: TestFleet, name: str, by: str, leader_until: float | None) -> None:
    client, keys = fleet.app.redis, fleet.app.keys
    client.sadd(keys.workers, name)
    client.hset(keys.worker(name), mapping={"id": name, "state": "IDLE", "desired": "disabled", "desired_by": by})
    client.delete(keys.scaling_leader)
    if leader_until is not None:
        client.hset(keys.scaling_leader, mapping={"owner": "a", "epoch": "1", "until": f"{leader_until:.6f}"})


def _server_time(fleet: TestFleet) -> float:
    seconds, micros = fleet.app.redis.time()
    return float(seconds + micros / 1e6)


def test_a_new_life_forgets_the_autoscaler_and_keeps_the_operator(fleet: TestFleet) -> None:
    _disabled(fleet, "auto", AUTOMATIC, _server_time(fleet) + 60)
    _disabled(fleet, "hand", "manual", _server_time(fleet) + 60)
    for name, state in (("auto", DesiredState.ENABLED), ("hand", DesiredState.DISABLED)):
        fleet.registry.begin_anew(name)
        assert fleet.registry.order(name)[0].state is state
    fleet.app.redis.hset(fleet.app.keys.worker("late"), mapping={"desired": "retired", "desired_by": AUTOMATIC})
    fleet.registry.begin_anew("late")
    assert fleet.registry.order("late")[0].state is DesiredState.RETIRED


@pytest.mark.parametrize(
    ("by", "led_seconds_ago", "state"),
    [
        (AUTOMATIC, -10.0, DesiredState.DISABLED),
        (AUTOMATIC, FORSAKEN_SECONDS - 20, DesiredState.DISABLED),
        (AUTOMATIC, FORSAKEN_SECONDS + 1, DesiredState.ENABLED),
        (AUTOMATIC, None, DesiredState.ENABLED),
        ("manual", None, DesiredState.DISABLED),
    ],
)
def test_what_the_autoscaler_disabled_ends_with_it(
    fleet: TestFleet, by: str, led_seconds_ago: float | None, state: DesiredState
) -> None:
    until = None if led_seconds_ago is None else _server_time(fleet) - led_seconds_ago
    _disabled(fleet, "w1", by, until)
    assert fleet.registry.order("w1")[0].state is state
    assert fleet.app.redis.hget(fleet.app.keys.worker("w1"), "desired") == (
        None if state is DesiredState.ENABLED else "disabled"
    ), "what others read is what the worker follows"


def test_a_beat_that_does_not_scale_releases_what_an_earlier_one_disabled(fleet: TestFleet) -> None:
    client, keys = fleet.app.redis, fleet.app.keys
    _disabled(fleet, "hand", "manual", None)
    _disabled(fleet, "auto", AUTOMATIC, _server_time(fleet) + 60)
    assert fleet.registry.release_forsaken() == -1, "a beat leads"
    assert start(fleet.app) is None, "nobody has asked for scaling"
    client.hset(keys.scaling_leader, "until", "0")
    eventually(lambda: client.hget(keys.worker("auto"), "desired") is None, within=10, what="it is released")
    assert client.hget(keys.worker("hand"), "desired") == "disabled"


# -- real workers ----------------------------------------------------------------------------------------------------


def test_a_disabled_worker_takes_nothing_and_by_hand_wins(quick: TestFleet) -> None:
    one_worker = quick.start_worker("w1", "--max-jobs", "2")
    fleet = quick
    assert submit(fleet.echo(), app=fleet.app).get(timeout=patient(30))
    mean = fleet.app.redis.hget(fleet.app.keys.queue("cpu"), "task_seconds")
    assert mean is not None and 0 < float(mean) < 60
    assert "disabled by hand" in gpuflow(fleet, "workers", "disable", "w1", "--reason", "a new disk")
    eventually(lambda: fleet.registry.find("w1").enabled is False, within=4, what="followed at once")
    assert "IDLE, disabled (by hand: a new disk)" in gpuflow(fleet, "workers")
    shown = json.loads(gpuflow(fleet, "workers", "--json"))[0]
    assert shown["enabled"] is False and shown["desired"]["by"] == "manual"
    task = submit(fleet.echo(), app=fleet.app)
    fleet.app.send_task("gpuflow.maintenance.reconcile", queue="gpuflow.control")
    done = "Task gpuflow.maintenance.reconcile["
    eventually(lambda: done in (log := one_worker.log()) and "succeeded" in log.rpartition(done)[2], within=20)
    # A beat leads and sees that something waits: what was said by hand stands.
    one = beat(quick, "beat1", GPUFLOW_SCALING_POLICY="")
    eventually(lambda: ScalingStore(fleet.app.redis, fleet.app.keys).leader(), within=20, what="a leader")
    assert fleet.state(task.id) == "QUEUED"
    said = explain_records(fleet.app, find_records(fleet.app, task.id))[0].to_dict()
    assert "is disabled by hand: a new disk" in said["workers"][0]["text"]
    gpuflow(fleet, "workers", "release", "w1")
    assert task.get(timeout=patient(20))
    # It idles, and nobody has to be active: the beat disables it, and enables it when something waits.
    eventually(lambda: fleet.registry.find("w1").enabled is False, within=20, what="the idle worker disabled")
    assert "disabled (by autoscale: it has idled for" in gpuflow(fleet, "workers")
    assert submit(fleet.echo(), app=fleet.app).get(timeout=patient(20))
    found = json.loads(gpuflow(fleet, "scaling", "decisions", "--json"))
    reasons = {entry["action"]: entry["reason"] for entry in found}
    assert set(reasons) == {"enable", "disable"}
    counts = ScalingStore(fleet.app.redis, fleet.app.keys).counts()
    assert counts["enable"] >= 1 and counts["disable"] >= 1
    assert reasons["enable"] == "1 task waits in cpu and no enabled worker serves it"
    gpuflow(fleet, "workers", "enable", "w1")
    assert "enabled by hand" in gpuflow(fleet, "workers")
    one.close()
    assert "no worker 'w9'" in gpuflow(fleet, "workers", "disable", "w9", code=2)


def test_load_launches_once_under_two_beats_and_idle_retires(quick: TestFleet) -> None:
    fleet, store = quick, ScalingStore(quick.app.redis, quick.app.keys)
    first = beat(fleet, "beat1")
    eventually(store.leader, within=20, what="a leader")
    epoch = store.leader()["epoch"]
    second = beat(fleet, "beat2")
    tasks = [submit(fleet.echo(sleep_seconds=0.2), app=fleet.app) for _ in range(10)]
    eventually(store.machines, within=10, what="a machine")
    first.send(signal.SIGSTOP)  # in the middle of a launch
    eventually(lambda: (store.leader() or {}).get("epoch", 0) > epoch, within=10, what="the second beat leads")
    first.send(signal.SIGCONT)
    for task in tasks:
        assert task.get(timeout=patient(60))
    assert store.counts()["launched"] == 1
    names = [entry.id for entry in fleet.registry.workers()]
    assert len(names) == 1 and names[0].startswith("local-")
    second.send(signal.SIGKILL)  # whoever is left ends what idles
    eventually(lambda: not store.machines(), within=40, what="the machine retired")
    assert launched_by(fleet).machines() == {}
    actions = [entry["action"] for entry in reversed(store.decisions(50))]
    assert actions == ["launch", "retire", "terminate"]
    assert store.counts()["terminated"] == 1
    assert "retire" in gpuflow(fleet, "scaling", "decisions") and "launched" in gpuflow(fleet, "scaling")


def test_up_with_autoscale_launches_and_ends_its_workers(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env=QUICK)
    log_path = tmp_path / "up.log"
    options = ["--workers", "0", "--autoscale", "--max", "1", "--no-flower", "--no-gateway"]
    try:
        with log_path.open("ab") as log:
            up = subprocess.Popen(
                [sys.executable, "-c", "from gpuflow.cli import main; main()", "up", *options],
                env=_environment(fleet) | {"ELASTIC_AUTO_DISABLE_IDLE_SEC": "600"},
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            assert submit(fleet.echo(), app=fleet.app).get(timeout=patient(60))
            launched = launched_by(fleet)
            (name,) = launched.machines()
            assert name.startswith("local-")
            up.send_signal(signal.SIGINT)
            assert up.wait(timeout=patient(30)) == 0, log_path.read_text()
            assert launched.machines() == {}
        finally:
            if up.poll() is None:
                up.kill()
                up.wait()
            for machine_id in launched_by(fleet).machines():
                launched_by(fleet).terminate(machine_id)
    finally:
        fleet.close()


@pytest.mark.alone
def test_up_with_four_launched_workers_while_its_beat_is_killed_beside_another(quick: TestFleet) -> None:
    # Given `gpuflow up --autoscale --max 4`, whose workers run one task at once, and a second beat beside its own
    fleet, store = quick, ScalingStore(quick.app.redis, quick.app.keys)
    log_path = fleet.folder / "up.log"
    options = ["--workers", "0", "--autoscale", "--max", "4", "--max-jobs", "1", "--no-flower", "--no-gateway"]
    most: list[int] = []
    # its own policy is like this one, and launches for a minute of work
    policy = POLICY.replace("max: 1, maxJobs: 4", "max: 4, maxJobs: 1, targetBacklog: 1s")
    (fleet.folder / "scaling.yaml").write_text(policy)
    with log_path.open("ab") as log:
        up = subprocess.Popen(
            [sys.executable, "-c", "from gpuflow.cli import main; main()", "up", *options],
            env=_environment(fleet),
            cwd=fleet.folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def own_beat() -> psutil.Process | None:
        found = [one for one in psutil.Process(up.pid).children() if "beat" in one.cmdline()]
        return found[0] if found else None

    try:
        killed = eventually(own_beat, within=30, what="the beat of the cluster")
        beat(fleet, "beside")
        # When forty tasks come, and the cluster's beat is killed in the middle
        tasks = [submit(fleet.echo(sleep_seconds=0.5), app=fleet.app) for _ in range(40)]
        eventually(lambda: fleet.state(tasks[0].id) == "SUCCEEDED", within=60, what="the first result")
        killed.kill()
        again = eventually(
            lambda: (one := own_beat()) is not None and one.pid != killed.pid and one, within=30, what="another beat"
        )
        assert again.is_running()
        # Then each has run once: nothing is lost, and nobody was ended while busy
        for task in tasks:
            task.get(timeout=patient(120))
            most.append(len(store.machines()))
        assert {task.record().attempt for task in tasks} == {1}
        # and there were never more workers than allowed, and none is left when nothing waits
        assert 1 < max(most) <= 4
        eventually(lambda: store.machines() == [], within=60, what="the end of the machines")
        assert launched_by(fleet).machines() == {}
        counts = store.counts()
        assert counts["launched"] == counts["terminated"], "each launch is accounted for"
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGINT)
            up.wait(timeout=patient(60))


def test_up_ends_what_one_that_was_killed_has_launched_and_not_that_of_one_that_lives(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env=QUICK)
    launched = launched_by(fleet)
    options = ["up", "--workers", "0", "--autoscale", "--max", "1", "--no-flower", "--no-gateway"]
    ups: list[subprocess.Popen[bytes]] = []

    def up() -> subprocess.Popen[bytes]:
        with (tmp_path / "up.log").open("ab") as log:
            ups.append(
                subprocess.Popen(
                    [sys.executable, "-c", "from gpuflow.cli import main; main()", *options],
                    env=_environment(fleet) | {"ELASTIC_AUTO_DISABLE_IDLE_SEC": "600"},
                    cwd=tmp_path,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return ups[-1]

    try:
        # Given a launched worker, and another cluster of the folder that comes and goes
        first = up()
        assert submit(fleet.echo(), app=fleet.app).get(timeout=patient(60))
        (name,) = launched.machines()
        second = up()
        eventually(lambda: "ready" in (tmp_path / "up.log").read_text().partition("ready")[2], what="the second")
        second.send_signal(signal.SIGINT)
        assert second.wait(timeout=patient(30)) == 0
        # Then it is left alone
        assert name in launched.machines()
        # When its cluster is killed it stays, until the next one comes
        first.kill()
        first.wait()
        assert name in launched.machines()
        up()
        eventually(lambda: name not in launched.machines(), within=30, what="the end of the launched worker")
    finally:
        for one in ups:
            if one.poll() is None:
                one.send_signal(signal.SIGINT)
                one.wait(timeout=patient(30))
        for machine_id in launched.machines():
            launched.terminate(machine_id)
        fleet.close()


#: A provider of worker processes whose every second launch fails, the first one too.
PROVIDER = """
import json, os, pathlib, signal, subprocess, sys
asked, folder = json.load(sys.stdin), pathlib.Path(sys.argv[1])
machine = asked.get("machine", {})
def pids():
    found = {}
    for path in folder.glob("*.pid"):
        pid = int(path.read_text())
        try:
            alive = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            alive = False
        if alive:
            found[path.stem] = pid
    return found
if asked["action"] == "launch":
    with (folder / "launches").open("a+") as tries:
        tries.write("x")
    if (folder / "launches").stat().st_size % 2:
        sys.exit("no quota")
    if not (folder / f"{machine['id']}.pid").exists():
        argv = [sys.executable, "-m", "celery", "-A", "gpuflow", "worker", "--name", machine["id"], "--without-mingle"]
        with (folder / "workers.log").open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            worker = subprocess.Popen([*argv, *machine["workerOptions"]], start_new_session=True, **streams)
        (folder / f"{machine['id']}.pid").write_text(str(worker.pid))
    print("{}")
elif asked["action"] == "terminate":
    pid = pids().get(machine["id"])
    if pid:
        os.kill(pid, signal.SIGKILL)
    print("{}")
else:
    print(json.dumps({"machines": [{"id": name, "family": "box"} for name in pids()]}))
"""
FAILING = """
schema: 1
families:
  - name: box
    provisioner: {{kind: command, command: [{python}, {program}, {folder}]}}
    capability: {{cpus: 64, memory: 64GiB, disk: 64GiB}}
    max: 2
    maxJobs: 4
    launchDeadline: 60
    targetBacklog: 1s
    workerOptions: [-c, "8"]
"""


def test_forty_tasks_while_beats_die_and_every_second_launch_fails(quick: TestFleet) -> None:
    # Given two beats, and a provider of which every second launch fails
    fleet, folder = quick, quick.folder / "provider"
    folder.mkdir()
    (folder / "provider.py").write_text(PROVIDER)
    policy = FAILING.format(python=sys.executable, program=folder / "provider.py", folder=folder)
    (fleet.folder / "scaling.yaml").write_text(policy)
    first, _ = beat(fleet, "first"), beat(fleet, "second")
    store = ScalingStore(fleet.app.redis, fleet.app.keys)
    try:
        # When forty tasks come, and a beat is killed in the middle and another one comes
        tasks = [submit(fleet.echo(sleep_seconds=0.2), app=fleet.app) for _ in range(40)]
        eventually(lambda: fleet.state(tasks[0].id) == "SUCCEEDED", within=60, what="the first result")
        first.send(signal.SIGKILL)
        beat(fleet, "third")
        # Then each has run once, undisturbed
        for task in tasks:
            task.get(timeout=patient(60))
        assert {task.record().attempt for task in tasks} == {1}
        # And the fleet is empty in the end
        eventually(lambda: store.machines() == [], within=60, what="the end of the machines")
        counts = store.counts()
        assert counts["launch_failures"] >= 1 and counts.get("never_registered", 0) == 0
        assert counts["launched"] == counts["terminated"], "each launch is accounted for"
    finally:
        for path in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
