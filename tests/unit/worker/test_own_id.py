"""Whose id a worker may take, at once or after a while, and of which former runs it then ends the leases."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gpuflow.broker.held_messages import HeldLease
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.worker import preflight
from gpuflow.worker.preflight import has_ended, own_process, require_own_id

NOBODY = 4_000_000  # above every process id of Linux


def entry(
    *, state: WorkerState = WorkerState.BUSY, at: float = 1.0, host: str = "box", process: str = ""
) -> WorkerEntry:
    return WorkerEntry(id="w1", state=state, hostname=host, pid=NOBODY, heartbeat_at=at, process=process)


GONE = entry(state=WorkerState.OFFLINE, host="elsewhere")


class Fleet:
    """Tells what there is of w1 at each look: its entry, and whether its lease is live; the last one stays."""

    client = keys = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: tuple[WorkerEntry | None, bool | None]) -> None:
        self._looks = list(looks)
        self.waited = 0
        monkeypatch.setattr(preflight, "held_leases", self._held)
        monkeypatch.setattr(preflight, "_LOOK_SECONDS", 0.001)

    def _held(self, *_: Any) -> Iterator[HeldLease]:
        for worker, live in (("w1", self._looks[0][1]), ("w2", True)):
            if live is not None:
                yield HeldLease(worker=worker, owner=f"{worker}:token", queue="cpu", priority=5, is_live=live)

    def find(self, _: str) -> WorkerEntry | None:
        found = self._looks[0][0]
        if len(self._looks) > 1:
            del self._looks[0]
        return found

    def _wait(self) -> None:
        self.waited += 1

    def ask(self, seconds: float = 60.0) -> list[str]:
        return require_own_id(
            cast("Any", self), "w1", "box", timeout_seconds=seconds, lease_seconds=seconds, alive=self._wait
        )


def other_process(**words: str) -> str:
    boot, namespace, pid, began = own_process().split()
    return " ".join({"boot": boot, "namespace": namespace, "pid": pid, "began": began, **words}.values())


def test_one_of_this_machine_that_has_ended_is_succeeded_at_once_with_its_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, (entry(process=other_process(pid=str(NOBODY))), True))
    assert fleet.ask() == ["w1:token"]
    assert not fleet.waited


def test_one_of_another_container_of_this_name_is_succeeded_and_its_leases_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, (entry(process=other_process(namespace="pid:[1]")), True))
    assert fleet.ask() == []


def test_one_that_lives_keeps_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GPUFlowError, match="in use by process"):
        Fleet(monkeypatch, (entry(process=own_process()), None)).ask()
    elsewhere = [(entry(host="elsewhere", at=at), None) for at in (1.0, 1.0, 2.0)]
    with pytest.raises(GPUFlowError, match=r"in use by process .* on elsewhere"):
        Fleet(monkeypatch, *elsewhere).ask()


def test_one_elsewhere_that_stops_meanwhile_is_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    left = entry(host="elsewhere", at=2.0, state=WorkerState.OFFLINE)
    fleet = Fleet(monkeypatch, (entry(host="elsewhere"), True), (left, True), (left, None))
    assert fleet.ask() == []
    assert fleet.waited == 2


@pytest.mark.parametrize("last", [GONE, None])
def test_leases_of_one_that_is_gone_are_waited_for_until_they_end(
    monkeypatch: pytest.MonkeyPatch, last: WorkerEntry | None
) -> None:
    fleet = Fleet(monkeypatch, (last, True), (last, True), (last, False))
    assert fleet.ask() == ["w1:token"]
    assert fleet.waited == 2
    with pytest.raises(GPUFlowError, match="sends no heartbeat and renews its leases"):
        Fleet(monkeypatch, (last, True)).ask(seconds=0.02)


@pytest.mark.parametrize(("live", "former"), [(None, []), (False, ["w1:token"])])
def test_one_that_is_gone_with_its_leases_is_succeeded_at_once(
    monkeypatch: pytest.MonkeyPatch, live: bool | None, former: list[str]
) -> None:
    fleet = Fleet(monkeypatch, (GONE, live))
    assert fleet.ask() == former
    assert not fleet.waited


def test_a_process_is_told_from_all_others_of_its_machine() -> None:
    assert has_ended(own_process()) is False
    assert has_ended(other_process(began="1")) is True
    assert has_ended(other_process(pid=str(NOBODY))) is True
    assert has_ended(other_process(boot="another")) is None
    assert has_ended("") is None
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    boot, namespace, *_ = own_process().split()
    its = f"{boot} {namespace} {child.pid} {preflight._began(child.pid)}"
    assert has_ended(its) is False
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(its) is True  # a zombie
    child.wait()
    assert has_ended(its) is True
