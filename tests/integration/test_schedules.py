"""Schedules: what is due is submitted once, by however many beats; what was missed is caught up once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuflow.client import get
from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.schedules.duty import Schedules
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
        store.put(schedule())
    store.put(schedule(cron="0 4 * * *"), replace=True)
    assert '"0 4 * * *"' in store.texts()["nightly"]
    assert store.remove("nightly") and not store.remove("nightly") and store.texts() == {}


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
    def __init__(self, fleet: TestFleet, name: str) -> None:
        self.log_path = fleet.folder / f"{name}.log"
        keep_log(self)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "INFO"],
                env=_environment(fleet),
                cwd=fleet.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

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
