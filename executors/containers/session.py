"""A container that answers requests one after the other, or its preset as a process that does.

It is the engine `container` of a session, and what a task with a request starts for itself where no session is kept.
The container is told of each request by a line on its stdin, and answers in events (docs/howto/run-a-container.md):

    {"op": "run", "id": "task-1#1", "task_id": "task-1", "attempt": 1, "output_dir": "/...", "request": ...}
    {"op": "abort", "id": "task-1#1"}

The end of its input is the end of the session. It is never told of a request before the one before has its `finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from executors import cancellation
from executors.base import ExecutorError, bad_input
from executors.containers.files import RequestFolder, SharedFolder
from executors.containers.starting import Launch, launch_of, starter_of
from executors.failures import classify
from executors.programs.heard import Heard, check, own_error
from executors.programs.running import Ran, Reader, stop
from executors.sessions.engine import EngineDied, Loaded, SessionEngine
from executors.sessions.lines import Open
from gpuflow.protocol import Emitter, Event, Request, parse_line
from gpuflow.spec.patterns import metric_pattern

#: How often it is seen that the container is ready, or has ended, in seconds.
_POLL_SECONDS: Final = 0.05
#: A container that does not end a request so long after its abort is killed, in seconds.
ABORT_SECONDS: Final = 10.0
#: From the end of its input to SIGTERM, and from there to SIGKILL, in seconds: within what a session has for its end.
_CLOSE_SECONDS: Final = 2.5
_TERM_SECONDS: Final = 1.0
#: What a container has written to stderr before its `finish` is waited for so long at most, in seconds.
_DRAIN_SECONDS: Final = 1.0
#: Events of a container that are passed on while it loads; the others are a session's own, or of no request.
_OF_THE_LOAD: Final = ("worker", "progress")


class _Asked:
    """A request that the container works on; `done` gets its finish event, or why there is none."""

    def __init__(self, id: str, heard: Heard) -> None:
        self.id, self.heard = id, heard
        self.done: Future[Mapping[str, Any]] = Future()


class _LoadEmitter(Emitter):
    """Passes on how the load goes; what else a container says before its first request is for the log."""

    def __init__(self, parent: Emitter) -> None:
        super().__init__(sys.stderr)
        self._parent = parent

    def emit(self, name: str, /, **data: Any) -> None:
        """Tell one event of the load."""
        if name in _OF_THE_LOAD:
            self._parent.emit(name, **data)
        else:
            print(data.get("message", name), file=sys.stderr, flush=True)


class ContainerSessionEngine(SessionEngine):
    """One container. With `alone` it is started for one task: its stderr is that of the task then."""

    name = "container"

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._turn = asyncio.Lock()
        self._leaving = threading.Lock()
        self._lock = threading.Lock()
        self._asked: _Asked | None = None
        #: The request that its stderr is of: the same, and a little longer.
        self._heard_by: _Asked | None = None
        self._numbers = itertools.count(1)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self._stack = contextlib.ExitStack()
        self._code = 0
        #: Why it answers nothing any more; None while it does.
        self._gone: str | None = None
        self._failure: ExecutorError | None = None

    # -- the engine of a session ------------------------------------------------------------------------------------

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Start the container of the opening, and wait until it is ready. Raises ExecutorError."""
        request = Request(
            task_id="session",
            task_type=opening.task_type,
            spec=opening.spec,
            output_dir=str(Path.cwd()),
            gpus=opening.gpus,
            cache_dir=opening.cache_dir,
        )
        return self.start(launch_of(request, emitter), emitter)

    def start(self, launch: Launch, emitter: Emitter) -> Loaded:
        """Start a container, and wait until it is ready. Nothing of it is left where that fails."""
        section = self._section = launch.section
        self._starter = starter_of(launch, emitter)
        self._loading = Heard(_LoadEmitter(emitter), {})
        self._program = self._stack.enter_context(self._starter.started(talks=True))
        try:
            self._readers = [
                Reader(stream, on_line)
                for stream, on_line in zip(self._program.streams, (self._stdout, self._stderr), strict=True)
            ]
            for target in (self._watch, self._write):
                threading.Thread(target=target, name="gpuflow-container", daemon=True).start()
            self._wait_until_ready(section["timeout_seconds"])
        except BaseException:
            self.close()
            raise
        return Loaded(
            model=str(section["preset"]),
            revision=None,
            max_requests=1,
            idle_seconds=section["idle_seconds"],
            lifetime_seconds=section["lifetime_seconds"],
        )

    async def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Let the container answer a request when it is its turn. A cancel aborts this request.

        Raises ExecutorError; EngineDied where the container has ended.
        """
        section: Mapping[str, Any] = request.spec["container"]
        if section.get("preset") != self._section["preset"]:
            raise bad_input(f"this session runs the preset {self._section['preset']}, not {section.get('preset')}")
        async with self._turn:
            self.check()
            folder = await asyncio.to_thread(self._folder_of, request)
            patterns = {name: metric_pattern(text) for name, text in (section.get("metrics") or {}).items()}
            heard = Heard(emitter, patterns, tells_stderr=not self._alone)
            asked = _Asked(f"{request.task_id}#{next(self._numbers)}", heard)
            emitter.status("working")
            try:
                finish = await self._answer(asked, request, folder)
                await asyncio.to_thread(self._readers[1].drain, _DRAIN_SECONDS)
                return await asyncio.to_thread(self._result, heard, finish, request, folder, emitter)
            finally:
                self._heard_by = None
                asyncio.get_running_loop().run_in_executor(None, folder.close)

    @property
    def running(self) -> int:
        """One while it works on a request; the others wait for their turn."""
        return int(self._asked is not None)

    def check(self) -> None:
        """Raise EngineDied where the container answers nothing any more."""
        if self._gone is not None:
            raise EngineDied(self._gone)

    def close(self) -> None:
        """End the container: by the end of its input, then by signals. Nothing of it is left."""
        self._gone = self._gone or f"{self._starter.kind.name} was closed"
        self._outbox.put(None)
        with contextlib.suppress(ExecutorError):
            term_at = time.monotonic() + _CLOSE_SECONDS
            while self._program.ended(_POLL_SECONDS) is None:
                if time.monotonic() >= term_at:
                    stop(self._program, _TERM_SECONDS)
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Remove the container and what it was given; whoever comes second waits for the first."""
        with self._leaving:
            self._stack.close()

    # -- one request ------------------------------------------------------------------------------------------------

    async def _answer(self, asked: _Asked, request: Request, folder: RequestFolder) -> Mapping[str, Any]:
        """Return the finish event of a request. Raises ExecutorError for one that takes too long."""
        with self._lock:
            self._asked = self._heard_by = asked
        self._tell(
            op="run",
            id=asked.id,
            task_id=request.task_id,
            attempt=request.attempt,
            output_dir=str(folder.path),
            request=request.spec["container"].get("request"),
        )
        limit = self._section["timeout_seconds"]
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked.done)), limit)
        except TimeoutError:
            await self._abort(asked)
            raise ExecutorError(
                "TimeLimitExceeded", f"stopped after {limit:g} s, the limit of its preset; raise its `timeout`"
            ) from None
        except asyncio.CancelledError:
            await self._abort(asked)
            raise

    async def _abort(self, asked: _Asked) -> None:
        """Ask the container to end a request; one that does not is killed, and the session with it."""
        self._tell(op="abort", id=asked.id)
        if self._alone:
            return  # its end comes next
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked.done)), ABORT_SECONDS)
        except EngineDied:
            return
        except (TimeoutError, asyncio.CancelledError):
            self._gone = self._gone or f"it did not end a request within {ABORT_SECONDS:g} s of its abort"
            threading.Thread(target=self._kill, name="gpuflow-kill", daemon=True).start()

    def _kill(self) -> None:
        with contextlib.suppress(ExecutorError):
            self._program.signal(signal.SIGKILL)

    def _result(
        self, heard: Heard, finish: Mapping[str, Any], request: Request, folder: RequestFolder, emitter: Emitter
    ) -> dict[str, Any]:
        """Return the value of a request that is answered, with its files in its own folder. Raises ExecutorError."""
        heard.close()
        kind = self._starter.kind
        if finish.get("status") == "failed":
            raise own_error(finish.get("error") or {}, kind)
        if finish.get("status") != "completed":
            raise ExecutorError(
                f"{kind.error}Failed", f"{kind.name} says {finish.get('status')!r} of a request that it was to answer"
            )
        value = heard.value(folder.to_read)
        for name in folder.bring(Path(request.output_dir)):
            emitter.emit("log", message=f"{name} is no plain file or folder, and is left out of the result")
        return {**value, "metrics": heard.metrics, "output": heard.output(), **self._starter.how}

    def _folder_of(self, request: Request) -> RequestFolder:
        """Return the folder for the files of a request: one that the container shares, else that of its task."""
        if self._section["exchange"]:
            return SharedFolder(Path(self._section["exchange"]))
        return RequestFolder(Path(request.output_dir))

    # -- what the container says ------------------------------------------------------------------------------------

    def _stdout(self, line: bytes) -> None:
        event = parse_line(line)
        given = event.data.get("id")
        with self._lock:
            asked = self._asked
            mine = asked is not None and given in (None, asked.id)
            if mine and event.name == "finish":
                self._asked = None
        if asked is None or not mine:
            self._unasked(event, line)
            return
        data = {name: value for name, value in event.data.items() if name != "id"}
        asked.heard.event(replace(event, data=data), line)
        if event.name == "finish" and not asked.done.done():
            asked.done.set_result(data)

    def _unasked(self, event: Event, line: bytes) -> None:
        """Take what it says of no request: how it loads, or something for the log."""
        if self._is_ready.is_set():
            print(line.decode("utf-8", "replace"), file=sys.stderr, flush=True)
        elif event.name == "ready":
            self._is_ready.set()
        else:
            self._loading.event(event, line)

    def _stderr(self, line: bytes) -> None:
        asked = self._heard_by
        (asked.heard if asked is not None else self._loading).stderr(line)

    # -- its threads ------------------------------------------------------------------------------------------------

    def _tell(self, **operation: Any) -> None:
        self._outbox.put(json.dumps(operation).encode(errors="replace") + b"\n")

    def _write(self) -> None:
        """Write what it is told; the end of its input comes last."""
        while (line := self._outbox.get()) is not None:
            try:
                self._program.send(line)
            except OSError:
                break  # it has ended, or is about to: the watch sees that
        self._program.end_input()

    def _watch(self) -> None:
        """Wait for its end, from whichever cause; nothing of it is left then."""
        try:
            while (code := self._program.ended(_POLL_SECONDS)) is None:
                for reader in self._readers:
                    reader.check()
            for reader in self._readers:
                reader.finish()
            self._code = code
            self._starter.check_memory(code)
        except ExecutorError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001  (whatever a reader raised: it is not read any more)
            record = classify(error)
            self._failure = ExecutorError(record["type"], record["message"], retryable=record["retryable"])
            with contextlib.suppress(ExecutorError):
                stop(self._program, _TERM_SECONDS)
        self._outbox.put(None)
        with self._lock:
            asked, self._asked = self._asked, None
        self._gone = self._gone or self._how_it_ended(asked)
        self._leave_nothing()
        self._is_over.set()
        if asked is not None and not asked.done.done():
            asked.done.set_exception(self._error_of(asked.heard) if self._alone else EngineDied(self._gone))

    def _how_it_ended(self, asked: _Asked | None) -> str:
        """Return what the errors of the requests say that it has left."""
        if self._failure is not None:
            return self._failure.message
        ran, heard = Ran(self._code, noticed=False), asked.heard if asked is not None else self._loading
        how = f"was ended by signal {ran.signal}" if ran.signal else f"ended with exit code {ran.code}"
        when = " in the middle of a request" if asked is not None else ""
        words = heard.last_words()
        return f"{self._starter.kind.name} {how}{when}" + (f"; its last words:\n{words}" if words else "")

    def _wait_until_ready(self, limit_seconds: float | None) -> None:
        """Wait for `ready`. Raises ExecutorError for a container that ends before, or takes too long."""
        began_at = time.monotonic()
        while not self._is_ready.wait(_POLL_SECONDS):
            if self._is_over.is_set() and not self._is_ready.is_set():
                raise self._error_of(self._loading)
            if limit_seconds is not None and time.monotonic() - began_at >= limit_seconds:
                raise ExecutorError(
                    "TimeLimitExceeded",
                    f"{self._starter.kind.name} was not ready after {limit_seconds:g} s, the limit of its preset; "
                    "raise its `timeout`",
                )

    def _error_of(self, heard: Heard) -> ExecutorError:
        """Return what its end means for its task, as for a container that runs once."""
        if self._failure is not None:
            return self._failure
        kind = self._starter.kind
        try:
            check(Ran(self._code, noticed=False), heard, kind)
        except ExecutorError as error:
            return error
        return ExecutorError(f"{kind.error}Failed", f"{kind.name} ended with exit code 0 and has answered nothing")


def answer_alone(launch: Launch, emitter: Emitter) -> dict[str, Any]:
    """Start a container for one request only, and return the value of its answer. Raises ExecutorError."""
    engine = ContainerSessionEngine(alone=True)
    engine.start(launch, emitter)
    try:
        return cancellation.run_async(engine.run(launch.request, emitter))
    finally:
        engine.close()
