"""What systemd is told, and when it is told nothing."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuflow.worker.systemd import END_SECONDS, EXTENSION_SECONDS, SystemdNotifier, SystemdWatch


def test_the_environment_is_taken_and_not_left_to_children() -> None:
    env = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "17", "X": "1"}
    assert SystemdNotifier.from_environment(env, pid=17) == SystemdNotifier(address="/run/notify", watchdog_seconds=30)
    assert env == {"X": "1"}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, None),
        ({"NOTIFY_SOCKET": "@abstract"}, SystemdNotifier(address="\0abstract")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "18"}, SystemdNotifier(address="/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "soon"}, SystemdNotifier(address="/s")),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "0"}, SystemdNotifier(address="/s")),
    ],
)
def test_what_is_no_service_is_told_nothing(env: dict[str, str], found: SystemdNotifier | None) -> None:
    assert SystemdNotifier.from_environment(env, pid=17) == found


def test_a_manager_that_is_gone_or_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    SystemdNotifier(address=str(tmp_path / "nobody")).send("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        for _ in range(2000):
            SystemdNotifier(address=str(tmp_path / "deaf")).send("WATCHDOG=1" * 50)


def watch(
    *,
    heartbeat: float,
    consumer: float,
    drains: bool = False,
    connecting: bool = False,
    signalled: bool = False,
    handed_back_at: float | None = None,
) -> SystemdWatch:
    runtime = SimpleNamespace(
        worker_id="w1",
        connecting=connecting,
        presence=SimpleNamespace(turned_at=heartbeat),
        leases=SimpleNamespace(ticked_at=consumer),
        admission=SimpleNamespace(draining=drains),
        stopper=SimpleNamespace(is_signalled=signalled, handed_back_at=handed_back_at),
        app=SimpleNamespace(settings=SimpleNamespace(notice_seconds=30.0, grace_seconds=10.0)),
    )
    return SystemdWatch(runtime, SystemdNotifier(address="/nowhere", watchdog_seconds=40))  # type: ignore[arg-type]


NOW = 1000.0


@pytest.mark.parametrize(
    ("heartbeat", "consumer", "stuck"),
    [
        (NOW, NOW, ""),
        (NOW - 19, NOW - 19, ""),
        (NOW - 21, NOW, "the heartbeat thread"),
        (NOW, NOW - 21, "the consumer loop"),
        (NOW, math.inf, ""),  # it has ended: the last tasks of a drain go on without it
    ],
)
def test_the_watchdog_is_fed_while_both_loops_go_on(heartbeat: float, consumer: float, stuck: str) -> None:
    told = watch(heartbeat=heartbeat, consumer=consumer)
    told.ready()
    lines = told.look(NOW, first_ready=False)
    assert lines == ([f"STATUS={stuck} of worker w1 does not go on"] if stuck else ["WATCHDOG=1"])


def test_more_time_is_asked_for_until_it_is_ready_and_while_it_drains() -> None:
    more = f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1e6:.0f}"
    told = watch(heartbeat=NOW, consumer=NOW)
    assert told.look(NOW, first_ready=False) == ["WATCHDOG=1", more]
    told.ready()
    assert told.look(NOW, first_ready=True) == ["READY=1", "STATUS=worker w1 takes work", "WATCHDOG=1"]
    drains = watch(heartbeat=NOW, consumer=NOW, drains=True, signalled=True)
    drains.ready()
    assert drains.look(NOW, first_ready=False) == ["STATUS=worker w1 drains", "STOPPING=1", "WATCHDOG=1", more]
    assert drains.look(NOW, first_ready=False) == ["WATCHDOG=1", more]
    hangs = watch(heartbeat=NOW, consumer=0.0, drains=True, signalled=True)
    assert more not in hangs.look(NOW, first_ready=False)


def test_a_drain_by_command_leaves_the_stop_of_the_service_to_systemd() -> None:
    drains = watch(heartbeat=NOW, consumer=NOW, drains=True)
    drains.ready()
    assert drains.look(NOW, first_ready=False) == ["STATUS=worker w1 drains", "WATCHDOG=1"]
    assert drains.look(NOW, first_ready=False) == ["WATCHDOG=1"]


@pytest.mark.parametrize("given", [{"consumer": math.inf}, {"consumer": NOW, "handed_back_at": NOW}])
def test_one_that_hangs_at_its_end_is_left_to_systemd(given: dict[str, float]) -> None:
    ends = watch(heartbeat=NOW, drains=True, signalled=True, **given)  # type: ignore[arg-type]
    ends.ready()
    assert "WATCHDOG=1" in ends.look(NOW, first_ready=False)
    late = NOW + 30 + 10 + END_SECONDS
    ends._runtime.presence.turned_at = late  # type: ignore[union-attr]
    if given["consumer"] == NOW:
        ends._runtime.leases.ticked_at = late  # type: ignore[misc]
    assert "WATCHDOG=1" in ends.look(late, first_ready=False)
    assert ends.look(late + 1, first_ready=False) == []


def test_a_worker_that_gets_ready_while_it_is_looked_at_says_so_at_the_next_look() -> None:
    told = watch(heartbeat=time.monotonic() + 1000, consumer=math.inf)
    sent: list[str] = []

    class Over(Exception):
        pass

    def send(*lines: str) -> None:
        told.ready()
        sent.extend(lines)
        if "READY=1" in sent or len(sent) > 20:
            raise Over

    told._notifier = SimpleNamespace(send=send, watchdog_seconds=0.04)  # type: ignore[assignment]
    with pytest.raises(Over):
        told.run()
    assert "READY=1" in sent
