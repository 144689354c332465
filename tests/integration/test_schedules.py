"""Schedules: what is due is submitted once, by however many beats; what was missed is caught up once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from redbeat.schedulers import get_redis  # type: ignore[import-untyped]

from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.cli.schedules import rows_of
from gpuflow.client import get
from gpuflow.errors import ArtifactError, GPUFlowError, InvalidTemplate
from gpuflow.schedules import duty
from gpuflow.schedules.celery_schedule import Scheduler
from gpuflow.schedules.duty import LONGEST_DELAY_SECONDS, POLL_SECONDS, Schedules
from gpuflow.schedules.store import LastRun, Schedule, ScheduleStore
from gpuflow.spec import parse
from tests.support.fleet import TestFleet, keep_log
from tests.support.waiting import eventually, patient

DAY = 86_400.0
MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC).timestamp()
TEMPLATE = parse({"taskType": "echo", "echo": {}}).to_dict()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def schedule(**fields: Any) -> Schedule:
    return Schedule(**{"name": "nightly", "cron": "0 3 * * *", "created_at": MIDNIGHT, "template": TEMPLATE, **fields})


def submitted(fleet: TestFleet) -> int:
    return int(fleet.app.redis.zcard(fleet.app.keys.pipelines))


def test_what_is_due_is_submitted_and_what_was_missed_once(fleet: TestFleet) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 3 * 3600 - 1)
    store.put(schedule())
    beat = Schedules(fleet.app, clock)
    assert beat.look() == []
    clock.now += 1
    (first,) = beat.look()
    assert store.runs()["nightly"] == LastRun(due=MIDNIGHT + 3 * 3600, pipeline=first)
    assert beat.look() == [] and submitted(fleet) == 1
    # After five days without a beat, another one
    clock.now += 5 * DAY
    (second,) = Schedules(fleet.app, clock).look()
    assert second != first and Schedules(fleet.app, clock).look() == []
    assert store.runs()["nightly"].due == MIDNIGHT + 5 * DAY + 3 * 3600 and submitted(fleet) == 2
    # A clock that was ahead for a while hides nothing
    store.note("nightly", LastRun(due=clock.now + 365 * DAY))
    assert beat.look() == [second] and submitted(fleet) == 2
    clock.now += DAY
    assert len(beat.look()) == 1 and submitted(fleet) == 3


def test_a_beat_that_dies_before_it_notes_submits_nothing_twice(fleet: TestFleet) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule())
    dying = Schedules(fleet.app, clock)
    dying._store.note = lambda *_: None  # type: ignore[method-assign]
    (first,) = dying.look()
    assert store.runs() == {}
    # And two at once, without the lock that takes turns
    found: list[list[str]] = []
    beats = [threading.Thread(target=lambda: found.append(Schedules(fleet.app, clock).look())) for _ in range(4)]
    for beat in beats:
        beat.start()
    for beat in beats:
        beat.join()
    assert {name for names in found for name in names} == {first} and submitted(fleet) == 1


def test_a_bad_schedule_keeps_no_other_from_its_run(fleet: TestFleet, caplog: pytest.LogCaptureFixture) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule(name="a-good"))
    store.put(schedule(name="b-bad", template={"stages": 7}))
    store.put(schedule(name="c-good"))
    fleet.app.redis.hset(fleet.app.keys.schedules, "a-garbage", "[")
    beat = Schedules(fleet.app, clock)
    assert len(beat.look()) == 2 and beat.look() == []
    assert store.runs()["b-bad"].error and store.runs()["b-bad"].due == MIDNIGHT + 3 * 3600


def test_what_cannot_be_a_schedule_is_refused(fleet: TestFleet) -> None:
    store = ScheduleStore(fleet.app.redis, fleet.app.keys)
    with pytest.raises(InvalidTemplate, match="cannot be named so"):
        store.put(schedule(name="../x"))
    with pytest.raises(InvalidTemplate, match="is no minute"):
        store.put(schedule(cron="99 * * * *"))
    with pytest.raises(InvalidTemplate, match="too large"):
        store.put(schedule(template={"spec": {"text": "x" * (1 << 20)}}))
    store.put(schedule())
    with pytest.raises(GPUFlowError, match="is there already"):
        store.put(schedule(created_at=MIDNIGHT + 1))
    store.put(schedule(cron="0 4 * * *"), replace=True)
    assert '"0 4 * * *"' in store.texts()["nightly"]
    assert store.remove("nightly") and not store.remove("nightly") and store.texts() == {}
    assert fleet.app.redis.hlen(fleet.app.keys.schedule_templates) == 0


def test_who_keeps_and_removes_schedules_stands_in_the_audit_log(fleet: TestFleet) -> None:
    store = ScheduleStore(fleet.app.redis, fleet.app.keys)
    store.put(schedule(owner="ana"))
    assert store.remove("nightly") and not store.remove("nightly")
    found, _ = AuditLog(fleet.app.redis, fleet.app.keys).newest(Filter(target="schedule:*"), 10, "")
    assert [(entry.text("action"), entry.text("target")) for entry in found] == [
        ("schedule.remove", "schedule:nightly"),
        ("schedule.put", "schedule:nightly"),
    ]


def test_at_the_limit_a_schedule_may_be_replaced(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.schedules.store.MOST_SCHEDULES", 1)
    store = ScheduleStore(fleet.app.redis, fleet.app.keys)
    store.put(schedule())
    store.put(schedule(cron="0 4 * * *"), replace=True)
    store.put(schedule(cron="0 4 * * *"))  # sent again after a lost answer
    with pytest.raises(GPUFlowError, match="there are 1 schedules"):
        store.put(schedule(name="other"), replace=True)
    with pytest.raises(GPUFlowError, match="is there already"):
        store.put(schedule(cron="0 5 * * *"))
    assert list(store.texts()) == ["nightly"] and '"0 4 * * *"' in store.texts()["nightly"]


def test_runs_that_cannot_be_read_stop_nothing(fleet: TestFleet) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    bad = ("[", "7", "{}", '{"due": "soon"}', '{"due": NaN}', '{"due": 1e300}', '{"due": 1' + "0" * 400 + "}")
    for number, text in enumerate(bad):
        store.put(schedule(name=f"bad-{number}"))
        fleet.app.redis.hset(fleet.app.keys.schedule_runs, f"bad-{number}", text)
    store.put(schedule(name="good"))
    store.note("good", LastRun(due=MIDNIGHT + 3 * 3600, pipeline="p"))
    assert store.runs() == {"good": LastRun(due=MIDNIGHT + 3 * 3600, pipeline="p")}
    assert {row["name"] for row in rows_of(fleet.app)} == {*(f"bad-{n}" for n in range(len(bad))), "good"}
    assert len(Schedules(fleet.app, clock).look()) == len(bad)
    assert len(store.runs()) == len(bad) + 1, "what was noted since can be read"


def test_what_was_removed_while_it_was_submitted_leaves_nothing(fleet: TestFleet) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule())
    beat = Schedules(fleet.app, clock)
    note = beat._store.note
    beat._store.note = lambda *noted: (store.remove("nightly"), note(*noted))[1]  # type: ignore[method-assign]
    assert len(beat.look()) == 1
    assert store.runs() == {}


def test_what_was_replaced_since_the_look_is_not_submitted(fleet: TestFleet) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule())
    beat = Schedules(fleet.app, clock)
    seen = beat._store.texts()
    beat._store.texts = lambda: seen  # type: ignore[method-assign]
    store.put(schedule(created_at=clock.now), replace=True)
    assert beat.look() == [] and submitted(fleet) == 0
    store.remove("nightly")
    assert beat.look() == [] and submitted(fleet) == 0


def test_a_store_that_is_away_is_noted_said_once_and_tried_less_and_less(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule())
    store.note("nightly", LastRun(due=MIDNIGHT - 21 * 3600, pipeline="before"))
    tries: list[float] = []

    def away(*_: Any, **__: Any) -> None:
        tries.append(clock.now)
        raise ArtifactError("no store is set")

    beat = Schedules(fleet.app, clock)
    with monkeypatch.context() as patched:
        patched.setattr(duty, "submit_pipeline", away)
        for _ in range(720):  # an hour
            assert beat.look() == []
            clock.now += POLL_SECONDS
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[:7] == [5, 10, 20, 40, 80, 160, 300] and set(pauses[7:]) == {LONGEST_DELAY_SECONDS}
    assert sum("schedule_not_submitted" in record.getMessage() for record in caplog.records) == 1
    error = "ArtifactError: no store is set"
    assert store.runs()["nightly"] == LastRun(due=MIDNIGHT - 21 * 3600, pipeline="before", error=error)
    assert rows_of(fleet.app)[0]["error"] == error
    # When the store is back, what was due is submitted; a clock that was put back makes nobody wait
    clock.now = MIDNIGHT + 3 * 3600
    (pipeline,) = beat.look()
    assert store.runs()["nightly"] == LastRun(due=MIDNIGHT + 3 * 3600, pipeline=pipeline)


def test_between_two_times_nothing_is_computed_and_no_template_is_read(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = ScheduleStore(fleet.app.redis, fleet.app.keys), Clock(MIDNIGHT + 4 * 3600)
    store.put(schedule())
    store.put(schedule(name="sunday", cron="0 0 * * sun"))
    beat = Schedules(fleet.app, clock)
    assert len(beat.look()) == 1
    with monkeypatch.context() as patched:
        patched.setattr(Schedule, "parsed", lambda _: pytest.fail("it was computed again"))
        patched.setattr(ScheduleStore, "template_text", lambda *_: pytest.fail("a template was read"))
        clock.now = MIDNIGHT + 27 * 3600 - 1
        assert beat.look() == []
    # A record that was replaced is read anew, and so it is when the clock was put back
    store.put(schedule(cron="30 3 * * *", created_at=clock.now), replace=True)
    assert beat.look() == []
    clock.now += 1801
    assert len(beat.look()) == 1
    clock.now -= 2
    assert beat.look() == []


# -- real processes --------------------------------------------------------------------------------------------------


def _environment(fleet: TestFleet) -> dict[str, str]:
    return {**os.environ, "REDIS_URL": fleet.broker.url, "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir)}


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


class Beat:
    def __init__(self, fleet: TestFleet, name: str, *options: str, app: str = "gpuflow") -> None:
        self.log_path = fleet.folder / f"{name}.log"
        keep_log(self)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", app, "beat", "-l", "INFO", *options],
                env=_environment(fleet),
                cwd=fleet.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=patient(10))


@pytest.fixture
def beats(fleet: TestFleet) -> Iterator[list[Beat]]:
    made = [Beat(fleet, "one"), Beat(fleet, "two")]
    yield made
    for beat in made:
        beat.close()


def test_two_beats_submit_once_and_the_one_that_is_left_goes_on(fleet: TestFleet, beats: list[Beat]) -> None:
    # Given a schedule, added and listed
    (fleet.folder / "echo.yaml").write_text("taskType: echo\necho: {}\n")
    added = gpuflow(fleet, "schedules", "add", "echo.yaml", "--cron", "0 0 * * *", "--name", "nightly")
    assert "nightly: next at" in added
    assert "has 1 fields" in gpuflow(fleet, "schedules", "add", "echo.yaml", "--cron", "now", code=2)
    # When its last midnight was missed: it was made two days ago
    store = ScheduleStore(fleet.app.redis, fleet.app.keys)
    (text,) = store.texts().values()
    record = json.loads(text)
    record["createdAt"] -= 2 * DAY
    fleet.app.redis.hset(fleet.app.keys.schedules, "nightly", json.dumps(record))
    # Then two beats submit it once
    eventually(lambda: "nightly" in store.runs(), within=30, what="the run that was missed")
    run = store.runs()["nightly"]
    assert submitted(fleet) == 1
    # And the other one, which must think that it is not done yet, changes nothing
    os.kill(beats[0].process.pid, signal.SIGKILL)
    fleet.app.redis.hdel(fleet.app.keys.schedule_runs, "nightly")
    fleet.app.redis.delete(f"{fleet.app.keys.prefix}gpuflow.schedules.lock")
    eventually(lambda: store.runs().get("nightly") == run, within=30, what="the same run, by the second beat")
    assert submitted(fleet) == 1
    assert "nightly" in gpuflow(fleet, "schedules") and run.pipeline in gpuflow(fleet, "schedules", "list", "--json")
    # And it runs
    fleet.start_worker()
    assert get(run.pipeline, app=fleet.app).wait(timeout=patient(60)).state == "SUCCEEDED"
    assert "is removed" in gpuflow(fleet, "schedules", "remove", "nightly")
    assert "no schedule" in gpuflow(fleet, "schedules", "remove", "nightly", code=2)


@pytest.fixture
def quick_beat(fleet: TestFleet) -> Iterator[Beat]:
    """Yield a beat that asks the broker each second."""
    made = Beat(fleet, "quick", "--max-interval", "1")
    eventually(lambda: "lock_of_beats_taken" in made.log(), within=30, what="the lock of beats")
    yield made
    made.close()


def _refusing_password(fleet: TestFleet) -> None:
    fleet.broker.client.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
    fleet.broker.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def _taking_it_again(fleet: TestFleet) -> None:
    fleet.broker.client.execute_command(
        "ACL", "SETUSER", "default", "resetpass", f">{urlsplit(fleet.broker.url).password}"
    )


@pytest.mark.parametrize("fault", ["away", "full", "replica", "password"])
def test_a_beat_outlives_what_its_broker_does(fleet: TestFleet, quick_beat: Beat, fault: str) -> None:
    client = fleet.broker.client
    before = quick_beat.log()
    begin, end = {
        "away": (fleet.broker.kill, fleet.broker.restart),
        "full": (lambda: client.config_set("maxmemory", 1), lambda: client.config_set("maxmemory", 0)),
        "replica": (
            lambda: client.execute_command("REPLICAOF", "127.0.0.1", 1),
            lambda: client.execute_command("REPLICAOF", "NO", "ONE"),
        ),
        "password": (lambda: _refusing_password(fleet), lambda: _taking_it_again(fleet)),
    }[fault]

    begin()
    said = {"away": "broker_lost", "full": "broker_refuses", "replica": "broker_refuses", "password": "broker_denies"}
    eventually(lambda: said[fault] in quick_beat.log()[len(before) :], within=40, what="its line")
    end()

    held = f"{fleet.app.keys.prefix}redbeat::lock"
    fleet.broker.client.delete(held)  # it has to be asked for again
    eventually(lambda: fleet.broker.client.exists(held), within=40, what="the lock of beats")
    assert quick_beat.process.poll() is None, quick_beat.log()[-3000:]
    assert len(quick_beat.log()[len(before) :].splitlines()) < 20, quick_beat.log()[-5000:]


def test_a_beat_writes_its_schedule_again_to_a_server_that_has_lost_its_memory(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fleet.folder / "periodic.py").write_text(
        "from gpuflow.celery_app import app\n"
        "app.conf.beat_schedule = {'hourly': {'task': 'gpuflow.maintenance.reconcile', 'schedule': 3600.0}}\n"
    )
    beat = Beat(fleet, "periodic", "--max-interval", "1", app="periodic")
    held, entry = (f"{fleet.app.keys.prefix}redbeat:{name}" for name in (":lock", "hourly"))
    client = fleet.broker.client
    try:
        eventually(lambda: client.exists(held) and client.exists(entry), within=40, what="the lock and the entry")
        client.flushall()
        eventually(lambda: client.exists(held) and client.exists(entry), within=40, what="both again")
    finally:
        beat.close()


class TellsAnother(Scheduler):
    """A beat that stands still after its first task for so long that another has the lock then."""

    submitted: ClassVar[list[str]] = []

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        super().apply_async(entry, *args, **kwargs)
        self.submitted.append(entry.name)
        get_redis(self.app).set(self.lock_key, "another beat", px=60_000)


def test_a_beat_that_lost_the_lock_between_two_tasks_submits_no_more(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    often = {"task": "gpuflow.maintenance.reconcile", "schedule": 0.1}
    monkeypatch.setitem(fleet.app.conf, "beat_schedule", {"one": often, "two": often})
    monkeypatch.setattr(TellsAnother, "submitted", [])
    beat = TellsAnother(fleet.app, max_interval=1)
    eventually(lambda: all(entry.is_due()[0] for entry in beat.schedule.values()), what="two entries that are due")

    for _ in range(3):
        beat.tick()

    assert len(beat.submitted) == 1
    assert "Traceback" not in caplog.text
    fleet.broker.client.delete(beat.lock_key)
    beat.tick()
    assert len(beat.submitted) == 2


def test_a_beat_that_starts_without_its_broker_waits_for_it(fleet: TestFleet) -> None:
    fleet.broker.kill()
    beat = Beat(fleet, "early", "--max-interval", "1")
    try:
        eventually(lambda: "broker_lost" in beat.log(), within=40, what="its line")
        fleet.broker.restart()
        eventually(lambda: "lock_of_beats_taken" in beat.log(), within=40, what="the lock of beats")
        assert beat.process.poll() is None and "Traceback" not in beat.log()
    finally:
        beat.close()


def test_a_beat_without_the_lock_waits_for_it_whatever_its_broker_does(fleet: TestFleet, quick_beat: Beat) -> None:
    second = Beat(fleet, "second", "--max-interval", "1")
    try:
        eventually(lambda: "Starting" in second.log(), within=30, what="the second beat")
        fleet.broker.kill()
        eventually(lambda: "broker_lost" in second.log(), within=40, what="its line")
        fleet.broker.restart()
        os.kill(quick_beat.process.pid, signal.SIGKILL)
        fleet.broker.client.delete(f"{fleet.app.keys.prefix}redbeat::lock")
        eventually(lambda: "lock_of_beats_taken" in second.log(), within=40, what="the lock of beats")
        assert second.process.poll() is None
    finally:
        second.close()
