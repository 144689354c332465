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
from gpuflow.worker.sessions.keeper import Keeper
from gpuflow.worker.sessions.logs import new_log
from gpuflow.worker.sessions.opening import Opening
from gpuflow.worker.sessions.request import AtEnd, SessionRequest
from gpuflow.worker.sessions.session import Session
from gpuflow.worker.sessions.warm import LOADING_PLACES, Warm

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
        self._warm: list[Warm] = []
        self._numbers = itertools.count(1)
        self._ended_one = threading.Condition(self._lock)
        self.keeper = Keeper(self._look, self._close_idle, self._retire, idle_seconds)

    # -- places: the admission ----------------------------------------------------------------------------------

    def names(self, *, idle: bool = True) -> tuple[str, ...]:
        """Return the names of the sessions that have a place now; without `idle`, of those alone that work already."""
        now = time.monotonic()
        with self._lock:
            return tuple({warm.name for warm in self._warm if warm.has_place(now) and (idle or warm.requests)})

    def full(self) -> tuple[str, ...]:
        """Return the names of sessions without GPUs and without a place: one more would not be faster here."""
        now = time.monotonic()
        with self._lock:
            there = {warm.name for warm in self._warm if not warm.gpus and not warm.leaving}
            return tuple(there.difference(warm.name for warm in self._warm if warm.has_place(now)))

    def here(self) -> tuple[str, ...]:
        """Return the names of all sessions that will go on to answer soon, with a place now or not."""
        now = time.monotonic()
        with self._lock:
            return tuple({warm.name for warm in self._warm if not warm.leaving and warm.answers_soon(now)})

    def kept(self) -> dict[str, bool]:
        """Return the names of the sessions that replicas of served models keep loaded: name -> whether on GPUs."""
        with self._lock:
            return {warm.name: bool(warm.gpus) for warm in self._warm if warm.replica is not None}

    def join(self, name: str, tag: str, *, replica: bool = False) -> bool:
        """Keep a place for the message of `tag`; False where no session of the name has one.

        A `replica` keeps the session loaded; each session has one at most.
        """
        now = time.monotonic()
        with self._lock:
            found = [
                warm
                for warm in self._warm
                if warm.name == name and (warm.may_keep(now) if replica else warm.has_place(now))
            ]
            if not found:
                return False
            warm = min(found, key=lambda warm: len(warm.places))
            warm.places.add(tag)
            if replica:
                warm.replica = tag
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
        warm = Warm(
            name=name, hold=hold, requirement=requirement, in_turn=in_turn, loading_places=loading_places, places={tag}
        )
        warm.replica = tag if replica else None
        with self._lock:
            self._warm.append(warm)

    def leave(self, tag: str, *, quietly: bool = False) -> None:
        """Give a place back. A session that nobody has begun goes with the last who had a place in it.

        `quietly`: the caller tells those who wait for one.
        """
        with self._lock:
            left = [warm for warm in self._warm if tag in warm.places]
            for warm in left:
                warm.places.discard(tag)
                if warm.replica == tag:
                    warm.replica = None
                if warm.leaving:
                    self._close(warm)
            never = [warm for warm in left if warm.session is None and not warm.places]
            self._warm = [warm for warm in self._warm if warm not in never]
        for warm in never:
            self._release_gpus(warm)
        if left and not quietly:
            self._on_change()

    def working(self, without: Collection[Warm] = ()) -> list[Requirement]:
        """Return what each session asks for, or each but some, that works now: a place in it is taken."""
        with self._lock:
            busy = [warm for warm in self._warm if warm.requests and warm not in without]
        return [warm.requirement or Requirement() for warm in busy]

    def memory_mib(self, without: Collection[Warm] = ()) -> int:
        """Return the memory of the machine that all sessions keep, or all but some."""
        with self._lock:
            return sum(warm.memory_mib for warm in self._warm if warm not in without)

    def hold_of(self, tag: str) -> Hold | None:
        """Return the GPUs of the session in which a message has a place. Raises HandedBack where it has none."""
        return self._of(tag).hold

    def sharers(self, tag: str) -> int:
        """Return how many messages have a place in the session of this one; 1 where it has none any more."""
        with self._lock:
            return next((len(warm.places) for warm in self._warm if tag in warm.places), 1)

    def tags_on(self, uuid: str) -> list[str]:
        """Return the tags of the messages that a session on a GPU answers."""
        with self._lock:
            return [tag for warm in self._warm if uuid in warm.gpus for tag in warm.places]

    def going(self) -> list[Warm]:
        """Return the sessions that are closed and have not ended yet."""
        with self._lock:
            return [warm for warm in self._warm if warm.closed_at is not None]

    def idle(self) -> list[Warm]:
        """Return those that could be evicted, the one that was used longest ago first."""
        with self._lock:
            return sorted((warm for warm in self._warm if warm.is_idle()), key=lambda warm: warm.used_at)

    def served(self) -> list[Warm]:
        """Return those that have served long enough to leave for another task, idle or not."""
        now = time.monotonic()
        with self._lock:
            return [warm for warm in self._warm if warm.has_served(now)]

    def evict(self, chosen: Sequence[Warm], *, why: str) -> None:
        """Close those of some sessions that still idle."""
        with self._lock:
            closed = [warm for warm in chosen if warm.is_idle()]
            for warm in closed:
                self._close(warm)
            self.evictions += len(closed)
        for warm in closed:
            log.info("session_evicted", model=warm.model, why=why)

    # -- requests: the supervisor -------------------------------------------------------------------------------

    def ask(self, tag: str, request: Request, opening: Opening, *, alone: bool = False) -> SessionRequest:
        """Send the request of a message that has a place; the first one begins the session.

        With `alone`, it waits until the session has answered the others, and the next ones wait for it.
        A session whose variables (a secret among them) have other values by now, or that serves another owner, answers
        this one no more, and is closed when those that it has are answered. Raises HandedBack where the message is to
        be answered by another one, and OSError where the session cannot be begun.
        """
        warm = self._of(tag)
        with warm.opening:
            if warm.session is None:
                self._open(warm, opening)
        session = warm.session
        assert session is not None  # noqa: S101  (it has just been begun)
        if warm.variables != opening.variables:
            with self._lock:
                warm.leaving = True
            session.move_replicas("the model is to be loaded with other variables or secrets")
            raise HandedBack(
                "the model is loaded with other variables or secrets, or for another owner; a session for this task "
                "comes next"
            )
        replica = warm.replica == tag
        if warm.view is not None and not replica:
            warm.view.admit(request)
        at_end = None if replica else _at_end(warm, request)
        asked = SessionRequest(
            f"{request.task_id}#{next(self._numbers)}",
            alone=alone and not replica,
            replica=replica,
            of_function=request.task_type == FUNCTION_TYPE,
            at_end=at_end,
        )
        if not session.send(asked, request):
            raise HandedBack("the warm session that was to answer it has ended")
        if replica and warm.leaving:
            session.move_replicas("the session that it was to keep loaded ends")
        return asked

    def _of(self, tag: str) -> Warm:
        with self._lock:
            found = next((warm for warm in self._warm if tag in warm.places), None)
        if found is None:
            raise HandedBack("the warm session that was to answer it has ended")
        return found

    def _open(self, warm: Warm, opening: Opening) -> None:
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
                    keep_open=warm.hold.fds if warm.hold is not None else (),
                    at_end=started.at_end,
                    talks=True,
                    confinement=confinement,
                )
        except BaseException:
            if view is not None:
                view.remove()
            raise
        session = Session(
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
            warm.session, warm.variables, warm.view = session, opening.variables, view
        try:
            session.begin()
        except RuntimeError as error:
            with self._lock:
                warm.session = None
            child.kill()
            child.wait()
            if view is not None:
                view.remove()
            raise OSError(f"no thread can be started for a warm session: {error}") from error
        log.info("session_opened", name=opening.title, gpus=list(warm.gpus), log=str(path))
        self.keeper.begin()
        self._on_change()  # others may join it

    def kill_on(self, uuid: str, why: str) -> None:
        """End the sessions on a GPU now; what is open on them is tried again elsewhere."""
        with self._lock:
            found = [warm.session for warm in self._warm if warm.session is not None and uuid in warm.gpus]
        for session in found:
            session.kill(why)

    # -- upkeep -------------------------------------------------------------------------------------------------

    def close_all(self) -> None:
        """Give no more places away; each session ends with the last of its requests."""
        with self._lock:
            for warm in self._warm:
                warm.leaving = True
                self._close(warm)
        self.move_replicas("the worker drains")

    def move_replicas(self, why: str) -> None:
        """End the replicas that keep sessions loaded: they begin again elsewhere."""
        with self._lock:
            found = [warm.session for warm in self._warm if warm.replica is not None and warm.session is not None]
        for session in found:
            session.move_replicas(why)

    def stop(self, seconds: float) -> None:
        """End every session: in good order within so many seconds, then by force."""
        self.close_all()
        with self._ended_one:
            self._ended_one.wait_for(lambda: not any(warm.session for warm in self._warm), seconds)
            left = [warm.session for warm in self._warm if warm.session is not None]
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
                    "idle": warm.is_idle(),
                    "replica": warm.replica is not None,
                    "gpus": list(warm.gpus),
                    "shareMib": warm.hold.share_mib if warm.hold is not None else None,
                    "memoryBytes": session.told.memory_bytes,
                }
                for warm in self._warm
                if (session := warm.session) is not None
            ]

    def _look(self) -> list[Warm]:
        with self._lock:
            return list(self._warm)

    def _close_idle(self, warm: Warm) -> bool:
        """Close a session if it still idles; say whether it did."""
        with self._lock:
            idle = warm.is_idle()
            if idle:
                self._close(warm)
        return idle

    def _retire(self, warm: Warm) -> None:
        """Give no more places of a session away; it ends with the last request that it has."""
        with self._lock:
            warm.leaving = True
            self._close(warm)
        if warm.session is not None:
            warm.session.move_replicas("the session that it kept loaded has lived for as long as it may")

    def _close(self, warm: Warm) -> None:
        """Close a session in which nobody has a place; the others are closed when the last of these leaves."""
        if warm.places or warm.closed_at is not None or warm.session is None:
            return
        warm.leaving, warm.closed_at = True, time.monotonic()
        warm.session.close()

    def _ended(self, session: Session) -> None:
        with self._lock:
            gone = [warm for warm in self._warm if warm.session is session]
        for warm in gone:
            self._release_gpus(warm)
            if warm.view is not None:
                warm.view.remove()
        with self._ended_one:
            self._warm = [warm for warm in self._warm if warm.session is not session]
            self._ended_one.notify_all()
        self._on_change()

    def _release_gpus(self, warm: Warm) -> None:
        if warm.hold is not None:
            self._release(warm.hold)


def _at_end(warm: Warm, request: Request) -> AtEnd | None:
    """Return what brings the files of a request to where they belong, when it has ended."""
    view = warm.view
    if view is None:
        return None

    def bring(*, completed: bool) -> None:
        try:
            if completed:
                view.collect(request)
        finally:
            view.forget(request)

    return bring
