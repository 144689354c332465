"""What `celery inspect`, and so Flower, asks a worker about its queues and about what waits for its time.

Celery answers from what the worker holds. Here demand queues are consumed by no name, and a delayed message waits in
Redis: every worker that serves its queue tells of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.control import inspect_command
from kombu import Exchange, Queue

from gpuflow.broker.keys import Keys
from gpuflow.broker.messages import ETA_HEADER
from gpuflow.broker.priorities import queue_of
from gpuflow.worker.runtime import find

#: Delayed messages that are told of at most, those that are due first.
MOST_SCHEDULED: Final = 1000
#: So many are read at once, and no more of them in all than so many bytes: the consumer loop answers.
PAGE: Final = 100
MOST_BYTES: Final = 4 * 2**20

_of_requests: Final = control.query_task
_of_timer: Final = control.scheduled


@inspect_command(name="active_queues", alias="active_queues")  # type: ignore[untyped-decorator]
def active_queues(state: Any) -> list[dict[str, Any]]:
    """List the queues that this worker takes from: those consumed by name, and the demand queues that it has seen."""
    return [dict(queue.as_dict(recurse=True)) for queue in _queues(state).values()]


@inspect_command(name="scheduled", alias="dump_schedule")  # type: ignore[untyped-decorator]
def scheduled(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List the delayed messages of this worker's queues: ETA, countdown, and tasks between two attempts."""
    return [*_of_timer(state), *_scheduled(state)]


@inspect_command(name="query_task", variadic="ids", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def query_task(state: Any, ids: str | Sequence[str], **_: Any) -> dict[str, Any]:
    """Query for tasks by id: those that this worker holds, and those that wait for their time."""
    asked = maybe_list(ids)
    found: dict[str, Any] = _of_requests(state, asked)
    if set(asked) - set(found):
        waiting = {entry["request"]["id"]: entry["request"] for entry in _scheduled(state)}
        found |= {id: ("scheduled", waiting[id]) for id in asked if id in waiting and id not in found}
    return found


def _queues(state: Any) -> dict[str, Queue]:
    consumer, runtime = state.consumer.task_consumer, find()
    queues = {queue.name: queue for queue in (consumer.queues if consumer else ())}
    for name in runtime.admission.matcher.names() if runtime is not None else ():
        queues.setdefault(name, Queue(name, Exchange(name), routing_key=name))
    return queues


def _scheduled(state: Any) -> Iterator[dict[str, Any]]:
    """Yield them as Celery tells of those that wait in a worker, the first first."""
    runtime = find()
    if runtime is None:
        return
    keys, served = runtime.app.keys, _queues(state)
    for at, parked in _parked(runtime.app.redis, keys):
        _, list_key, raw = parked.split("\n", 2)
        queue = queue_of(list_key.removeprefix(keys.prefix))
        entry = _entry(raw, queue, at) if queue in served else None
        if entry is not None:
            yield entry


def _parked(client: Any, keys: Keys) -> Iterator[tuple[float, str]]:
    """Yield when each is due and what is stored of it, until there are too many of them or they are too large."""
    left = MOST_BYTES
    for start in range(0, MOST_SCHEDULED, PAGE):
        due = client.zrange(keys.delayed, start, start + PAGE - 1, withscores=True)
        if not due:
            return
        pipe = client.pipeline(transaction=False)
        for tag, _ in due:
            pipe.hstrlen(keys.parked, tag)
        read = []
        for (tag, at), size in zip(due, pipe.execute(), strict=True):
            left -= size
            if left < 0:
                break
            read.append((tag, at))
        messages = client.hmget(keys.parked, [tag for tag, _ in read]) if read else []
        yield from ((at, parked) for (_, at), parked in zip(read, messages, strict=True) if parked)
        if left < 0:
            return


def _entry(raw: str, queue: str, at: float) -> dict[str, Any] | None:
    """Return what is told of one message; None for one that cannot be read."""
    try:
        message = json.loads(raw)
        headers, properties = message["headers"], message["properties"]
        return {
            "eta": headers.get(ETA_HEADER) or datetime.fromtimestamp(at, UTC).isoformat(),
            "priority": properties.get("priority"),
            "request": {
                "id": headers["id"],
                "name": headers["task"],
                "args": headers.get("argsrepr"),
                "kwargs": headers.get("kwargsrepr"),
                "type": headers["task"],
                "hostname": None,
                "time_start": None,
                "acknowledged": False,
                "delivery_info": {**properties["delivery_info"], "routing_key": queue},
                "worker_pid": None,
            },
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
