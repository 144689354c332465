"""Looks after the sessions of a worker: closes what idles, ends what hangs. One thread, from the first session on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpuflow.logs import get_logger
from gpuflow.worker.sessions.entry import SessionEntry

log = get_logger("gpuflow.sessions")

#: The keeper looks this often, and asks each session for a sign of life this often (seconds).
_LOOK_SECONDS: Final = 1.0
PING_SECONDS: Final = 10.0
#: A session that has said nothing for so long is ended; one that is closed has ended after the other.
SILENT_SECONDS: Final = 60.0
CLOSE_SECONDS: Final = 15.0


class Keeper:
    """`look` returns the sessions, `close_idle` closes one that still idles and says whether it did.

    `retire` lets one answer what it has, and nothing more. Sessions idle for `idle_seconds` are closed, or as long as
    they say themselves.
    """

    def __init__(
        self,
        look: Callable[[], Sequence[SessionEntry]],
        close_idle: Callable[[SessionEntry], bool],
        retire: Callable[[SessionEntry], object],
        idle_seconds: float,
    ) -> None:
        #: Called about once a second while a session idles.
        self.on_idle: Callable[[], None] | None = None
        self._look = look
        self._close_idle = close_idle
        self._retire = retire
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="gpuflow-sessions", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _keep(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:
                log.exception("sessions_not_looked_after", cause=str(error))

    def look(self) -> None:
        """Look after every session once."""
        now = time.monotonic()
        every = self._look()
        for entry in every:
            self._look_after(entry, now)
        if self.on_idle is not None and any(entry.is_idle() for entry in every):
            self.on_idle()

    def _look_after(self, entry: SessionEntry, now: float) -> None:
        session = entry.session
        if session is None:
            return
        idle_seconds = session.told.idle_seconds or self._idle_seconds
        if entry.is_idle() and now - entry.used_at > idle_seconds and self._close_idle(entry):
            log.info("session_idle", model=entry.model, seconds=round(idle_seconds))
        if not entry.leaving and entry.is_too_old(now):
            log.info("session_too_old", model=entry.model, seconds=session.told.lifetime_seconds)
            self._retire(entry)
        if now - entry.pinged_at >= PING_SECONDS:
            entry.pinged_at = now
            session.ping()
        if not session.of_function and now - session.heard_at > SILENT_SECONDS:
            session.kill(f"it has said nothing for {SILENT_SECONDS:g} s")
        elif session.disobeys(now):
            session.kill("it did not end a request that was aborted")
        elif entry.closed_at is not None and now - entry.closed_at > CLOSE_SECONDS and not session.running:
            session.kill("it was closed and did not end")
