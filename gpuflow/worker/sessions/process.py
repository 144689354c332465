"""One warm session of this worker: its process, the requests that are open on it, and what it tells of itself.

Made by `Sessions`. Two threads serve it: one reads what the process says and deals it out, one writes what it is told,
so that a process which hangs blocks neither an attempt nor the worker.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from gpuflow.functions.calls import PLACES
from gpuflow.logs import get_logger
from gpuflow.protocol import REPLICA_UNIT, Request
from gpuflow.secrets import Redactor, known
from gpuflow.worker.child import Child
from gpuflow.worker.child_log import ChildLog
from gpuflow.worker.outcome import ending
from gpuflow.worker.sessions.request import SessionRequest

log = get_logger("gpuflow.sessions")

#: The reader looks up at least this often, in seconds.
_READ_SECONDS: Final = 1.0
#: A request that is aborted has ended after this time, or the session is ended.
ABORT_SECONDS: Final = 30.0
#: The same for a call of a function that is worked on: its process ends by that, and one that has not stands still.
FUNCTION_ABORT_SECONDS: Final = 5.0
#: After a while without a word, or with an abort undone, it is given no more requests (seconds).
SUSPECT_SECONDS: Final = 25.0
SUSPECT_ABORT_SECONDS: Final = 5.0
#: Told to a replica when the model is loaded.
_LOADED: Final = json.dumps({"event": "progress", "current": 1, "total": 1, "unit": REPLICA_UNIT}).encode()
#: No engine answers more at once.
_MOST_REQUESTS: Final = 100_000

#: `leaving`: it wants to be closed; what has a place there is answered first.
State = Literal["loading", "ready", "leaving", "closing", "ended"]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a session told when its model was loaded (docs/reference/sessions.md, `ready`)."""

    engine: str = ""
    model: str = ""
    revision: str | None = None
    load_seconds: float = 0.0
    max_requests: int = 1
    memory_bytes: int | None = None
    idle_seconds: float | None = None
    lifetime_seconds: float | None = None

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Told:
        """Read the event; what is not of its type counts as not told."""
        seconds, requests, memory = event.get("load_seconds"), event.get("max_requests"), event.get("memory_bytes")
        return cls(
            engine=str(event.get("engine") or ""),
            model=str(event.get("model") or ""),
            revision=str(event["revision"]) if event.get("revision") else None,
            load_seconds=max(0.0, float(seconds)) if isinstance(seconds, int | float) else 0.0,
            max_requests=min(max(1, requests), _MOST_REQUESTS) if isinstance(requests, int) else 1,
            memory_bytes=memory if isinstance(memory, int) else None,
            idle_seconds=_positive(event.get("idle_seconds")),
            lifetime_seconds=_positive(event.get("lifetime_seconds")),
        )


def _positive(seconds: Any) -> float | None:
    return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else None


