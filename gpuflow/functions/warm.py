"""The child of a function that stays warm: `python -m gpuflow.functions session`, begun by the first of its calls.

It imports and loads once, and answers calls on its main thread, one after the other, or those of a batch together. To
its worker it is a session (docs/reference/sessions.md): a line of JSON an order, events with the id of their call.
What cannot be interrupted without ending the process (a call that is aborted) ends it; the other calls go back.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Final

from celery.exceptions import SoftTimeLimitExceeded

from gpuflow.context import Stopped
from gpuflow.functions.batching import Batch, BatchedCall, WrongBatch, answers
from gpuflow.functions.calling import Interruptible, become, begin, conduct, cut, fail
from gpuflow.functions.calls import CLOSING, NOTICE, PLACES, SOFT_LIMIT, Call
from gpuflow.protocol import Emitter, Request, RequestEmitter
from gpuflow.surroundings import begin_child, let_sigterm_through, notice, terminate

#: The word on the command line that makes a child one.
SESSION: Final = "session"
#: The name of its engine, as sessions have one.
ENGINE: Final = "function"

#: As many short calls may wait in the process as are answered within so many seconds, and no more than that.
_AHEAD_SECONDS: Final = 0.25
_MOST_AHEAD: Final = 7
#: Calls that wait behind one that has run for so long are given back, at the next sign of life that is asked for.
_LONG_SECONDS: Final = 1.0
#: The weight of the last call in the mean of their times.
_WEIGHT: Final = 0.3
#: So long is waited for the call that began the session, when it cannot be loaded (seconds).
_OPENER_SECONDS: Final = 10.0
#: Longest piece of a printed line that is told at once, in characters.
_LINE_CHARACTERS: Final = 32_768
#: The exit code of a session that ends because a call was aborted.
_ABORTED: Final = 143


def serve(emitter: Emitter, orders: BinaryIO) -> int:
    """Serve one session to its end, and return the exit code."""
    return _Server(emitter, orders).serve()


@dataclass(frozen=True, eq=False)
class _Asked:
    """A call that is open."""

    id: str
    call: Call
    request: Request
    emitter: RequestEmitter
    came: float = field(default_factory=time.monotonic)


class _Server:
    """One loaded task and its open calls. The main thread answers, another one listens."""

    def __init__(self, emitter: Emitter, orders: BinaryIO) -> None:
        self._emitter = emitter
        self._orders = orders
        self._changed = threading.Condition()
        self._waiting: deque[_Asked] = deque()
        self._working: dict[str, _Asked] = {}
        self._began_at = 0.0
        self._closing = False
        self._served = 0
        self._batch: Batch | None = None
        self._mean_seconds: float | None = None
        self._places = 1
        #: Calls that a soft limit is to interrupt, those that it may interrupt now, and those that it has.
        self._soft: set[str] = set()
        self._interruptible: frozenset[str] = frozenset()
        self._late: set[str] = set()
        #: Calls whose attempts are to end: they go on elsewhere, or not at all.
        self._noticed: set[str] = set()
        self._ending: set[str] = set()
        #: Those whose surroundings the process has now.
        self._current: frozenset[str] = frozenset()
        self._printed = _Printed(self._told)
        self._of_thread = threading.local()

    def serve(self) -> int:
        """Load, and answer calls until it is closed."""
        opening = json.loads(self._orders.readline())
        call = Call.from_dict(opening["call"])
        sys.stdout = sys.stderr = self._printed
        become(call)
        signal.signal(signal.SIGUSR2, self._interrupt)
        threading.Thread(target=self._listen, name="gpuflow-orders", daemon=True).start()
        started = time.monotonic()
        try:
            task = begin(call)
        except Exception as error:  # noqa: BLE001  (whatever it raises is how the calls end)
            return self._not_loaded(error)
        self._batch = task.batch
        self._places = 2 * self._batch.max_size if self._batch is not None else 1
        self._emitter.emit(
            "ready",
            engine=ENGINE,
            model=str(opening["name"]),
            load_seconds=round(time.monotonic() - started, 3),
            max_requests=self._places,
            idle_seconds=opening["keep_seconds"],
            loads=1,
        )
        while calls := self._next():
            self._answer(task.app, calls)
        self._emitter.finish("completed")
        return 0

    def _not_loaded(self, error: Exception) -> int:
        """End the calls that wait for what cannot be loaded, each by the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing, _OPENER_SECONDS)
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
        for asked in left:
            self._fail(asked, error)
        self._emitter.finish("failed", {"type": type(error).__name__, "message": cut(error), "retryable": False})
        return 1

    # -- the main thread --------------------------------------------------------------------------------------------

    def _next(self) -> list[_Asked]:
        """Return the calls to be answered now, together; none when it is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return []
                if self._batch is not None:
                    left = self._waiting[0].came + self._batch.max_wait - time.monotonic()
                    self._changed.wait_for(self._is_full, max(0.0, left))
                if self._waiting:  # those that are aborted leave
                    break
            size = self._batch.max_size if self._batch is not None else 1
            calls = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            self._working = {asked.id: asked for asked in calls}
            self._began_at = time.monotonic()
        for asked in calls:
            asked.emitter.status("working")
        return calls

    def _is_full(self) -> bool:
        return self._closing or self._batch is None or len(self._waiting) >= self._batch.max_size

    def _answer(self, app: Any, calls: Sequence[_Asked]) -> None:
        started = time.monotonic()
        if self._batch is None:
            (asked,) = calls
            self._conduct(app, asked, partial(self._interrupting, [asked]))
            self._note_seconds(time.monotonic() - started)
        else:
            task = app.tasks[calls[0].call.name]
            for asked, item in zip(calls, self._together(task, calls), strict=True):
                if isinstance(item, Stopped) and asked.id not in self._noticed | self._ending:
                    _go_back(asked, "its batch was told to end")
                    continue
                with _giving(task, item):
                    self._conduct(app, asked, _uninterrupted)
        self._printed.end()
        with self._changed:
            self._working.clear()
            self._current = frozenset()
            self._served += len(calls)
        for ids in (self._soft, self._late, self._noticed, self._ending):
            ids.clear()
        let_sigterm_through()

    def _conduct(self, app: Any, asked: _Asked, limits: Interruptible) -> None:
        self._of_thread.emitters = [asked.emitter]
        conduct(asked.call, asked.request, asked.emitter, lambda: self._task(app, asked), limits)
        self._printed.end()
        self._of_thread.emitters = None

    def _task(self, app: Any, asked: _Asked) -> Any:
        """Return the task of a call that is about to be made; its surroundings know what it was told before."""
        self._begun([asked])
        return app.tasks[asked.call.name]

    def _begun(self, calls: Sequence[_Asked]) -> None:
        """Note of which calls the surroundings are now; they are told what these calls were told before."""
        ids = frozenset(asked.id for asked in calls)
        with self._changed:
            self._current = ids
            if ids & self._noticed:
                notice()
            if ids & self._ending:
                terminate(asked=False)

    def _together(self, task: Any, calls: Sequence[_Asked]) -> list[Any]:
        """Return what the function gives for each of some calls, an exception for one that fails.

        Where it raises, each is made by itself, so that the bad one fails alone. The surroundings are those of the
        first.
        """
        begin_child(calls[0].request, calls[0].emitter)
        self._begun(calls)
        self._of_thread.emitters = [asked.emitter for asked in calls]
        try:
            with self._interrupting(calls) as over:
                given = answers(task.batched, [_batched(asked.call) for asked in calls], task.name)
                over()
                return given
        except (WrongBatch, Stopped) as error:
            return [error] * len(calls)
        except Exception as error:  # noqa: BLE001  (it is how the call ends)
            if len(calls) == 1:
                return [error]
            traceback.print_exception(error)
            self._printed.end()
            return [
                SoftTimeLimitExceeded() if asked.id in self._late else self._together(task, [asked])[0]
                for asked in calls
            ]

    @contextmanager
    def _interrupting(self, calls: Sequence[_Asked]) -> Iterator[Callable[[], None]]:
        """Let soft limits of some calls interrupt what is done."""

        def over() -> None:
            self._interruptible = frozenset()

        try:
            self._interruptible = frozenset(asked.id for asked in calls)
            self._interrupt()  # one that came a moment before
            yield over
        finally:
            over()

    def _interrupt(self, *_: object) -> None:
        """Raise where a soft limit is due; on the main thread, as a signal's handler."""
        due = self._soft & self._interruptible
        if due:
            self._soft -= due
            self._late |= due
            raise SoftTimeLimitExceeded

    def _note_seconds(self, seconds: float) -> None:
        """Tell how many calls may be sent ahead, as these are short or not."""
        mean = self._mean_seconds
        self._mean_seconds = mean = seconds if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * seconds
        self._tell_places(1 + min(_MOST_AHEAD, int(_AHEAD_SECONDS / max(mean, 1e-6))))

    def _tell_places(self, places: int) -> None:
        if places != self._places:
            self._places = places
            self._emitter.emit(PLACES, max_requests=places)

    # -- the thread that listens ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for line in self._orders:
            try:
                self._hear(json.loads(line))
            except Exception as error:  # noqa: BLE001  (one bad line ends no other call)
                told = {"type": "BadLine", "message": f"{type(error).__name__}: {error}", "retryable": False}
                self._emitter.emit("error", error=told)
        os._exit(0)  # the worker has gone, and nobody waits for an answer

    def _hear(self, order: Mapping[str, Any]) -> None:
        match order.get("op"):
            case "run":
                self._run(str(order["id"]), Request.from_json(json.dumps(order["request"])))
            case "say":
                self._say(str(order["id"]), str(order["word"]).encode())
            case "abort":
                self._abort(str(order["id"]))
            case "end":
                self._end(str(order["id"]))
            case "ping":
                self._sign(order.get("n"))
            case "close":
                with self._changed:
                    self._closing = True
                    self._changed.notify_all()
            case other:
                raise ValueError(f"op is {other!r}; it must be one of run, say, abort, end, ping, close")

    def _run(self, id: str, request: Request) -> None:
        emitter = RequestEmitter(self._emitter, id)
        emitter.output_dir = request.output_dir
        asked = _Asked(id, Call.from_dict(request.spec["function"]), request, emitter)
        with self._changed:
            if not self._closing:
                self._waiting.append(asked)
                self._changed.notify_all()
                return
        _go_back(asked, "it takes no more calls")

    def _say(self, id: str, word: bytes) -> None:
        if word == SOFT_LIMIT:
            self._limit(id)
        with self._changed:
            asked = self._no_more(id) if word == NOTICE else None
            if word == NOTICE and id in self._working:
                self._noticed.add(id)
                if id in self._current:
                    notice()
        if asked is not None:
            _go_back(asked, "its worker is about to end")

    def _limit(self, id: str) -> None:
        """End a call by its soft limit: one that waits at once."""
        main_thread = threading.main_thread().ident
        with self._changed:
            asked = self._no_more(id)
            if asked is None and id in self._working and main_thread is not None:
                self._soft.add(id)
                signal.pthread_kill(main_thread, signal.SIGUSR2)
        if asked is not None:
            self._fail(asked, SoftTimeLimitExceeded())

    def _abort(self, id: str) -> None:
        """End a call: one that asks whether it is to end is told so, another one ends with the process."""
        with self._changed:
            if id in self._working and (id not in self._current or terminate()):
                self._ending.add(id)
                return
        self._end(id)

    def _end(self, id: str) -> None:
        """End a call now. One that is not here has ended, whatever was heard of that."""
        with self._changed:
            asked, working = self._no_more(id), self._working.get(id)
            is_over = working is None or working.emitter.ended
            if not is_over:
                self._closing = True
                left = [*(one for one in self._working.values() if one.id != id), *self._waiting]
                self._waiting.clear()
        if working is None or is_over:
            emitter = asked.emitter if asked is not None else RequestEmitter(self._emitter, id)
            emitter.finish("cancelled")
            return
        for one in left:
            _go_back(one, "the process has ended with another call")
        working.emitter.finish("cancelled")
        self._emitter.finish("cancelled")
        os._exit(_ABORTED)

    def _no_more(self, id: str) -> _Asked | None:
        """Take a call out of those that wait; None: it does not wait. Under the lock."""
        found = next((asked for asked in self._waiting if asked.id == id), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _sign(self, number: Any) -> None:
        """Give a sign of life; let calls go that wait behind a long one."""
        left: list[_Asked] = []
        with self._changed:
            is_long = self._working and time.monotonic() - self._began_at > _LONG_SECONDS
            if is_long and self._batch is None and self._waiting:
                left = list(self._waiting)
                self._waiting.clear()
            told = {"running": len(self._working), "waiting": len(self._waiting), "served": self._served, "loads": 1}
        if left:
            self._tell_places(1)
        for asked in left:
            _go_back(asked, "the call before it takes long")
        self._emitter.emit("pong", n=number, **told)

    def _fail(self, asked: _Asked, error: Exception) -> None:
        self._of_thread.emitters = [asked.emitter]
        fail(error, asked.request.output_dir, asked.emitter)
        self._of_thread.emitters = None

    # -- what is printed --------------------------------------------------------------------------------------------

    def _told(self, line: str) -> bool:
        """Give a line to the logs of the calls that it is of; False: of none."""
        emitters = getattr(self._of_thread, "emitters", None) or [one.emitter for one in list(self._working.values())]
        for emitter in emitters:
            for at in range(0, len(line) or 1, _LINE_CHARACTERS):
                emitter.emit("log", message=line[at : at + _LINE_CHARACTERS], stream="stderr")
        return bool(emitters)


class _Printed(io.TextIOBase):
    """What the functions print: whole lines, for the logs of the calls that work; between calls, for the session's."""

    encoding = "utf-8"

    def __init__(self, tell: Callable[[str], bool]) -> None:
        self._tell = tell
        self._lock = threading.RLock()
        self._rest = ""

    def writable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the session's log: what is written there by others than Python is the session's."""
        return 2

    @property
    def buffer(self) -> BinaryIO:
        """The session's log."""
        return sys.__stderr__.buffer  # type: ignore[union-attr,return-value]

    def write(self, text: str) -> int:
        """Tell the lines that are whole."""
        with self._lock:
            *lines, self._rest = f"{self._rest}{text}".split("\n")
            for line in lines:
                self._line(line)
        return len(text)

    def end(self) -> None:
        """Tell what is no whole line."""
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._line(rest)

    def _line(self, line: str) -> None:
        if not self._tell(line):
            os.write(2, f"{line}\n".encode(errors="replace"))


@contextmanager
def _uninterrupted() -> Iterator[Callable[[], None]]:
    """Let nothing interrupt a call whose result is there."""
    yield lambda: None


@contextmanager
def _giving(task: Any, item: Any) -> Iterator[None]:
    """Let a task return an item, or raise it, in the place of what its function would; all around it stays."""

    def give(*_: Any, **__: Any) -> Any:
        if isinstance(item, BaseException):
            raise item
        return item

    name = "_orig_run" if hasattr(task, "_orig_run") else "run"
    own = task.__dict__.get(name)
    setattr(task, name, give)
    try:
        yield
    finally:
        if own is None:
            delattr(task, name)
        else:
            setattr(task, name, own)


def _batched(call: Call) -> BatchedCall:
    args, kwargs = call.args_kwargs()
    return BatchedCall(str(call.request.get("id")), args, kwargs)


def _go_back(asked: _Asked, why: str) -> None:
    asked.emitter.finish("failed", {"type": CLOSING, "message": why, "retryable": True})
