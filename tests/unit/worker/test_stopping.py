"""The stopper has a consumer loop that sleeps see at once that it is to end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state
from kombu.asynchronous import Hub, get_event_loop, set_event_loop

from gpuflow.worker.stopping import Stopper
from tests.support.waiting import eventually, patient


@pytest.fixture
def hub() -> Iterator[Hub]:
    before = get_event_loop()
    made = Hub()
    set_event_loop(made)
    yield made
    set_event_loop(before)
    made.close()
    state.should_stop = state.should_terminate = None


def idle_runtime() -> Any:
    admission = SimpleNamespace(draining=False, sessions=None, idle=lambda: True, has_had_its_job=lambda: False)
    return SimpleNamespace(
        admission=admission,
        worker_id="w1",
        running={},
        ephemeral=False,
        leases=SimpleNamespace(is_stopping=False),
        stop_replicas=lambda: None,
        stop_all=lambda why: None,
    )


@pytest.mark.parametrize(("cold", "ends"), [(False, (0, None)), (True, (None, 1))])
def test_a_sleeping_consumer_loop_is_woken_when_it_is_to_end(hub: Hub, cold: bool, ends: Any) -> None:
    told: list[Any] = []
    hub.call_soon = lambda *given: told.append((state.should_stop, state.should_terminate))
    stopper = Stopper(idle_runtime())

    stopper.start()
    if not cold:
        stopper.drain("test")
        eventually(lambda: bool(told), what="a loop that is woken")
    stopper._on_quit(3, None)
    stopper.join(patient(30))

    assert not stopper.is_alive()
    assert told[0] == ends
    assert told[-1][1] == 1
