"""One task's request to a session: for its attempt it is what a child of its own would be (`child.RunningWork`)."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from gpuflow.errors import GPUFlowError
from gpuflow.functions.calls import CLOSING
from gpuflow.worker.child import ChildEnd, LineKind


class AtEnd(Protocol):
    """Brings the files of a request to where they belong, on the attempt's thread. Raises OSError, GPUFlowError."""

    def __call__(self, *, completed: bool) -> None: ...  # noqa: D102


class SessionRequest:
    """An open request. The session's thread feeds it (`put`, `end`), the attempt's thread reads it."""

    def __init__(
        self,
        id: str,
        *,
        alone: bool = False,
        replica: bool = False,
        of_function: bool = False,
        at_end: AtEnd | None = None,
    ) -> None:
        self.id = id
        #: It is a call of a team's function, which ends as its process does while it `works`.
        self.of_function = of_function
        self.works = False
        #: It is never sent to the engine: it keeps the session loaded until it is given up, or the session ends.
        self.replica = replica
        self._at_end = at_end
        self._finish: Mapping[str, Any] | None = None
        #: It may be what killed its last engine: nothing else is answered beside it.
        self.alone = alone
        self._shim_pid: int | None = None
        self._abort: Callable[[str], None] | None = None
        self._tell: Callable[[Mapping[str, Any]], None] | None = None
        self._unsaid: list[bytes] = []
        self._lines: queue.SimpleQueue[tuple[LineKind, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished = False
        self._killed = False
        self._end = ChildEnd(exit_code=0, signal=None)
        self._unwanted = False
        self._asked_at = time.monotonic()
        self._due_at: float | None = None

    @property
    def held_up_seconds(self) -> float:
        """How long it has waited until its engine had no other request, or has answered one that was to be alone."""
        return (self._due_at or time.monotonic()) - self._asked_at

    def _say_rest(self) -> None:
        """Say what is to be said, once the engine knows of it."""
        with self._lock:
            if self._tell is None or self._due_at is None:
                return
            unsaid, self._unsaid = self._unsaid, []
            for word in unsaid:
                self._tell({"op": "say", "id": self.id, "word": word.decode()})

    @property
    def is_killed(self) -> bool:
        """Whether its attempt waits for its end no longer."""
        return self._killed

    @property
    def shim_pid(self) -> int | None:
        """The shim of the session, once it has been sent there."""
        return self._shim_pid

    # -- the session's side -------------------------------------------------------------------------------------

    def due(self) -> None:
        """Note that it has gone to the engine now."""
        with self._lock:
            self._due_at = time.monotonic()
        self._say_rest()

    def sent(self, shim_pid: int, abort: Callable[[str], None], tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Note where it is answered, by what it is ended there, and by what the session is told of it."""
        with self._lock:
            self._shim_pid, self._abort, self._tell = shim_pid, abort, tell
            unwanted = self._unwanted
        self._say_rest()
        if unwanted:
            abort(self.id)

    def put(self, kind: LineKind, line: bytes) -> None:
        """Pass on one line."""
        self._lines.put((kind, line))

    def end(self, finish: Mapping[str, Any], *, beside: int = 0) -> None:
        """End it with its finish event. A second end says nothing. `beside`: see ChildEnd."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._end = ChildEnd(exit_code=0, signal=None, beside=beside)
            self._finish = finish
        self._lines.put(None)

    def died(self, why: str, *, beside: int = 0) -> None:
        """End it because the session has gone; another attempt gets another one. `beside`: see ChildEnd."""
        message = f"the warm session that answered it has gone: {why}"
        error = {"type": "EngineDied", "message": message, "retryable": True}
        self.end({"event": "finish", "status": "failed", "error": error}, beside=beside)

    def moved(self, why: str) -> None:
        """End a replica, to begin again elsewhere; nothing has failed."""
        error = {"type": "ReplicaMoved", "message": why, "retryable": True}
        self.end({"event": "finish", "status": "failed", "error": error}, beside=1)

    def goes_back(self, why: str) -> None:
        """End a call that was not answered: it is made elsewhere."""
        self.end({"event": "finish", "status": "failed", "error": {"type": CLOSING, "message": why, "retryable": True}})

    def ended_with(self, end: ChildEnd) -> None:
        """End it as the process of its session has ended: that is its own end."""
        with self._lock:
            if self._finished:
                return
            self._finished, self._end = True, end
        self._lines.put(None)

    # -- the attempt's side -------------------------------------------------------------------------------------

    def say(self, word: bytes) -> None:
        """Tell the function something that is called by this request."""
        with self._lock:
            self._unsaid.append(word)
        self._say_rest()

    def notice(self) -> None:
        """Do nothing: a request is answered soon, and has no state that could go on elsewhere. A replica ends."""
        if self.replica:
            self._give_up()

    def terminate(self) -> None:
        """Ask the session to end this request alone."""
        self._give_up()

    def kill(self) -> None:
        """Ask once more, and wait for its end no longer. A session that does not obey is ended by its keeper."""
        self._killed = True
        self._give_up()
        self._lines.put(None)

    def _give_up(self) -> None:
        with self._lock:
            self._unwanted = True
            abort = self._abort
        if abort is not None:
            abort(self.id)

    def read(self, timeout_seconds: float) -> Iterator[tuple[LineKind, bytes]]:
        """Yield its lines until its end, and a tick at least every timeout."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_seconds)
            except queue.Empty:
                yield "tick", b""
                continue
            if line is None:
                if self._finish is not None:
                    yield "event", json.dumps(self._brought(self._finish)).encode()
                return
            yield line
            if self._lines.empty():
                yield "tick", b""

    def _brought(self, finish: Mapping[str, Any]) -> Mapping[str, Any]:
        """Bring its files to their place; return its finish event, which is a failure where that cannot be done."""
        if self._at_end is None:
            return finish
        try:
            self._at_end(completed=finish.get("status") == "completed")
        except (OSError, GPUFlowError) as error:
            told = {"type": type(error).__name__, "message": f"its results were not brought here: {error}"}
            return {"event": "finish", "status": "failed", "error": {**told, "retryable": isinstance(error, OSError)}}
        return finish

    def wait(self) -> ChildEnd:
        """Tell how it ended: in the way of a child whose exit code agrees with its finish event."""
        return ChildEnd(exit_code=None, signal=None) if self._killed else self._end