class SessionProcess:
    """A session; `on_end` is called once, on its reader's thread, when nothing of its process is left.

    `on_room` is called, on a thread of its own, when it takes more requests than before.

    It lives from `begin` on.
    """

    def __init__(
        self,
        child: Child,
        *,
        log_path: Path,
        log_max_bytes: int,
        redactor: Redactor,
        on_end: Callable[[SessionProcess], None],
        on_room: Callable[[], None],
        of_function: bool = False,
    ) -> None:
        #: It answers calls of a team's function: one that keeps the interpreter to itself may be silent for long.
        self.of_function = of_function
        self.told = Told()
        self.state: State = "loading"
        self.used_at = time.monotonic()
        self.heard_at = time.monotonic()
        self.ready_at = 0.0
        self._child = child
        self._log_path = log_path
        self._log_max_bytes = log_max_bytes
        self._redactor = redactor
        self._on_end = on_end
        self._on_room = on_room
        self._lock = threading.Lock()
        self._open: dict[str, SessionRequest] = {}
        #: Of the open ones, those that wait for others before they are sent, the first first.
        self._unsent: deque[tuple[SessionRequest, bytes]] = deque()
        #: How many requests the engine had when it first said that it is gone.
        self._died_with: int | None = None
        self._aborted: dict[str, float] = {}
        self._killed = False
        self._began = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._why = ""

    def begin(self) -> None:
        """Start to read and write. Raises RuntimeError where no thread can be had."""
        threading.Thread(target=self._write, name="gpuflow-session-in", daemon=True).start()
        threading.Thread(target=self._read, name="gpuflow-session", daemon=True).start()

    @property
    def shim_pid(self) -> int:
        """The process that ends only when nothing of the session is left."""
        return self._child.shim_pid

    @property
    def running(self) -> int:
        """How many requests are open, replicas not counted."""
        with self._lock:
            return sum(not asked.replica for asked in self._open.values())

    def send(self, asked: SessionRequest, request: Request) -> bool:
        """Send a request; False when it comes too late."""
        line = f'{{"op": "run", "id": {json.dumps(asked.id)}, "request": {request.to_json()}}}'.encode(errors="replace")
        with self._lock:
            if self.state in ("closing", "ended"):
                return False
            self._open[asked.id] = asked
            if asked.replica:
                asked.due()
                if self.state == "ready":
                    asked.put("event", _LOADED)
            else:
                self._unsent.append((asked, line))
                self._send_due()
        asked.sent(self.shim_pid, self._abort, self._tell)
        return True

    def move_replicas(self, why: str) -> None:
        """End the replicas that keep it loaded: they begin again elsewhere."""
        with self._lock:
            found = [asked for asked in self._open.values() if asked.replica]
            for asked in found:
                del self._open[asked.id]
        for asked in found:
            asked.moved(why)

    def close(self) -> None:
        """Take no more requests; it ends when the open ones have."""
        with self._lock:
            if self.state not in ("loading", "ready", "leaving"):
                return
            self.state = "closing"
        self._tell({"op": "close"})

    def kill(self, why: str) -> None:
        """End its process now; what is open on it fails, to be tried again."""
        with self._lock:
            if self._killed or self.state == "ended":
                return
            self._killed, self.state, self._why = True, "closing", why
        log.warning("session_killed", model=self.told.model, why=why, open=self.running)
        self._child.kill()

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._tell({"op": "ping", "n": 0})

    def disobeys(self, now: float) -> bool:
        """Whether an abort has been left undone for too long.

        Of functions that is so for the call that is worked on. One that waits behind it may well wait on: nothing of a
        call is to end by the limit of another one.
        """
        with self._lock:
            works = self.of_function and any(asked.works for asked in self._open.values())
            limits = {
                id: ABORT_SECONDS if not works else FUNCTION_ABORT_SECONDS if self._open[id].works else math.inf
                for id in self._aborted
                if id in self._open
            }
            return any(now - self._aborted[id] > most for id, most in limits.items())

    def is_suspect(self, now: float) -> bool:
        """Whether it seems to hang: then it is given no more requests."""
        with self._lock:
            late = any(now - at > SUSPECT_ABORT_SECONDS for at in self._aborted.values())
        return late or (not self.of_function and now - self.heard_at > SUSPECT_SECONDS)

    # -- inside -------------------------------------------------------------------------------------------------

    def _in_engine(self) -> list[SessionRequest]:
        waiting = {asked.id for asked, _ in self._unsent}
        return [asked for id, asked in self._open.items() if id not in waiting and not asked.replica]

    def _send_due(self) -> None:
        """Send what may be sent now, in order: one that is to be alone has the engine for itself. Under the lock."""
        in_engine = self._in_engine()
        while self._unsent and self._died_with is None:
            asked, line = self._unsent[0]
            if in_engine and (asked.alone or in_engine[-1].alone):
                return
            self._unsent.popleft()
            in_engine.append(asked)
            self._outbox.put(line)
            asked.due()

    def _tell(self, operation: Mapping[str, Any]) -> None:
        self._outbox.put(json.dumps(operation).encode())

    def _abort(self, id: str) -> None:
        with self._lock:
            if id not in self._open or id in self._aborted:
                return
            asked = self._open[id]
            order = "end" if asked.of_function and asked.is_killed else "abort"
            waiting = next((one for one in self._unsent if one[0].id == id), None)
            here = self._open[id] if waiting or self._open[id].replica else None
            if here is not None:
                del self._open[id]
                if waiting is not None:
                    self._unsent.remove(waiting)
                    self._send_due()
            elif (
                not asked.of_function or asked.is_killed
            ):  # a function may save what it has, as long as its attempt lets it
                self._aborted[id] = time.monotonic()
        if here is not None:
            here.end({"event": "finish", "status": "cancelled"})
        else:
            self._tell({"op": order, "id": id})

    def _write(self) -> None:
        while (line := self._outbox.get()) is not None:
            try:
                self._child.send(line)
            except OSError:
                return  # the reader sees its end

    def _read(self) -> None:
        try:
            with ChildLog(self._log_path, self._log_max_bytes) as child_log:
                self._follow(child_log)
        except Exception as error:
            log.exception("session_given_up", model=self.told.model, cause=str(error))
            self.kill(f"it could not be followed: {error}")
        end = self._child.wait()
        with self._lock:
            self.state = "ended"
            sent = self._in_engine()
            left, self._open = list(self._open.values()), {}
            self._unsent.clear()
        self._outbox.put(None)
        why = self._why or f"it ended with {ending(end)}"
        working = [request for request in left if request.works or not self.ready_at]
        for request in left:
            if request.of_function and not self._killed and request in working:
                # What ends a process is the failure of the call that it worked on.
                if len(working) == 1 or not self.ready_at:
                    request.ended_with(end)
                else:
                    request.died(f"{why}; its log is {self._log_path}", beside=len(working) - 1)
            elif request.of_function:
                request.goes_back(why)
            elif self._began or self._killed:
                # A model that cannot be loaded is nobody's fault and everybody's failure.
                if not self.ready_at or request.replica:
                    beside = 0
                else:
                    beside = len(sent) - 1 if request in sent else max(1, len(sent))
                request.died(f"{why}; its log is {self._log_path}", beside=beside)
            else:
                request.ended_with(end)
        log.info("session_ended", model=self.told.model, exit=end.exit_code, signal=end.signal, failed=len(left))
        self._on_end(self)

    def _follow(self, child_log: ChildLog) -> None:
        for kind, line in self._child.read(_READ_SECONDS):
            if kind == "tick":
                continue
            self.heard_at = time.monotonic()
            if kind == "log":
                text = known.text(self._redactor.line(line).decode("utf-8", "replace"))
                child_log.write(text.encode(errors="replace") + b"\n")
                if self.state == "loading":
                    self._to_all(line, kind)
            else:
                self._deal(line)

    def _deal(self, line: bytes) -> None:
        """Give one event to the request that it is of, or take note of it."""
        try:
            event = json.loads(line)
            name, id = event["event"], event.pop("id", None)
            if not isinstance(id, str | None):
                raise TypeError("an id is text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        self._began = True
        if id is None:
            self._note(name, event, line)
            return
        with self._lock:
            request = self._open.get(id)
            wanted, beside = True, 0
            if request is not None and name == "finish":
                beside = 0 if request.of_function else self._beside(event)
                del self._open[id]
                self._send_due()
                wanted = self._aborted.pop(id, None) is None
                self.used_at = time.monotonic()
        if request is None:
            return
        if name == "finish" and event.get("status") == "cancelled" and wanted and not request.of_function:
            request.died(f"it was told to end; its log is {self._log_path}")  # by a signal of somebody else
        elif name == "finish":
            request.end(event, beside=beside)
        elif request.of_function and name == "log":
            request.put("log", str(event.get("message")).encode(errors="replace"))
        else:
            request.works = request.works or (name == "worker" and event.get("status") == "working")
            request.put("event", json.dumps(event).encode())

    def _beside(self, finish: Mapping[str, Any]) -> int:
        """Return how many others the engine had when it died, by its word; 0 for any other end. Under the lock."""
        error = finish.get("error")
        if not isinstance(error, Mapping) or error.get("type") != "EngineDied":
            return 0
        if self._died_with is None:
            self._died_with = len(self._in_engine())
        return self._died_with - 1 if self.ready_at else 0

    def _note(self, name: str, event: Mapping[str, Any], line: bytes) -> None:
        if name == "ready":
            self.told = Told.read(event)
            with self._lock:
                if self.state == "loading":
                    self.state, self.ready_at = "ready", time.monotonic()
                replicas = [asked for asked in self._open.values() if asked.replica]
            for asked in replicas:
                asked.put("event", _LOADED)
            self._tell_room()
        elif name == PLACES:
            before, self.told = self.told, replace(self.told, max_requests=Told.read(event).max_requests)
            if self.told.max_requests > before.max_requests:
                self._tell_room()
        elif name == "closing":
            with self._lock:
                if self.state == "ready":
                    self.state = "leaving"
            self.move_replicas("the session that it kept loaded is about to end")
        elif name == "error":
            log.warning("session_error", model=self.told.model, cause=known.text(str(event.get("error"))))
        elif name in ("worker", "progress") and self.state == "loading":
            self._to_all(line, "event")
        elif name == "finish" and event.get("status") == "failed":
            with self._lock:
                self.state = "closing"
                left, self._open = list(self._open.values()), {}
            for request in left:
                request.end(event)

    def _tell_room(self) -> None:
        """Say that more may join it; what is said to the server may take its time, and the process is to be read."""
        with contextlib.suppress(RuntimeError):  # without a thread, the next look at the queues finds it
            threading.Thread(target=self._on_room, name="gpuflow-session-room", daemon=True).start()

    def _to_all(self, line: bytes, kind: Literal["event", "log"]) -> None:
        """Tell every open request how the loading goes."""
        with self._lock:
            waiting = list(self._open.values())
        for request in waiting:
            request.put(kind, line)
