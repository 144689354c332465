"""Maintenance tasks: what anybody may ask for at any time. Idempotent, short, served by every worker."""

from __future__ import annotations

from typing import Any

from gpuflow.celery_app import app
from gpuflow.ledger.backend import NOTIFY_TASK
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.upkeep.notices import NotDelivered, body, deliver, wanted
from gpuflow.upkeep.reconciler import Reconciler

#: A URL that cannot be called is tried so often, with a wait that doubles from NOTIFY_SECONDS on.
NOTIFY_TRIES = 6
NOTIFY_SECONDS = 5


@app.task(name="gpuflow.maintenance.reconcile", queue=CONTROL_QUEUE, ignore_result=True)
def reconcile() -> dict[str, int]:
    """Reconcile once, for fleets that run no beat."""
    return Reconciler(app).run()


@app.task(bind=True, name=NOTIFY_TASK, queue=CONTROL_QUEUE, ignore_result=True, throws=(NotDelivered,))
def notify(self: Any, task_id: str, number: int) -> None:
    """Call one URL of a task that has ended."""
    record = app.ledger.find(task_id)
    if record is None or not record.state.final:
        return
    entries = wanted(record)
    if number >= len(entries):
        return
    try:
        deliver(entries[number], body(record))
    except NotDelivered as error:
        wait = NOTIFY_SECONDS * 2**self.request.retries
        raise self.retry(exc=error, countdown=wait, max_retries=NOTIFY_TRIES - 1) from error
