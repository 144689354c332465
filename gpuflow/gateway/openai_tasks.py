"""One call of `/v1` as a task of the fleet: submitted, followed to its end, cancelled when the client has left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Request
from redis.exceptions import RedisError

from gpuflow.artifacts.references import References
from gpuflow.artifacts.task_access import client_hosts
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.errors import BrokerUnavailable, UnknownTask
from gpuflow.gateway.fleet_calls import Calls, broker_away
from gpuflow.gateway.openai_errors import of_a_task
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.streams import Hub, Reader, UnreadableStream
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import FINAL, TaskState
from gpuflow.logs import get_logger
from gpuflow.serving.calls import Outcome, count_call

#: How often it is looked whether the client is there, in seconds.
_LOOK_SECONDS: Final = 0.5
_CANCEL_SECONDS: Final = 10.0

log = get_logger("gpuflow.gateway")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all calls share."""

    calls: Calls
    hub: Callable[[], Hub]
    #: Counts that are on their way: the loop itself keeps no task alive.
    counting: set[asyncio.Task[None]] = field(default_factory=set)

    def count(self, model: str, outcome: Outcome, first_token_seconds: float | None = None) -> None:
        """Count a call that has ended, which waits for nothing; one that cannot be counted is not."""

        async def counted() -> None:
            with contextlib.suppress(Problem):  # the broker is away, which is logged
                await self.calls.run(lambda app: count_call(app.redis, app.keys, model, outcome, first_token_seconds))

        task = asyncio.create_task(counted())
        self.counting.add(task)
        task.add_done_callback(self.counting.discard)


class TaskCall:
    """A task that one client waits for; `async with`, which cancels it unless it has ended, and counts the call."""

    def __init__(self, shared: Shared, model: str, spec: dict[str, Any], owner: str) -> None:
        self._shared, self._model, self._spec, self._owner = shared, model, spec, owner
        self._record: TaskRecord | None = None
        self._began = time.monotonic()
        self._is_stream = bool((spec.get("inference") or {}).get("stream"))
        self._first_token_seconds: float | None = None
        self._counted = False
        self.id = ""

    async def __aenter__(self) -> TaskCall:
        try:
            return await self._submitted()
        except Problem:
            self._count("refused")
            raise

    async def _submitted(self) -> TaskCall:
        hub = self._shared.hub()
        if hub.stopping.is_set():
            raise Problem(503, "stopping", "the gateway stops; send it again", {"Retry-After": "1"})
        if hub.readers >= hub.most_readers:
            detail = f"{hub.readers} calls and streams are open; come again, or raise GPUFLOW_GATEWAY_MAX_STREAMS"
            raise Problem(429, "too-many-streams", detail, {"Retry-After": "5"})

        def sent(app: GPUFlow) -> str:
            return submit(self._spec, owner=self._owner, uploads=False, app=app).id

        # A client that leaves now must not leave a task that nobody knows.
        sending = asyncio.ensure_future(self._shared.calls.run(sent))
        try:
            self.id = await asyncio.shield(sending)
        except asyncio.CancelledError:
            with contextlib.suppress(Problem):
                self.id = await sending
                await self._cancel()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._record is None and self.id:
            await asyncio.shield(asyncio.ensure_future(self._cancel()))
            self.id = ""
        state = self._record.state if self._record is not None else TaskState.CANCELLED
        ended: dict[TaskState, Outcome] = {TaskState.SUCCEEDED: "answered", TaskState.CANCELLED: "cancelled"}
        self._count(ended.get(state, "failed"))

    def _count(self, outcome: Outcome) -> None:
        if not self._counted:
            self._counted = True
            self._shared.count(self._model, outcome, self._first_token_seconds)

    def _note_first_token(self, event: LoggedEvent) -> None:
        if self._is_stream and event.name == "text_delta" and self._first_token_seconds is None:
            self._first_token_seconds = time.monotonic() - self._began

    async def events(self, request: Request) -> AsyncIterator[LoggedEvent]:
        """Yield the events of the task to its end. Raises ClientLeft, Problem."""
        hub = self._shared.hub()
        try:
            async with Reader(hub, self.id) as reader:
                ask = True
                while True:
                    ended = ask and await self._has_ended()
                    events = await (reader.rest() if ended else reader.next(_LOOK_SECONDS))
                    for event in events:
                        self._note_first_token(event)
                        yield event
                    if ended and not events:
                        return
                    if await request.is_disconnected():
                        raise ClientLeft
                    if hub.stopping.is_set():
                        raise Problem(503, "stopping", "the gateway stops; send it again", {"Retry-After": "1"})
                    ask = not events or any(event.data.get("state") in FINAL for event in events)
        except (UnreadableStream, UnicodeError):
            raise Problem(500, "unreadable-events", f"the events of task {self.id} cannot be read") from None
        except (RedisError, BrokerUnavailable, OSError):
            raise broker_away() from None

    async def result(self) -> dict[str, Any]:
        """Return the result of the task, which has ended. Raises Problem where it has not succeeded."""
        record = self._record
        if record is None or record.state is not TaskState.SUCCEEDED:
            raise of_a_task(record) if record else broker_away()

        def loaded(app: GPUFlow) -> dict[str, Any]:
            return dict(References(app.settings, hosts=client_hosts(app.settings)).fields(record.result))

        return await self._shared.calls.run(loaded)

    async def _has_ended(self) -> bool:
        record = await self._shared.calls.run(lambda app: app.ledger.get(self.id))
        if record.state.final:
            self._record = record
        return record.state.final

    async def _cancel(self) -> None:
        try:
            await asyncio.wait_for(self._shared.calls.run(lambda app: app.cancel_task(self.id)), _CANCEL_SECONDS)
        except (Problem, UnknownTask, TimeoutError) as error:
            log.warning("gateway.not_cancelled", task=self.id, error=str(error))
