"""The engine of a session on transformers: one model, one thread that runs batches, requests mixed into them.

What a batch does is the business of its `work`: answers (`transformers_answers`) or vectors (`transformers_vectors`).
A batch that fails is run again call by call, so that one bad request fails alone; a device fault ends the engine.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from executors.base import ExecutorError, write_responses
from executors.failures import classify
from executors.generation.memory import free_unused
from executors.sessions.adapters import Adapter
from executors.sessions.batching import BatchQueue, Unit
from executors.sessions.engine import EngineDied, Loaded, SessionEngine
from executors.sessions.lines import Open
from gpuflow.protocol import Emitter, Request


@dataclass(kw_only=True, eq=False)
class Call:
    """One request that has been read. `items` are the answered units; `live` is false once nobody waits for it."""

    request: Request
    emitter: Emitter
    key: Hashable
    batch_size: int
    units: int
    adapters: tuple[Adapter, ...] = ()
    alone: bool = False
    #: Indices of units that must be a batch by themselves.
    lonely: frozenset[int] = frozenset()
    #: What the work has read of the request.
    content: Any = None
    items: dict[int, dict[str, Any]] = field(default_factory=dict)
    live: bool = True
    stream: bool = False
    #: State that a work keeps from one batch of the call to the next.
    state: Any = None
    done: asyncio.Future[list[dict[str, Any]]]

    def finish_unit(self, index: int, item: dict[str, Any]) -> None:
        """Keep the item of a unit, which is done; the last one ends the call."""
        if index in self.items or not self.live:
            return
        self.items[index] = item
        if len(self.items) == self.units:
            self._end(lambda: self.done.set_result([self.items[index] for index in range(self.units)]))

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self._end(lambda: self.done.set_exception(error))

    def _end(self, tell: Any) -> None:
        if self.live:
            self.live = False
            self.done.get_loop().call_soon_threadsafe(lambda: None if self.done.done() else tell())


class BatchWork(Protocol):
    """What the batches of a session are: how a request is read, and how units of one key are done."""

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Load the model."""

    def read(self, request: Request, emitter: Emitter, done: asyncio.Future[list[dict[str, Any]]]) -> Call:
        """Return the call of a request; in a thread, several at once. Raises ExecutorError: BadInput."""

    def do(self, batch: Sequence[Unit[Call]]) -> None:
        """Do units of one key and finish them; in the one thread that uses the model."""

    def result(self, items: Sequence[Mapping[str, Any]], call: Call) -> dict[str, Any]:
        """Return the result value of all items of a call, its large files written."""


class TransformersEngine(SessionEngine):
    """Batches of transformers."""

    name = "transformers"

    def __init__(self, task_type: str) -> None:
        self._work = _work(task_type)
        self._queue: BatchQueue[Call] = BatchQueue()
        self._dead: EngineDied | None = None
        self._batch: Sequence[Unit[Call]] = ()

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Load the model and start the thread that uses it."""
        loaded = self._work.load(opening, emitter)
        threading.Thread(target=self._run_batches, name="gpuflow-batches", daemon=True).start()
        return loaded

    @property
    def running(self) -> int:
        """Calls of the batch that is being run."""
        return len({id(unit.call) for unit in self._batch})

    def check(self) -> None:
        """Raise EngineDied after a fault of the device."""
        if self._dead is not None:
            raise self._dead

    def close(self) -> None:
        """Let the thread end after its batch."""
        self._queue.close()

    async def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Read the request, let its units go through the model, and write what came of it."""
        done: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        call = await asyncio.to_thread(self._work.read, request, emitter, done)
        self.check()
        emitter.status("working")
        self._queue.put(call, [Unit(call=call, index=i, alone=i in call.lonely) for i in range(call.units)])
        try:
            items = await done
        except asyncio.CancelledError:
            call.live = False
            self._queue.drop(call)
            raise
        return await asyncio.to_thread(self._written, items, call)

    def _written(self, items: Sequence[Mapping[str, Any]], call: Call) -> dict[str, Any]:
        result = self._work.result(items, call)
        write_responses(call.request, call.emitter, result)
        return result

    def _run_batches(self) -> None:
        while batch := self._queue.next_batch():
            self._batch = batch
            self._run_batch([unit for unit in batch if unit.call.live])
            self._batch = ()
            for call in {id(unit.call): unit.call for unit in batch if not unit.call.live}.values():
                self._queue.drop(call)

    def _run_batch(self, batch: Sequence[Unit[Call]]) -> None:
        if not batch:
            return
        calls = list({id(unit.call): unit.call for unit in batch}.values())
        if self._dead is not None:
            for call in calls:
                call.fail(self._dead)
            return
        failure = self._failure_of(batch)
        if failure is None:
            return
        if isinstance(failure, EngineDied):
            self._dead = failure
        else:
            free_unused()
        if len(calls) == 1:
            calls[0].fail(failure)
            return
        for call in calls:
            # What was told of a stream stays told; the answer is made anew and is whole in the result.
            call.stream = False
            self._run_batch([unit for unit in batch if unit.call is call])

    def _failure_of(self, batch: Sequence[Unit[Call]]) -> ExecutorError | None:
        """Run a batch; return why it failed, as an error that keeps no frame of it, and so none of its tensors."""
        try:
            self._work.do(batch)
        except Exception as error:  # noqa: BLE001  (one bad request fails alone)
            if not isinstance(error, ExecutorError):
                traceback.print_exception(error)
            record = classify(error)
            if record["type"] == "DeviceFault":
                return EngineDied(f"the device failed: {record['message']}")
            return ExecutorError(record["type"], record["message"], retryable=record["retryable"])
        return None


def _work(task_type: str) -> BatchWork:
    if task_type == "embedding":
        from executors.sessions.transformers_vectors import Vectors

        return Vectors()
    from executors.sessions.transformers_answers import Answers

    return Answers()
