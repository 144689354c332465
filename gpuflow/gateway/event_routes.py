"""`GET .../events` of tasks and pipelines: their events as they come (Server-Sent Events).

The id of an event says how far each stream was told, so a reader goes on from its Last-Event-ID (`positions`). A stream
ends with the work, by an event `end`; a gateway that stops ends it with a hint to come again. Comments keep it open.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import Response, StreamingResponse
from redis.exceptions import RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import BrokerUnavailable
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.documents import answers
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.positions import EACH, MOST, Positions
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller
from gpuflow.gateway.streams import Hub, Reader, UnreadableStream
from gpuflow.gateway.tasks import RecordId, is_id, no_record
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.ledger.states import FINAL

#: How long a stream is silent before a comment, in seconds; proxies cut what is silent for a minute.
HEARTBEAT_SECONDS: Final = 10.0
#: When a reader is to come again after the end of a gateway, in milliseconds.
_AGAIN_MS: Final = 1000
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Events until the work has ended.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'id: 1732533600000-0\nevent: progress\ndata: {"source": "6f1d", "current": 3}\n\n',
            }
        },
    },
    204: {"description": "The work has ended, and nothing came after Last-Event-ID: do not come again."},
}
LastId = Annotated[str | None, Header(alias="Last-Event-ID", description="Go on after this event")]
#: Whether the work has ended (None: there is none such any more), and the tasks whose events belong to it.
_Look = Callable[[GPUFlow], tuple[str, bool, list[str]] | None]


def events_router(calls: Calls, hub: Callable[[], Hub], gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of events."""
    router = APIRouter(prefix="/api/v1", dependencies=[Depends(gatekeeper)], tags=["events"])

    @router.get(
        "/tasks/{id}/events",
        response_class=StreamingResponse,
        summary="The events of a task",
        responses={**answers(404), **_STREAM},
    )
    async def of_task(request: Request, id: RecordId, caller: Caller, last_event_id: LastId = None) -> Response:
        """Stream the events of a task, from the first on, or after `Last-Event-ID`."""

        def look(app: GPUFlow) -> tuple[str, bool, list[str]] | None:
            record = app.ledger.find(id)
            if record is None or not caller.sees(record.owner):
                return None
            return str(record.state), record.state.final, []

        return await _stream(request, calls, hub(), "task", id, look, last_event_id)

    @router.get(
        "/pipelines/{id}/events",
        response_class=StreamingResponse,
        summary="The events of a pipeline",
        responses={**answers(404), **_STREAM},
    )
    async def of_pipeline(request: Request, id: RecordId, caller: Caller, last_event_id: LastId = None) -> Response:
        """Stream the events of a pipeline and of its tasks; `source` says whose each is."""

        def look(app: GPUFlow) -> tuple[str, bool, list[str]] | None:
            record = app.pipelines.find(id)
            if record is None or not caller.sees(record.owner):
                return None
            return str(record.state), record.state.final, [t for s in record.stages.values() for t in s.tasks]

        return await _stream(request, calls, hub(), "pipeline", id, look, last_event_id)

    return router


async def _stream(
    request: Request, calls: Calls, hub: Hub, kind: str, id: str, look: _Look, last_id: str | None
) -> Response:
    try:
        positions = Positions(id, last_id)
    except ValueError:
        detail = "Last-Event-ID is none of a stream; give the id of an event, such as 12-0"
        raise Problem(400, "bad-event-id", detail) from None
    seen = await calls.run(look) if is_id(id) else None
    if seen is None:
        raise no_record(kind, id)
    if hub.stopping.is_set():
        raise Problem(503, "stopping", "the gateway stops; go on with it when it is there again", {"Retry-After": "1"})
    if hub.readers >= hub.most_readers:
        detail = f"{hub.readers} event streams are open; come again, or raise GPUFLOW_GATEWAY_MAX_STREAMS"
        raise Problem(429, "too-many-streams", detail, {"Retry-After": "5"})
    if request.scope.get("gpuflow.head"):
        return Response(media_type="text/event-stream", headers=_HEADERS)
    events = _events(calls, hub, id, look, positions)
    if last_id is not None and seen[1]:
        first = await anext(events, None)
        if first is None or isinstance(first, _End):
            await events.aclose()
            return Response(status_code=204)
        events = _with_first(first, events)
    return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)


async def _with_first(first: bytes, rest: Any) -> AsyncIterator[bytes]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()


async def _events(calls: Calls, hub: Hub, id: str, look: _Look, positions: Positions) -> Any:
    async with Reader(hub, id) as reader:
        try:
            ask = True
            seen: tuple[str, bool, list[str]] | None = None
            while not hub.stopping.is_set():
                if ask:
                    seen = await calls.run(look)
                    if seen is None:
                        yield _end(id, "")
                        return
                    for task in seen[2]:
                        reader.cursor.add(task)
                ended = seen is not None and seen[1]
                events = await (reader.rest() if ended else reader.next(HEARTBEAT_SECONDS))
                fresh = [event for event in events if not positions.was_told(event)]
                if fresh:
                    yield _as_sse(id, fresh, positions)
                elif not events and not ended:
                    yield b": the line is open\n\n"
                if ended and not events:
                    yield _end(id, seen[0] if seen else "", positions.id_of_end() if len(positions) > MOST else "")
                    return
                ask = not events or any(map(_may_end, events))
        except (UnreadableStream, UnicodeError):
            yield _end(id, "unreadable")
            return
        except (Problem, RedisError, BrokerUnavailable, OSError):
            yield f"retry: {_AGAIN_MS}\n: the broker does not answer\n\n".encode()
            return
        yield f"retry: {_AGAIN_MS}\n: the gateway stops; come again\n\n".encode()


def _may_end(event: LoggedEvent) -> bool:
    """Whether an event may be the last, or that of new tasks."""
    return event.name in ("stage", "pipeline") or (event.name == "state" and str(event.data.get("state")) in FINAL)


def _as_sse(id: str, events: Sequence[LoggedEvent], positions: Positions) -> bytes:
    """Return events as lines. With many streams, whose ids are long, the last event alone has one."""
    found = []
    for number, event in enumerate(events, 1):
        positions.tell(event)
        if len(positions) <= EACH or number == len(events):
            found.append(f"id: {positions.id_of(id)}\n")
        data = json.dumps({"source": event.source, "at": event.at, **event.data})
        name = event.name if event.name.isprintable() else "log"
        found.append(f"event: {name}\ndata: {data}\n\n")
    return "".join(found).encode(errors="replace")


class _End(bytes):
    """The last event of a stream."""


def _end(id: str, state: str, event_id: str = "") -> _End:
    head = f"id: {event_id}\n" if event_id else ""
    return _End(f"{head}event: end\ndata: {json.dumps({'source': id, 'state': state})}\n\n".encode())
