"""Result objects that are dropped: their subscription ends without a word, whatever the broker does."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.app.task import Context
from celery.exceptions import TimeoutError as WaitTimeout
from celery.utils import uuid

from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was raised where nobody can catch it."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    return seen


def waited_for(fleet: TestFleet) -> Any:
    """Return a result whose wait is over before it came, and whose subscription stands."""
    result = fleet.app.AsyncResult(uuid())
    with pytest.raises(WaitTimeout):
        result.get(timeout=0.01)
    return result


def store(fleet: TestFleet, task_id: str) -> None:
    meta = fleet.app.backend.meta("SUCCESS", "stored", Context(id=task_id))
    fleet.broker.client.set(fleet.app.keys.celery_result(task_id), meta)


def test_a_result_that_is_dropped_in_an_outage_waits_for_no_broker(
    fleet: TestFleet, ignored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, kept = fleet.app.backend.result_consumer, waited_for(fleet)
    dropped = [waited_for(fleet) for _ in range(3)]  # what is sent first into a connection that is gone may be taken
    connects: list[int] = []
    assert len(consumer.subscribed_to) == 4
    fleet.broker.kill()
    with monkeypatch.context() as patched:
        patched.setattr(consumer, "_reconnect", lambda: connects.append(1))
        for result in dropped:
            fleet.app.backend.remove_pending_result(result)
        del dropped, result
        gc.collect()
    assert len(consumer.subscribed_to) == 1 and not connects and not ignored

    fleet.broker.restart()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(kept.get, timeout=patient(30))
        store(fleet, kept.id)
        assert waiting.result(timeout=patient(30)) == "stored"


def test_a_result_that_is_dropped_after_its_app_was_closed_opens_no_connection(
    fleet: TestFleet, ignored: list[Any]
) -> None:
    consumer, dropped = fleet.app.backend.result_consumer, waited_for(fleet)
    assert fleet.broker.client.pubsub_channels()
    consumer.stop()
    eventually(lambda: not fleet.broker.client.pubsub_channels(), what="the end of the subscription")
    subscribers = len(fleet.broker.client.client_list())
    fleet.app.backend.remove_pending_result(dropped)
    del dropped
    gc.collect()
    assert not consumer.subscribed_to and not ignored
    assert len(fleet.broker.client.client_list()) <= subscribers

    again = fleet.app.AsyncResult(uuid())
    store(fleet, again.id)
    assert again.get(timeout=patient(30)) == "stored", "a consumer that was stopped starts again"
