"""The loop of a session: takes operations, serves each request in a task of its own, and ends the process.

A request's failure is its own. The session ends with the engine (`EngineDied`), at `close`, at the end of its input, or
on a signal; whatever the reason, each open request has its finish line first, and no process is left. `cancelled` is
what somebody wanted: an abort, or nobody left to answer to. Those that a signal ends fail, to be tried again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NoReturn

from executors.base import MERGED, ExecutorError, plain
from executors.cache import Holds
from executors.data.shards import take_shard
from executors.failures import classify
from executors.merging import Result, children_of, joined
from executors.sessions.channel import RequestEmitter, SessionEmitter, listen
from executors.sessions.children import answer_children
from executors.sessions.engine import EngineDied, Loaded, SessionEngine, make_engine
from executors.sessions.inputs import check_input
from executors.sessions.leaving import leave
from executors.sessions.lines import Abort, BadLine, Close, Open, Operation, Ping, Run, read_operation
from executors.sessions.memory import grown_bytes, used_bytes
from executors.sessions.requests import opened, read_request
from executors.sessions.unused import unused, with_warnings
from gpuflow.protocol import Emitter, Request, take_stdin

ENDED: Final = 0
FAILED: Final = 1
BAD_OPENING: Final = 2
STOPPED: Final = 143

#: How often the session looks whether its engine still lives while nothing else would tell, in seconds.
_CHECK_SECONDS: Final = 0.5
#: How long an engine may take to free what it holds before it is killed, in seconds.
_CLOSE_SECONDS: Final = 5.0
#: Threads that read requests and write results; a request may wait for a lock or a download in one.
_THREADS: Final = 32

#: Status and error of a finish event.
Finish = tuple[Literal["completed", "failed", "cancelled"], dict[str, Any] | None]


def main() -> NoReturn:
    """Serve one session to its end."""
    emitter = SessionEmitter.claim_stdout()
    asyncio.run(SessionServer(emitter).serve())
    leave(FAILED)  # not reached: `serve` leaves


class SessionServer:
    """One engine and the requests that are open on it. All of it runs in one event loop."""

    def __init__(self, emitter: SessionEmitter) -> None:
        self._emitter = emitter
        self._engine: SessionEngine | None = None
        self._open: dict[str, asyncio.Task[Finish | None]] = {}
        self._aborted: set[str] = set()
        self._loads = self._served = 0
        self._closing = False
        self._died: ExecutorError | None = None

    async def serve(self) -> NoReturn:
        """Listen, load and serve; ends the process."""
        self._loop = loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="gpuflow-session"))
        self._end: asyncio.Future[int] = loop.create_future()
        self._ready: asyncio.Future[Loaded] = loop.create_future()
        self._told: asyncio.Future[Open] = loop.create_future()
        self._opening: asyncio.Future[Open] = loop.create_future()
        self._install_signals()
        self._signalled = False
        self._emitter.gone = lambda: loop.call_soon_threadsafe(self._stop, STOPPED)
        self._emitter.emit("connection", status="connected")
        listen(take_stdin(), lambda line: loop.call_soon_threadsafe(self._hear, line))
        life = loop.create_task(self._live())
        code = await self._end
        life.cancel()
        await self._leave(code)

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signal)
        self._loop.add_signal_handler(signal.SIGUSR1, self._close)

    def _signal(self) -> None:
        self._signalled = True
        self._stop(STOPPED)

    # -- what is heard ---------------------------------------------------------------------------------------------

    def _hear(self, line: bytes | BadLine | None) -> None:
        if line is None:
            self._stop(ENDED)
            return
        try:
            if isinstance(line, BadLine):
                raise line
            operation = read_operation(line)
            if isinstance(operation, Open) == self._told.done():
                raise BadLine("the session is open already" if self._told.done() else "the first line must be open")
        except BadLine as error:
            self._refuse(error)
            return
        self._do(operation)

    def _refuse(self, error: BadLine) -> None:
        record = {"type": "BadLine", "message": str(error), "retryable": False}
        if not self._told.done():
            self._emitter.finish("failed", plain(record))
            self._stop(BAD_OPENING)
        elif error.id is not None and error.id not in self._open:
            RequestEmitter(self._emitter, error.id).finish("failed", plain(record))
        else:
            self._emitter.emit("error", error=plain(record))

    def _do(self, operation: Operation) -> None:
        match operation:
            case Open():
                self._told.set_result(operation)
            case Run():
                self._run(operation)
            case Abort():
                task = self._open.get(operation.id)
                if task is not None:
                    self._aborted.add(operation.id)
                    task.cancel()
            case Ping():
                self._emitter.emit("pong", n=operation.n, **self._counts())
            case Close():
                self._close()

    def _counts(self) -> dict[str, int]:
        running = self._engine.running if self._engine is not None and self._ready.done() else 0
        running = min(running, len(self._open))
        return {
            "running": running,
            "waiting": len(self._open) - running,
            "loads": self._loads,
            "served": self._served,
        }

    def _run(self, operation: Run) -> None:
        if operation.id in self._open:
            self._refuse(BadLine(f"a request {operation.id} is open already; give each its own id", id=operation.id))
        elif self._closing:
            record = {"type": "SessionClosing", "message": "the session takes no more requests", "retryable": True}
            RequestEmitter(self._emitter, operation.id).finish("failed", record)
        else:
            emitter = RequestEmitter(self._emitter, operation.id)
            task = self._loop.create_task(self._serve_one(operation, emitter))
            self._open[operation.id] = task
            task.add_done_callback(lambda task: self._ended(operation.id, emitter, task))

    def _ended(self, request_id: str, emitter: Emitter, task: asyncio.Task[Finish | None]) -> None:
        """Tell how a request ended. Its id is free by then: whoever hears of the end may use it again."""
        del self._open[request_id]
        self._served += 1
        finish = (None if task.cancelled() else task.result()) or self._finish_of(request_id)
        self._look_at_engine()
        self._aborted.discard(request_id)
        emitter.finish(*finish)
        if self._closing and not self._open:
            self._stop(ENDED)

    def _look_at_engine(self) -> None:
        """End the session if the engine has gone with a request: whoever hears of its end sends no more here."""
        if self._engine is not None and self._ready.done() and self._died is None:
            try:
                self._engine.check()
            except EngineDied as error:
                self._die(error)

    def _close(self) -> None:
        self._closing = True
        if not self._open:
            self._stop(ENDED)

    def _stop(self, code: int) -> None:
        self._closing = True
        if not self._end.done():
            self._end.set_result(code)

    # -- the engine ------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Load the engine, say so, and look after it."""
        told = await self._told
        try:
            opening = await asyncio.to_thread(opened, told)
            self._opening.set_result(opening)
            started, before = time.monotonic(), await asyncio.to_thread(used_bytes, opening.gpus)
            loaded = await asyncio.to_thread(self._load, opening)
            memory = grown_bytes(before, await asyncio.to_thread(used_bytes, opening.gpus))
        except Exception as error:  # noqa: BLE001  (whatever went wrong is told, with its traceback in the log)
            traceback.print_exception(error)
            self._die(error)
            return
        self._loads += 1
        self._ready.set_result(loaded)
        self._emitter.emit(
            "ready",
            engine=opening.engine,
            model=loaded.model,
            revision=loaded.revision,
            load_seconds=round(time.monotonic() - started, 3),
            max_requests=loaded.max_requests,
            memory_bytes=memory,
            loads=self._loads,
            **_limits(loaded),
        )
        while self._engine is not None:
            try:
                self._engine.check()
            except EngineDied as error:
                self._die(error)
                return
            await asyncio.sleep(_CHECK_SECONDS)

    def _load(self, opening: Open) -> Loaded:
        self._engine = make_engine(opening)
        return self._engine.load(opening, self._emitter)

    def _die(self, error: Exception) -> None:
        """The engine is gone, or never came: every open request fails with that error, and the session ends."""
        if self._died is None:
            self._emitter.emit("closing")  # before the first request ends: what is tried again goes elsewhere
            record = classify(error)
            self._died = ExecutorError(record["type"], record["message"], retryable=record["retryable"])
            self._stop(FAILED)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _serve_one(self, operation: Run, emitter: Emitter) -> Finish | None:
        """Serve a request and return its end; None where that is the end of the session."""
        holds = Holds()
        try:
            emitter.emit("connection", status="connected")
            opening = await asyncio.shield(self._opening)
            request = await asyncio.to_thread(read_request, operation.request, opening, holds)
            emitter.output_dir = request.output_dir
            request, shard = await asyncio.to_thread(take_shard, request, emitter)
            if shard is not None and shard.end == shard.start:
                result = await asyncio.to_thread(shard.empty_result, request, emitter)
                await asyncio.to_thread(emitter.result, shard.completed(result))
                return "completed", None
            if not self._ready.done():
                emitter.status("loading", "waiting for the model")
                await asyncio.to_thread(check_input, request, opening, emitter)
            await asyncio.shield(self._ready)
            result = await self._answer(request, emitter)
            await asyncio.to_thread(emitter.result, result if shard is None else shard.completed(result))
            return "completed", None
        except EngineDied as error:
            self._die(error)
            return None
        except Exception as error:  # noqa: BLE001  (the failure of one request is no failure of the others)
            if not isinstance(error, ExecutorError):
                traceback.print_exception(error)
            return "failed", plain(classify(error))
        finally:
            holds.release()

    def _finish_of(self, request_id: str) -> Finish:
        """Return the end of a request that was ended from outside."""
        if self._died is not None:
            return "failed", plain(classify(self._died))
        if self._signalled and request_id not in self._aborted:
            return "failed", classify(EngineDied("the session was ended by a signal"))
        return "cancelled", None

    async def _answer(self, request: Request, emitter: Emitter) -> Result:
        assert self._engine is not None  # noqa: S101  (it is ready)
        opening = self._opening.result()
        if MERGED not in request.spec:
            messages = unused(request.spec, engine=opening.engine, task_type=opening.task_type, loaded=opening.spec)
            for message in messages:
                emitter.emit("log", message=message)
            return with_warnings(await self._engine.run(request, emitter), messages)
        children = children_of(request)
        good = [child for child in children if child.error is None]
        done = await answer_children(self._engine, opening, good, emitter)
        emitter.progress(len(children), len(children), "child")
        return await asyncio.to_thread(joined, request, children, done, emitter)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _leave(self, code: int) -> NoReturn:
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        if self._engine is not None and self._ready.done() and self._died is None:
            try:
                await asyncio.wait_for(asyncio.to_thread(self._engine.close), _CLOSE_SECONDS)
            except Exception as error:  # noqa: BLE001  (what is left is killed)
                print(f"the engine did not close: {type(error).__name__}: {error}", file=sys.stderr)
        if self._died is not None:
            self._emitter.finish("failed", plain(classify(self._died)))
        elif code != BAD_OPENING:
            self._emitter.finish("completed" if code == ENDED else "cancelled")
        leave(code)


def _limits(loaded: Loaded) -> dict[str, float]:
    """Return the limits that what is loaded has of its own."""
    limits = {"idle_seconds": loaded.idle_seconds, "lifetime_seconds": loaded.lifetime_seconds}
    return {name: seconds for name, seconds in limits.items() if seconds is not None}
