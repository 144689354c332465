"""The warm sessions of one worker: who may join which, who is evicted, and who has gone.

The admission asks for places on its thread, before it takes a message; the supervisor sends requests from the threads
of its attempts; `sessions.keeper` closes what idles and ends what hangs. A session holds its GPUs from the moment that
it is expected until nothing of its process is left.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.logs import get_logger
from gpuflow.protocol import FUNCTION_TYPE, Request
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.child import Child
from gpuflow.worker.engine_sockets import own_sockets
from gpuflow.worker.outcome import HandedBack
from gpuflow.worker.sessions.entry import LOADING_PLACES, SessionEntry
from gpuflow.worker.sessions.keeper import Keeper
from gpuflow.worker.sessions.logs import new_log
from gpuflow.worker.sessions.opening import Opening
from gpuflow.worker.sessions.process import SessionProcess
from gpuflow.worker.sessions.request import AtEnd, SessionRequest

log = get_logger("gpuflow.sessions")


class Sessions:
    """The sessions of this worker. Safe in threads.

    `release` gives GPUs back, `on_change` is called when a place or a GPU may have become free. Sessions idle for
    `idle_seconds` are closed.
    """

    def __init__(
        self,
        *,
        idle_seconds: float,
        log_dir: Path,
        log_max_bytes: int,
        release: Callable[[Hold], Any],
        on_change: Callable[[], None],
    ) -> None:
        self.evictions = 0
        self.loads = 0
        self._log_dir = log_dir
        self._log_max_bytes = log_max_bytes
        self._release = release
        self._on_change = on_change
        self._lock = threading.RLock()
        self._entries: list[SessionEntry] = []
        self._numbers = itertools.count(1)
        self._ended_one = threading.Condition(self._lock)
        self.keeper = Keeper(self._look, self._close_idle, self._retire, idle_seconds)

    # -- places: the admission ----------------------------------------------------------------------------------

    def names(self, *, idle: bool = True) -> tuple[str, ...]:
        """Return the names of the sessions that have a place now; without `idle`, of those alone that work already."""
        now = time.monotonic()
        with self._lock:
            return tuple({entry.name for entry in self._entries if entry.has_place(now) and (idle or entry.requests)})

    def full(self) -> tuple[str, ...]:
        """Return the names of sessions without GPUs and without a place: one more would not be faster here."""
        now = time.monotonic()
        with self._lock:
            there = {entry.name for entry in self._entries if not entry.gpus and not entry.leaving}
            return tuple(there.difference(entry.name for entry in self._entries if entry.has_place(now)))

    def here(self) -> tuple[str, ...]:
        """Return the names of all sessions that will go on to answer soon, with a place now or not."""
        now = time.monotonic()
        with self._lock:
            return tuple({entry.name for entry in self._entries if not entry.leaving and entry.answers_soon(now)})

    def kept(self) -> dict[str, bool]:
        """Return the names of the sessions that replicas of served models keep loaded: name -> whether on GPUs."""
        with self._lock:
            return {entry.name: bool(entry.gpus) for entry in self._entries if entry.replica is not None}

    def join(self, name: str, tag: str, *, replica: bool = False) -> bool:
        """Keep a place for the message of `tag`; False where no session of the name has one.

        A `replica` keeps the session loaded; each session has one at most.
        """
        now = time.monotonic()
        with self._lock:
            found = [
                entry
                for entry in self._entries
                if entry.name == name and (entry.may_keep(now) if replica else entry.has_place(now))
            ]
            if not found:
                return False
            entry = min(found, key=lambda entry: len(entry.places))
            entry.places.add(tag)
            if replica:
                entry.replica = tag
            return True

    def expect(
        self,
        name: str,
        tag: str,
        hold: Hold | None,
        requirement: Requirement | None,
        *,
        in_turn: bool = False,
        loading_places: int = LOADING_PLACES,
        replica: bool = False,
    ) -> None:
        """Keep a place in a session that is to be opened, by whichever of its messages comes first; it has `hold`.

        One that answers `in_turn` has one place at a time, another one so many while it loads; a `replica` keeps it
        loaded.
        """
        entry = SessionEntry(
            name=name, hold=hold, requirement=requirement, in_turn=in_turn, loading_places=loading_places, places={tag}
        )
        entry.replica = tag if replica else None
        with self._lock:
            self._entries.append(entry)

    def leave(self, tag: str, *, quietly: bool = False) -> None:
        """Give a place back. A session that nobody has begun goes with the last who had a place in it.

        `quietly`: the caller tells those who wait for one.
        """
        with self._lock:
            left = [entry for entry in self._entries if tag in entry.places]
            for entry in left:
                entry.places.discard(tag)
                if entry.replica == tag:
                    entry.replica = None
                if entry.leaving:
                    self._close(entry)
            never = [entry for entry in left if entry.session is None and not entry.places]
            self._entries = [entry for entry in self._entries if entry not in never]
        for entry in never:
            self._release_gpus(entry)
        if left and not quietly:
            self._on_change()

    def working(self, without: Collection[SessionEntry] = ()) -> list[Requirement]:
        """Return what each session asks for, or each but some, that works now: a place in it is taken."""
        with self._lock:
            busy = [entry for entry in self._entries if entry.requests and entry not in without]
        return [entry.requirement or Requirement() for entry in busy]

    def memory_mib(self, without: Collection[SessionEntry] = ()) -> int:
        """Return the memory of the machine that all sessions keep, or all but some."""
        with self._lock:
            return sum(entry.memory_mib for entry in self._entries if entry not in without)

    def hold_of(self, tag: str) -> Hold | None:
        """Return the GPUs of the session in which a message has a place. Raises HandedBack where it has none."""
        return self._of(tag).hold

    def sharers(self, tag: str) -> int:
        """Return how many messages have a place in the session of this one; 1 where it has none any more."""
        with self._lock:
            return next((len(entry.places) for entry in self._entries if tag in entry.places), 1)

    def tags_on(self, uuid: str) -> list[str]:
        """Return the tags of the messages that a session on a GPU answers."""
        with self._lock:
            return [tag for entry in self._entries if uuid in entry.gpus for tag in entry.places]

    def going(self) -> list[SessionEntry]:
        """Return the sessions that are closed and have not ended yet."""
        with self._lock:
            return [entry for entry in self._entries if entry.closed_at is not None]

    def idle(self) -> list[SessionEntry]:
        """Return those that could be evicted, the one that was used longest ago first."""
        with self._lock:
            return sorted((entry for entry in self._entries if entry.is_idle()), key=lambda entry: entry.used_at)

    def served(self) -> list[SessionEntry]:
        """Return those that have served long enough to leave for another task, idle or not."""
        now = time.monotonic()
        with self._lock:
            return [entry for entry in self._entries if entry.has_served(now)]

    def evict(self, chosen: Sequence[SessionEntry], *, why: str) -> None:
        """Close those of some sessions that still idle."""
        with self._lock:
            closed = [entry for entry in chosen if entry.is_idle()]
            for entry in closed:
                self._close(entry)
            self.evictions += len(closed)
        for entry in closed:
            log.info("session_evicted", model=entry.model, why=why)

    # -- requests: the supervisor -------------------------------------------------------------------------------

    def ask(self, tag: str, request: Request, opening: Opening, *, alone: bool = False) -> SessionRequest:
        """Send the request of a message that has a place; the first one begins the session.

        With `alone`, it waits until the session has answered the others, and the next ones wait for it.
        A session whose variables (a secret among them) have other values by now, or that serves another owner, answers
        this one no more, and is closed when those that it has are answered. Raises HandedBack where the message is to
        be answered by another one, and OSError where the session cannot be begun.
        """
        entry = self._of(tag)
        with entry.opening:
            if entry.session is None:
                self._open(entry, opening)
        session = entry.session
        assert session is not None  # noqa: S101  (it has just been begun)
        if entry.variables != opening.variables:
            with self._lock:
                entry.leaving = True
            session.move_replicas("the model is to be loaded with other variables or secrets")
            raise HandedBack(
                "the model is loaded with other variables or secrets, or for another owner; a session for this task "
                "comes next"
            )
        replica = entry.replica == tag
        if entry.view is not None and not replica:
            entry.view.admit(request)
        at_end = None if replica else _at_end(entry, request)
        asked = SessionRequest(
            f"{request.task_id}#{next(self._numbers)}",
            alone=alone and not replica,
            replica=replica,
            of_function=request.task_type == FUNCTION_TYPE,
            at_end=at_end,
        )
        if not session.send(asked, request):
            raise HandedBack("the warm session that was to answer it has ended")
        if replica and entry.leaving:
            session.move_replicas("the session that it was to keep loaded ends")
        return asked

    def _of(self, tag: str) -> SessionEntry:
        with self._lock:
            found = next((entry for entry in self._entries if tag in entry.places), None)
        if found is None:
            raise HandedBack("the warm session that was to answer it has ended")
        return found

    def _open(self, entry: SessionEntry, opening: Opening) -> None:
        """Begin the process of a session. Raises OSError; the session is expected then as before."""
        path = new_log(self._log_dir, opening.title)
        view = opening.view() if opening.view is not None else None
        confinement = opening.confinement if view is None else view.confinement
        try:
            with own_sockets(opening.environment, opening.at_end, confinement) as started:
                child = Child(
                    list(opening.argv),
                    request=opening.line + "\n",
                    environment=started.environment,
                    cwd=self._log_dir,
                    keep_open=entry.hold.fds if entry.hold is not None else (),
                    at_end=started.at_end,
                    talks=True,
                    confinement=confinement,
                )
        except BaseException:
            if view is not None:
                view.remove()
            raise
        session = SessionProcess(
            child,
            log_path=path,
            log_max_bytes=self._log_max_bytes,
            redactor=opening.redactor,
            on_end=self._ended,
            on_room=self._on_change,
            of_function=opening.of_function,
        )
        with self._lock:
            self.loads += 1
            entry.session, entry.variables, entry.view = session, opening.variables, view
        try:
            session.begin()
        except RuntimeError as error:
            with self._lock:
                entry.session = None
            child.kill()
            child.wait()
            if view is not None:
                view.remove()
            raise OSError(f"no thread can be started for a warm session: {error}") from error
        log.info("session_opened", name=opening.title, gpus=list(entry.gpus), log=str(path))
        self.keeper.begin()
        self._on_change()  # others may join it

    def kill_on(self, uuid: str, why: str) -> None:
        """End the sessions on a GPU now; what is open on them is tried again elsewhere."""
        with self._lock:
            found = [entry.session for entry in self._entries if entry.session is not None and uuid in entry.gpus]
        for session in found:
            session.kill(why)

    # -- upkeep -------------------------------------------------------------------------------------------------

    def close_all(self) -> None:
        """Give no more places away; each session ends with the last of its requests."""
        with self._lock:
            for entry in self._entries:
                entry.leaving = True
                self._close(entry)
        self.move_replicas("the worker drains")

    def move_replicas(self, why: str) -> None:
        """End the replicas that keep sessions loaded: they begin again elsewhere."""
        with self._lock:
            found = [
                entry.session for entry in self._entries if entry.replica is not None and entry.session is not None
            ]
        for session in found:
            session.move_replicas(why)

    def stop(self, seconds: float) -> None:
        """End every session: in good order within so many seconds, then by force."""
        self.close_all()
        with self._ended_one:
            self._ended_one.wait_for(lambda: not any(entry.session for entry in self._entries), seconds)
            left = [entry.session for entry in self._entries if entry.session is not None]
        self.keeper.stop()
        for session in left:
            session.kill("the worker stops")

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain data of every session, for the registry and `inspect stats`.

        `idle`: it would be closed at once for a task that needs what it holds; `replica`: one of a served model keeps
        it loaded.
        """
        with self._lock:
            return [
                {
                    "model": session.told.model,
                    "engine": session.told.engine,
                    "state": session.state,
                    "running": session.running,
                    "idle": entry.is_idle(),
                    "replica": entry.replica is not None,
                    "gpus": list(entry.gpus),
                    "shareMib": entry.hold.share_mib if entry.hold is not None else None,
                    "memoryBytes": session.told.memory_bytes,
                }
                for entry in self._entries
                if (session := entry.session) is not None
            ]

    def _look(self) -> list[SessionEntry]:
        with self._lock:
            return list(self._entries)

    def _close_idle(self, entry: SessionEntry) -> bool:
        """Close a session if it still idles; say whether it did."""
        with self._lock:
            idle = entry.is_idle()
            if idle:
                self._close(entry)
        return idle

    def _retire(self, entry: SessionEntry) -> None:
        """Give no more places of a session away; it ends with the last request that it has."""
        with self._lock:
            entry.leaving = True
            self._close(entry)
        if entry.session is not None:
            entry.session.move_replicas("the session that it kept loaded has lived for as long as it may")

    def _close(self, entry: SessionEntry) -> None:
        """Close a session in which nobody has a place; the others are closed when the last of these leaves."""
        if entry.places or entry.closed_at is not None or entry.session is None:
            return
        entry.leaving, entry.closed_at = True, time.monotonic()
        entry.session.close()

    def _ended(self, session: SessionProcess) -> None:
        with self._lock:
            gone = [entry for entry in self._entries if entry.session is session]
        for entry in gone:
            self._release_gpus(entry)
            if entry.view is not None:
                entry.view.remove()
        with self._ended_one:
            self._entries = [entry for entry in self._entries if entry.session is not session]
            self._ended_one.notify_all()
        self._on_change()

    def _release_gpus(self, entry: SessionEntry) -> None:
        if entry.hold is not None:
            self._release(entry.hold)


def _at_end(entry: SessionEntry, request: Request) -> AtEnd | None:
    """Return what brings the files of a request to where they belong, when it has ended."""
    view = entry.view
    if view is None:
        return None

    def bring(*, completed: bool) -> None:
        try:
            if completed:
                view.collect(request)
        finally:
            view.forget(request)

    return bring
