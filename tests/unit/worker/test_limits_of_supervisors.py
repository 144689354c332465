"""A limit or a revoke reaches the attempt of a supervised task, and nothing of its supervisor once that is over."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpuflow.worker import pool
from tests.support.waiting import eventually


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return which threads were interrupted."""
    found: list[Any] = []
    monkeypatch.setattr(pool, "raise_in_thread", lambda ident, error: found.append((ident, error)))
    return found


def runtime(monkeypatch: pytest.MonkeyPatch, *, begun: set[int]) -> SimpleNamespace:
    made = SimpleNamespace(begun=begun, stopped=[], runs=False)
    made.stop = lambda task, reason, at_once=False: made.stopped.append((task, reason, at_once)) or made.runs
    monkeypatch.setattr(pool, "find", lambda: made)
    return made


def job(*, is_supervised: bool = True) -> pool.Job:
    made = pool.Job("a", is_supervised=is_supervised)
    made.thread_ident = threading.get_ident()
    return made


@pytest.mark.parametrize("how", ["soft", "hard", "revoked"])
def test_nothing_interrupts_a_supervisor_whose_attempt_is_over(
    monkeypatch: pytest.MonkeyPatch, struck: list[Any], how: str
) -> None:
    runtime(monkeypatch, begun={threading.get_ident()})
    one, threads = job(), pool.SupervisorPool(limit=1)

    if how == "revoked":
        one.terminate()
    else:
        (threads._soft if how == "soft" else threads._hard)(one, 1.0, None)

    assert struck == [] and not one.told and one.timers == []


def test_a_limit_waits_for_an_attempt_that_has_not_begun(monkeypatch: pytest.MonkeyPatch, struck: list[Any]) -> None:
    found = runtime(monkeypatch, begun=set())
    one = job()

    pool.SupervisorPool(limit=1)._hard(one, 1.0, None)
    assert len(one.timers) == 1
    found.runs = True

    eventually(lambda: len(found.stopped) == 2, what="another look")
    assert found.stopped[-1] == ("a", "timeout", True) and struck == [] and len(one.timers) == 1


def test_a_plain_task_is_interrupted_in_its_thread(monkeypatch: pytest.MonkeyPatch, struck: list[Any]) -> None:
    runtime(monkeypatch, begun=set())
    one = job(is_supervised=False)

    pool.SupervisorPool(limit=1)._hard(one, 1.0, None)

    assert struck == [(one.thread_ident, SystemExit)] and one.told
