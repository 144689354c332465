"""Maintenance tasks: what anybody may ask for at any time. Idempotent, short, served by every worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuflow.artifacts.destination import is_own_store, is_stored_at
from gpuflow.artifacts.task_access import task_hosts
from gpuflow.celery_app import app
from gpuflow.errors import NotAllowed
from gpuflow.ledger.backend import CALL_BACK_TASK, NOTIFY_TASK
from gpuflow.ledger.records import TaskRecord
from gpuflow.routing.families import CALL_BACK_QUEUE, CONTROL_QUEUE, MAX_NOTICES, NOTICE_QUEUE
from gpuflow.signatures import SignatureRefused
from gpuflow.spec.references import UnresolvedReference, find_references, resolve_env
from gpuflow.upkeep.notices import NotDelivered, body, deliver, wanted
from gpuflow.upkeep.reconciler import Reconciler
from gpuflow.worker.secret_sources import MissingSecret, secret_values

#: A URL that cannot be called is tried so often, with a wait that doubles from NOTIFY_SECONDS on.
NOTIFY_TRIES = 6
NOTIFY_SECONDS = 5


@app.task(name="gpuflow.maintenance.reconcile", queue=CONTROL_QUEUE, ignore_result=True)
def reconcile() -> dict[str, int]:
    """Reconcile once, for fleets that run no beat."""
    return Reconciler(app).run()


@app.task(
    bind=True,
    name=NOTIFY_TASK,
    queue=NOTICE_QUEUE,
    ignore_result=True,
    throws=(NotDelivered, NotAllowed, SignatureRefused),
)
def notify(self: Any, task_id: str, number: int) -> None:
    """Call one URL of a task that has ended."""
    _call(self, task_id, number)


@app.task(
    bind=True,
    name=CALL_BACK_TASK,
    queue=CALL_BACK_QUEUE,
    ignore_result=True,
    throws=(NotDelivered, NotAllowed, SignatureRefused),
)
def call_back(self: Any, task_id: str, number: int) -> None:
    """Call one URL of a task that has ended, whose entry a worker of the version before would not read whole."""
    _call(self, task_id, number)


def _call(self: Any, task_id: str, number: int) -> None:
    record = app.ledger.find(task_id)
    if record is None or not record.state.final:
        return
    try:
        spec = app.signed_spec(task_id)
    except SignatureRefused:
        _tell(task_id, number, "is not called: what the record says of it is not signed")
        raise
    if spec is not None:
        record = replace(record, spec=spec)
    entries = wanted(record)
    if number >= min(len(entries), MAX_NOTICES):
        return
    retries = entries[number].get("retries")
    try:
        entry = _with_secrets(entries[number], record, str(self.request.hostname))
        if entry.get("body") == "result" and is_own_store(entry["url"], app.settings):
            _tell_unstored(record, number, str(entry["url"]))
            return  # the worker that ran the task stores results there, by the protocol of that service
        deliver(entry, body(record, entry), hosts=task_hosts(app.settings), delivery=self.request.id)
    except NotAllowed as error:
        why = f"; {error.setting} of the worker would allow it" if error.setting else ", and no setting would allow it"
        _tell(task_id, number, f"is not called: the worker does not allow it{why}")
        raise
    except NotDelivered as error:
        if self.request.retries >= (NOTIFY_TRIES - 1 if retries is None else retries):
            _tell(task_id, number, f"was not delivered; the log of worker {self.request.hostname} says why")
        wait = NOTIFY_SECONDS * 2**self.request.retries
        raise self.retry(
            exc=error, countdown=wait, max_retries=NOTIFY_TRIES - 1 if retries is None else retries
        ) from error


def _tell_unstored(record: TaskRecord, number: int, url: str) -> None:
    """Say in the events of a task that its results are not in the fleet's service, unless the record shows them there.

    They are not where the worker that ran the task does not know the service as the fleet's.
    """
    if not is_stored_at(url, app.settings, record.result, record.id, record.attempt):
        what = "was not delivered: its URL is the fleet's results service, where this attempt was not stored"
        _tell(record.id, number, f"{what}; give worker {record.worker} the GPUFLOW_GATEWAY_URL of the others")


def _tell(task_id: str, number: int, what: str) -> None:
    """Say in the events of a task that one of its URLs is not called; it may hold a secret and is not named."""
    event = {"event": "log", "level": "warning", "message": f"notify[{number}] {what}"}
    app.event_log.append(task_id, event, maxlen=app.settings.events_maxlen)


def _with_secrets(entry: Mapping[str, Any], record: TaskRecord, worker: str) -> Mapping[str, Any]:
    """Return the entry with `${env:NAME}` replaced: by secrets that the task names, and nothing else of this worker.

    Raises NotDelivered where one is not here; another try may come to a worker that has it.
    """
    used = {reference.name for reference in find_references(entry)}
    names = [name for name in record.spec.get("secrets") or () if name in used]
    try:
        values = secret_values(
            names,
            environ=os.environ,
            folder=app.settings.secrets_dir,
            worker=worker,
            allowed=app.settings.allow_secrets,
        )
        resolved: Mapping[str, Any] = resolve_env(entry, values)
    except (MissingSecret, UnresolvedReference) as error:
        raise NotDelivered(str(error)) from None
    return resolved
