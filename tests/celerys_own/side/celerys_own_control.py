"""What Celery's tests look for in a worker that lives in their process, told by a worker that does not.

Both workers import this, and so do the tests: the signal of what was received comes by a channel, what has succeeded by
Celery's events, and the stamps of revoked tasks are forgotten by a command.
"""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any, Final

from celery.signals import task_received
from celery.worker import state as worker_state
from celery.worker.control import control_command
from celery.worker.request import Request
from t.integration.tasks import get_redis_connection

_CHANNEL: Final = "celerys-own-received"
_BODY: Final = "_Request__payload"  # as the tests have it
_TOLD: Final = ("id", "task_name", "stamps", "stamped_headers", "replaced_task_nesting", "errbacks", _BODY)


@control_command(visible=False)
def celerys_own_forget_stamps(state: Any, **_: Any) -> dict[str, str]:
    """Forget the stamps by which tasks were revoked."""
    worker_state.revoked_stamps.clear()
    return {"ok": "forgotten"}


@task_received.connect(weak=False)
def _tell(request: Any = None, **_: Any) -> None:
    if isinstance(request, Request):  # a worker's own
        with get_redis_connection() as connection:
            connection.publish(_CHANNEL, json.dumps({name: getattr(request, name, None) for name in _TOLD}))


class RemoteStamps(dict[str, Any]):
    """Stands for the worker's stamps in the process of the tests, which clear them."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    def clear(self) -> None:
        """Have the worker forget its stamps, and wait until it has."""
        self._app.control.broadcast("celerys_own_forget_stamps", reply=True, limit=1, timeout=10)


def follow(app: Any) -> None:
    """Bring what the worker tells to where the tests look for it."""
    worker_state.revoked_stamps = RemoteStamps(app)
    for told in (_received, _succeeded):
        begun = threading.Event()
        threading.Thread(target=told, args=(app, begun), name="celerys-own", daemon=True).start()
        begun.wait(10)


def _received(_app: Any, begun: threading.Event) -> None:
    with get_redis_connection() as connection, connection.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(_CHANNEL)
        begun.set()
        for message in channel.listen():
            task_received.send(sender=None, request=SimpleNamespace(**json.loads(message["data"])))


def _succeeded(app: Any, begun: threading.Event) -> None:
    def note(event: dict[str, Any]) -> None:
        worker_state.successful_requests.add(event["uuid"])

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"task-succeeded": note})
        begun.set()
        receiver.capture(limit=None, timeout=None, wakeup=False)
