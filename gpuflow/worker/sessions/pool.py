"""The warm sessions of one worker: who may join which, who is evicted, and who has gone.

The admission asks for places on its thread, before it takes a message; the supervisor sends requests from the threads
of its attempts; a keeper closes what idles and ends what hangs. A session holds its GPUs from its opening until nothing
of its process is left.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.logs import get_logger
from gpuflow.protocol import Request
from gpuflow.routing.requirement import Requirement
from gpuflow.secrets import Redactor
from gpuflow.worker.child import Child
from gpuflow.worker.sessions.request import SessionRequest
from gpuflow.worker.sessions.session import Session, SessionGone
from gpuflow.worker.sessions.warm import Warm

log = get_logger("gpuflow.sessions")

#: The keeper looks this often, and asks each session for a sign of life this often (seconds).
_LOOK_SECONDS: Final = 1.0
PING_SECONDS: Final = 10.0
#: A session that has said nothing for so long is ended; one that is closed has ended after the other.
SILENT_SECONDS: Final = 60.0
CLOSE_SECONDS: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a session is begun. `variables` is a digest of its environment, the values of secrets included."""

    name: str
    argv: Sequence[str]
    line: str
    environment: Mapping[str, str]
    redactor: Redactor
    variables: str = ""


class Sessions:
    """The sessions of this worker. Safe in threads.

    `release` gives GPUs back, `on_change` is called when a place or a GPU may have become free. Sessions idle for
    `idle_seconds` are closed; 0: none is kept, and tasks get children of their own.
    """

    def __init__(
        self, *, idle_seconds: float, log_dir: Path, release: Callable[[Hold], Any], on_change: Callable[[], None]
    ) -> None:
        self.enabled = idle_seconds > 0
        self.evictions = 0
        self.loads = 0
        self._idle_seconds = idle_seconds
        self._log_dir = log_dir
        self._release = release
        self._on_change = on_change
        self._lock = threading.RLock()
        self._warm: list[Warm] = []
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()
        self._keeper: threading.Thread | None = None
        #: Called about once a second while a session idles.
        self.on_idle: Callable[[], None] | None = None

    # -- places: the admission ----------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Return the names of the sessions that have a place now."""
        with self._lock:
            return tuple({warm.name for warm in self._warm if warm.has_place()})

    def full(self) -> tuple[str, ...]:
        """Return the names of sessions without GPUs and without a place: one more would not be faster here."""
        with self._lock:
            there = {warm.name for warm in self._warm if not warm.gpus and warm.closed_at is None}
            return tuple(there.difference(warm.name for warm in self._warm if warm.has_place()))

    def any(self) -> bool:
        """Whether there is one that has a place or could be evicted."""
        with self._lock:
            return any(warm.has_place() or warm.is_idle() for warm in self._warm)

    def join(self, name: str, tag: str) -> bool:
        """Keep a place for the message of `tag`; False where no session of the name has one."""
        with self._lock:
            found = [warm for warm in self._warm if warm.name == name and warm.has_place()]
            if not found:
                return False
            min(found, key=lambda warm: len(warm.places)).places.add(tag)
            return True

    def expect(self, name: str, tag: str, gpus: tuple[str, ...], requirement: Requirement | None) -> None:
        """Note that the message of `tag` will open a session: those that come meanwhile need not open one more."""
        with self._lock:
            self._warm.append(Warm(name=name, opened_for=tag, gpus=gpus, requirement=requirement, places={tag}))

    def leave(self, tag: str) -> None:
        """Give a place back. A session that was only expected for this message is expected no more."""
        with self._lock:
            left = [warm for warm in self._warm if tag in warm.places]
            for warm in left:
                warm.places.discard(tag)
            never = [warm for warm in left if warm.session is None and warm.opened_for == tag]
            self._warm = [warm for warm in self._warm if warm not in never]
        for warm in never:
            for request, *_ in warm.waiting:
                request.end()
        if left:
            self._on_change()

    def busy_alone(self, jobs: Collection[str]) -> int:
        """Return how many sessions work for none of these tags: each takes a slot of its own."""
        with self._lock:
            return sum(1 for warm in self._warm if warm.places and not warm.places.intersection(jobs))

    def memory_mib(self, *, beside: Collection[str]) -> int:
        """Return the memory that sessions keep, without those that one of the messages `beside` has opened."""
        with self._lock:
            asked = [warm.requirement for warm in self._warm if warm.opened_for not in beside]
        return sum(one.memory_mib or 0 for one in asked if one is not None)

    def gpus_of(self, tag: str) -> tuple[str, ...]:
        """Return the GPUs of the session in which a message has a place."""
        with self._lock:
            return next((warm.gpus for warm in self._warm if tag in warm.places), ())

    def leaving_gpus(self) -> tuple[str, ...]:
        """Return the GPUs of sessions that are closed and have not ended yet."""
        with self._lock:
            return tuple(uuid for warm in self._warm if warm.closed_at is not None for uuid in warm.gpus)

    def idle_gpus(self) -> list[tuple[str, ...]]:
        """Return the GPUs of each session that could be evicted, the one that was used longest ago first."""
        with self._lock:
            return [warm.gpus for warm in self._evictable()]

    def served_gpus(self) -> list[tuple[str, ...]]:
        """Return the GPUs of each session that has served long enough to leave for another task, idle or not."""
        now = time.monotonic()
        with self._lock:
            return [warm.gpus for warm in self._warm if warm.has_served(now)]

    def evict(self, count: int = 1, *, why: str) -> int:
        """Close some idle sessions, the one that was used longest ago first; return how many."""
        with self._lock:
            chosen = self._evictable()[:count]
            for warm in chosen:
                self._close(warm)
        self.evictions += len(chosen)
        for warm in chosen:
            log.info("session_evicted", model=warm.model, why=why)
        return len(chosen)

    # -- requests: the supervisor -------------------------------------------------------------------------------

    def open(self, opening: Opening, tag: str, hold: Hold | None) -> None:
        """Begin a session with a place for `tag`; it gives `hold` back when it has ended. Raises OSError."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self.loads += 1
        log_path = self._log_dir / f"{opening.name}-{self.loads}.log"
        try:
            child = Child(
                list(opening.argv),
                request=opening.line + "\n",
                environment=opening.environment,
                cwd=self._log_dir,
                keep_open=hold.fds if hold is not None else (),
                talks=True,
            )
        except OSError:
            if hold is not None:
                self._release(hold)
            raise
        log.info("session_opened", name=opening.name, gpus=list(hold.uuids) if hold else [], log=str(log_path))
        with self._lock:
            warm = next((warm for warm in self._warm if warm.opened_for == tag and warm.session is None), None)
            if warm is None:
                warm = Warm(name=opening.name, opened_for=tag, gpus=(), requirement=None, places={tag})
                self._warm.append(warm)
            session = Session(child, log_path=log_path, redactor=opening.redactor, on_end=self._ended)
            warm.session, warm.hold, warm.variables = session, hold, opening.variables
            waiting, warm.waiting = warm.waiting, []
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="gpuflow-sessions", daemon=True)
                self._keeper.start()
        for asked, request, variables in waiting:
            if variables == opening.variables:
                session.send(asked, request)
            else:
                asked.end()
        self._on_change()  # others may join it

    def ask(self, tag: str, request: Request, variables: str = "") -> SessionRequest:
        """Send the request of a message that has a place. Raises SessionGone.

        A session whose variables (a secret among them) have other values by now answers no more: it is closed.
        """
        with self._lock:
            warm = next((warm for warm in self._warm if tag in warm.places), None)
            if warm is None:
                raise SessionGone
            if warm.variables is not None and warm.variables != variables:
                self._close(warm)
                raise SessionGone
            asked = SessionRequest(f"{request.task_id}#{next(self._numbers)}")
            if warm.session is None:
                warm.waiting.append((asked, request, variables))
            else:
                warm.session.send(asked, request)
            return asked

    def kill_on(self, uuid: str, why: str) -> None:
        """End the sessions on a GPU now; what is open on them is tried again elsewhere."""
        with self._lock:
            found = [warm.session for warm in self._warm if warm.session is not None and uuid in warm.gpus]
        for session in found:
            session.kill(why)

    # -- upkeep -------------------------------------------------------------------------------------------------

    def close_all(self) -> None:
        """Close every session; those with open requests end when these have."""
        with self._lock:
            for warm in self._warm:
                self._close(warm)

    def stop(self, seconds: float) -> None:
        """End every session: in good order within so many seconds, then by force."""
        self.close_all()
        deadline = time.monotonic() + seconds
        while self._warm and time.monotonic() < deadline:
            self._stopped.wait(0.05)
        self._stopped.set()
        with self._lock:
            left = [warm.session for warm in self._warm if warm.session is not None]
        for session in left:
            session.kill("the worker stops")

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain data of every session, for the registry and `inspect stats`.

        `idle`: it would be closed at once for a task that needs what it holds.
        """
        with self._lock:
            return [
                {
                    "model": session.told.model,
                    "engine": session.told.engine,
                    "state": session.state,
                    "running": session.running,
                    "idle": warm.is_idle(),
                    "gpus": list(warm.gpus),
                    "memoryBytes": session.told.memory_bytes,
                }
                for warm in self._warm
                if (session := warm.session) is not None
            ]

    def _evictable(self) -> list[Warm]:
        idle = [warm for warm in self._warm if warm.is_idle()]
        return sorted(idle, key=lambda warm: warm.used_at)

    def _close(self, warm: Warm) -> None:
        if warm.closed_at is None and warm.session is not None:
            warm.closed_at = time.monotonic()
            warm.session.close()

    def _ended(self, session: Session) -> None:
        with self._lock:
            gone = [warm for warm in self._warm if warm.session is session]
            self._warm = [warm for warm in self._warm if warm.session is not session]
        for warm in gone:
            if warm.hold is not None:
                self._release(warm.hold)
        self._on_change()

    def _keep(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            now = time.monotonic()
            with self._lock:
                every = list(self._warm)
                for warm in every:
                    if warm.is_idle() and now - warm.used_at > self._idle_seconds:
                        log.info("session_idle", model=warm.model, seconds=round(self._idle_seconds))
                        self._close(warm)
            for warm in every:
                self._look_after(warm, now)
            if self.on_idle is not None and any(warm.is_idle() for warm in every):
                self.on_idle()

    def _look_after(self, warm: Warm, now: float) -> None:
        session = warm.session
        if session is None:
            return
        if now - warm.pinged_at >= PING_SECONDS:
            warm.pinged_at = now
            session.ping()
        if now - session.heard_at > SILENT_SECONDS:
            session.kill(f"it has said nothing for {SILENT_SECONDS:g} s")
        elif session.disobeys(now):
            session.kill("it did not end a request that was aborted")
        elif warm.closed_at is not None and now - warm.closed_at > CLOSE_SECONDS and not session.running:
            session.kill("it was closed and did not end")
