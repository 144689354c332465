"""Tells systemd how the worker is: ready, alive, stopping. The protocol of sd_notify(3), one datagram a message.

    READY=1                 the worker consumes
    WATCHDOG=1              heartbeat thread and consumer loop both went on lately; every quarter of WatchdogSec
    EXTEND_TIMEOUT_USEC=    it still waits for the broker at its start, or for its tasks after a signal
    STOPPING=1              a signal has told it to end; a drain that `gpuflow workers drain` began is a STATUS only, as
                            systemd would not send the signal of a later `systemctl stop`

A worker that is to be gone and is not (its tasks were told to hand themselves back, or its consumer has ended, and the
time that this may take is over) is told of no more: systemd then ends it.

Nothing is sent where NOTIFY_SOCKET is not set, and a message that cannot be sent is not missed.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpuflow.worker.runtime import Runtime

#: systemd grants so much more time with each message while the worker starts or drains, in seconds.
EXTENSION_SECONDS: Final = 60.0
#: What the end of a worker may take beyond the notice and the grace of its tasks, in seconds.
END_SECONDS: Final = 60.0
#: Longest pause between two looks, in seconds.
_LOOK_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class SystemdNotifier:
    """Sends messages to the service manager. `address` is that of its socket, `watchdog_seconds` its WatchdogSec."""

    address: str
    watchdog_seconds: float | None = None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int | None = None) -> SystemdNotifier | None:
        """Return the one that the environment describes, and remove that from it: children are not the service."""
        path = environment.pop("NOTIFY_SOCKET", "")
        usec, owner = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if not path.startswith(("/", "@")):
            return None
        mine = owner in ("", str(pid or os.getpid()))
        seconds = int(usec) / 1e6 if usec.isdecimal() and int(usec) > 0 and mine else None
        return cls(address="\0" + path[1:] if path.startswith("@") else path, watchdog_seconds=seconds)

    def send(self, *lines: str) -> None:
        """Send one message of several lines `NAME=value`."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
            made.setblocking(False)
            made.sendto("\n".join(lines).encode(), self.address)


class SystemdWatch(threading.Thread):
    """Sends what systemd is to know, until the process ends."""

    def __init__(self, runtime: Runtime, notifier: SystemdNotifier) -> None:
        super().__init__(name="gpuflow-service", daemon=True)
        self._runtime = runtime
        self._notifier = notifier
        self._is_ready = self._is_stopping = self._drains = False
        self._ended_at: float | None = None
        self._wake = threading.Event()

    def ready(self) -> None:
        """Say that work is taken; called each time that the consumer is ready, and said once."""
        self._is_ready = True
        self._wake.set()

    def ended(self) -> None:
        """Say that no work is taken any more: systemd shows the last thing that it was told of a service that ended."""
        self._drains = True
        self._notifier.send(f"STATUS=worker {self._runtime.worker_id} has ended")

    def run(self) -> None:
        """Look at the worker, and tell."""
        pause = min(_LOOK_SECONDS, (self._notifier.watchdog_seconds or 4 * _LOOK_SECONDS) / 4)
        was_ready = False
        while True:
            is_ready = self._is_ready
            if lines := self.look(time.monotonic(), first_ready=is_ready and not was_ready):
                self._notifier.send(*lines)
            was_ready = is_ready
            self._wake.wait(0.2 if self._runtime.admission.draining else pause)
            self._wake.clear()

    def look(self, now: float, *, first_ready: bool) -> list[str]:
        """Return what is to be told now."""
        lines = []
        drains, stopper = self._runtime.admission.draining, self._runtime.stopper
        is_signalled = stopper is not None and stopper.is_signalled
        limit = (self._notifier.watchdog_seconds or 2 * EXTENSION_SECONDS) / 2
        stuck = self._stuck(now, limit)
        if first_ready:
            lines += ["READY=1", f"STATUS=worker {self._runtime.worker_id} takes work"]
        if drains and not self._drains:
            self._drains = True
            lines.append(f"STATUS=worker {self._runtime.worker_id} drains")
        if is_signalled and not self._is_stopping:
            self._is_stopping = True
            lines.append("STOPPING=1")
        if self._is_overdue(now):
            return lines
        if stuck:
            lines.append(f"STATUS={stuck} of worker {self._runtime.worker_id} does not go on")
            return lines
        if self._notifier.watchdog_seconds is not None:
            lines.append("WATCHDOG=1")
        if is_signalled or not self._is_ready:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1e6:.0f}")
        return lines

    def _stuck(self, now: float, within_seconds: float) -> str:
        """Return the loop that has not gone on within this time, or ""."""
        runtime = self._runtime
        if runtime.presence is not None and now - runtime.presence.turned_at > within_seconds:
            return "the heartbeat thread"
        return "the consumer loop" if not runtime.connecting and now - runtime.leases.ticked_at > within_seconds else ""

    def _is_overdue(self, now: float) -> bool:
        """Whether the worker should have gone by now."""
        stopper = self._runtime.stopper
        if self._ended_at is None and self._runtime.leases.ticked_at == math.inf:
            self._ended_at = now
        begun = [self._ended_at, stopper.handed_back_at if stopper is not None else None]
        first = min((at for at in begun if at is not None), default=None)
        settings = self._runtime.app.settings
        return first is not None and now > first + settings.notice_seconds + settings.grace_seconds + END_SECONDS
