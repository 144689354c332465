"""The reservation of a machine: one at a time, renewed, ended, and never believed when it cannot be true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.fleet import gpu_reservation
from gpuflow.fleet.gpu_locks import GpuLocks
from gpuflow.fleet.gpu_reservation import Reservation, Reservations


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gpu_reservation, "boot_seconds", lambda: clock.now)
    return clock


@pytest.fixture
def ledger(tmp_path: Path) -> GpuLocks:
    return GpuLocks(tmp_path, mutex_wait_seconds=0.05)


@pytest.fixture
def reservations(ledger: GpuLocks) -> Reservations:
    return Reservations(ledger)


def reserve(reservations: Reservations, task: str = "big", worker: str = "w1", **more: Any) -> Reservation:
    wanted = {"queue": "gpu-x4", "gpus": ["GPU-0", "GPU-1"], "term_seconds": 30, **more}
    return reservations.reserve(task=task, worker=worker, **wanted)


def test_the_first_one_has_it_and_renews_it(reservations: Reservations, clock: Clock) -> None:
    assert reservations.current() is None
    mine = reserve(reservations, deadline=1234.5)
    assert (mine.expires, mine.deadline, mine.gpus) == (1030, 1234.5, ("GPU-0", "GPU-1"))
    assert reserve(reservations, task="other") == mine
    assert reserve(reservations, worker="w2") == mine
    clock.now = 1029
    assert reserve(reservations, gpus=["GPU-1"]).expires == 1059
    assert reservations.current() == reserve(reservations, gpus=["GPU-1"])


def test_it_ends_by_itself_or_when_dropped(reservations: Reservations, clock: Clock) -> None:
    reserve(reservations)
    assert not reservations.drop("other", "w1")
    assert not reservations.drop("big", "w2")
    assert reservations.drop("big", "w1")
    assert not reservations.drop("big", "w1")
    assert reservations.current() is None
    reserve(reservations)
    clock.now = 1030
    assert reservations.current() is None
    assert reserve(reservations, task="next").task == "next"


@pytest.mark.parametrize(
    "change",
    [{"boot": "another start"}, {"expires": 99_999.0}, {"expires": "soon"}, {"gpus": None}, {"expires": float("nan")}],
)
def test_what_cannot_be_true_counts_nothing(
    reservations: Reservations, ledger: GpuLocks, clock: Clock, change: dict[str, Any]
) -> None:
    file = ledger.directory.path / "reservation.json"
    reserve(reservations)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert reservations.current() is None
    assert reserve(reservations, task="next").task == "next"


def test_a_writer_killed_in_the_middle_reserves_nothing(
    reservations: Reservations, ledger: GpuLocks, clock: Clock
) -> None:
    file = ledger.directory.path / "reservation.json"
    for rest in (b"", b"{", b"\xff", b'{"task": "x"}', b"[]", b"{}" + file.name.encode()):
        reserve(reservations)
        file.write_bytes(rest)
        assert reservations.current() is None


def test_a_newer_version_may_say_more(reservations: Reservations, ledger: GpuLocks, clock: Clock) -> None:
    file = ledger.directory.path / "reservation.json"
    reserve(reservations)
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_number": 9, "new_field": 1}))
    assert reservations.current() is not None


def test_no_term_is_too_long(reservations: Reservations, clock: Clock) -> None:
    assert reserve(reservations, term_seconds=1e9).expires == 1600
    assert reservations.current() is not None


def test_a_worker_that_hangs_with_the_mutex_is_named(reservations: Reservations, ledger: GpuLocks) -> None:
    with ledger.locked():
        for call in (reservations.current, lambda: reserve(reservations), lambda: reservations.drop("big", "w1")):
            with pytest.raises(GPUFlowError, match="mutex"):
                call()


def test_the_clock_of_the_machine_goes_on() -> None:
    assert 0 < gpu_reservation.boot_seconds() <= gpu_reservation.boot_seconds()
