"""A real worker under a service manager: a datagram socket that reads what systemd would."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.client import submit
from tests.fixtures.fleets import fleet
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

__all__ = ["fleet"]


class Manager:
    """The socket of a service manager, and the lines that came."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.path = path
        self.lines: list[str] = []

    def read(self) -> list[str]:
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.lines += self.socket.recv(65_536).decode().splitlines()
        return self.lines

    def next(self, seconds: float) -> str:
        """Return the next message, or "" when none comes."""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(65_536).decode()
        except TimeoutError:
            return ""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.socket.close()


def test_ready_alive_stopping(fleet: TestFleet, manager: Manager, tmp_path: Path) -> None:
    env = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"}
    fleet.broker.kill()
    worker = fleet.spawn_worker("w1", env=env)
    eventually(lambda: any(line.startswith("EXTEND_") for line in manager.read()), within=60, what="more time")
    assert "READY=1" not in manager.lines
    fleet.broker.restart()
    eventually(lambda: "READY=1" in manager.read(), within=60, what="ready")
    eventually(lambda: manager.read().count("WATCHDOG=1") > 3, within=60, what="signs of life")

    gate = tmp_path / "gate"
    task = submit(fleet.echo(until_exists=str(gate), output=1), app=fleet.app)
    eventually(lambda: task.state == "RUNNING", within=60)
    worker.send(signal.SIGTERM)
    eventually(lambda: "STOPPING=1" in manager.read(), within=60, what="stopping")
    count = sum(line.startswith("EXTEND_") for line in manager.lines)
    eventually(
        lambda: sum(line.startswith("EXTEND_") for line in manager.read()) > count + 1, within=60, what="more time"
    )
    gate.touch()
    assert worker.process.wait(timeout=patient(30)) == 0
    assert manager.read().count("READY=1") == 1
    assert [line for line in manager.lines if line.startswith("STATUS=")][-1] == "STATUS=worker w1 has ended"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR2])
def test_a_worker_that_hangs_feeds_no_watchdog(fleet: TestFleet, manager: Manager, number: signal.Signals) -> None:
    """SIGSTOP stops all of it; SIGUSR2 hangs the consumer loop alone, while every thread goes on."""
    env = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "6000000"}
    worker = fleet.start_worker("w1", "--include", "hangs_on_signal", env=env)
    eventually(lambda: "WATCHDOG=1" in manager.read(), within=60, what="signs of life")
    worker.send(number)
    if number == signal.SIGUSR2:
        status = "STATUS=the consumer loop of worker w1 does not go on"
        eventually(lambda: status in manager.read(), within=60, what="the loop that hangs is named")
        assert "WATCHDOG=1" not in manager.next(patient(10))
    else:
        manager.read()
        eventually(lambda: manager.next(4.0) == "", within=60, what="no sign of life for twice the usual pause")
    worker.send(signal.SIGKILL)
