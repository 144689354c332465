"""Five workers get another password of the broker and a newer version, one after the other, under load."""

from __future__ import annotations

import os
import signal
from urllib.parse import urlsplit

import pytest

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.explaining import explain
from gpuflow.settings import Settings
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.chaos.test_versions import CURRENT, HERE, NEWER, be_of
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import patient

#: Ten workers, and an account of every attempt.
pytestmark = pytest.mark.alone

NEW_PASSWORD = "another-password-of-the-broker"
WORKERS = 5
#: Tasks that are submitted at each step; each takes about this long.
AT_A_TIME, SECONDS = 12, 0.5


def login(fleet: TestFleet, url: str) -> None:
    """Have the client of this test use another address of the broker."""
    fleet.app.close()
    fleet.app.redis.close()
    fleet.broker.client.close()
    env = {"REDIS_URL": url, "RESULTS_DIR": str(fleet.results), "GPUFLOW_STATE_DIR": str(fleet.folder / "state")}
    fleet.settings = Settings.load(env=env, cwd=fleet.folder)
    fleet.app = GPUFlow("gpuflow", settings=fleet.settings)
    fleet.broker.client = fleet.app.redis
    fleet.registry.client = fleet.app.redis


def test_a_password_and_a_version_change_under_load_and_nothing_is_lost(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_of(CURRENT, monkeypatch)
    old_url, old_password = fleet.broker.url, str(urlsplit(fleet.broker.url).password)
    new_url = old_url.replace(old_password, NEW_PASSWORD)
    env = {**LEASE, "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    ids: list[str] = []

    def load() -> None:
        for number in range(AT_A_TIME):
            ids.append(submit(fleet.echo(output=number, sleep_seconds=SECONDS), app=fleet.app).id)

    workers = [fleet.spawn_worker(f"old-{number}", "--max-jobs", "1", env=env) for number in range(WORKERS)]
    for worker in workers:
        worker.ready()
    load()

    # Given: the broker takes both passwords
    fleet.broker.client.acl_setuser("default", enabled=True, passwords=[f"+{NEW_PASSWORD}"])
    login(fleet, new_url)
    newer: list[WorkerProcess] = []
    laggard = workers[-1]
    for number, worker in enumerate(workers[:-1]):
        # When: one worker after the other is replaced by one with the new password and the newer version
        started = fleet.spawn_worker(
            f"new-{number}", "--max-jobs", "1", "--include", "newer_version", env={**env, "REDIS_URL": new_url}
        )
        load()
        newer.append(started.ready())
        worker.send(signal.SIGTERM)
        assert worker.process.wait(timeout=patient(60)) == 0, worker.log()[-2000:]

    # and then the senders, while one old worker is left: it leaves newer tasks to the others, and `explain` says why
    be_of(NEWER, monkeypatch)
    load()
    (told,) = explain(ids[-1], app=fleet.app)
    kinds = {one.worker: one.kind for one in told.workers}
    assert kinds[laggard.name] == "outdated", kinds
    laggard.send(signal.SIGTERM)
    assert laggard.process.wait(timeout=patient(60)) == 0
    load()

    # When the old password goes, under load
    fleet.broker.client.acl_setuser("default", enabled=True, passwords=[f"-{old_password}"])
    try:
        load()
        refused = fleet.spawn_worker("refused", env={**env, "REDIS_URL": old_url})
        assert refused.process.wait(timeout=patient(60)) == 2
        assert refused.log().count("event=token_refused") == 1

        # Then nothing was lost, and no attempt was for nothing
        records = check(fleet, ids)
        assert {record.attempt for record in records} == {1}
        assert all(record.failures == 0 for record in records)
        assert all(worker.process.poll() is None for worker in newer)
        assert len({record.worker for record in records}) > WORKERS
    finally:
        fleet.broker.client.acl_setuser("default", enabled=True, passwords=[f"+{old_password}"])
