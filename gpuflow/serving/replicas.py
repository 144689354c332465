"""Makes what is served what is to be served: submits the replicas that lack, cancels those that are too many.

A replica is a task (its type, engine and resources are those of the calls that it answers) that opens or joins a warm
session on its worker and keeps it loaded until it is cancelled. Leases, routing and retries are those of every task: a
replica whose worker is lost, drains or is disabled waits in its queue and begins on another one. Rounds are made by the
duties of beat, and by the command that has changed what is to be.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.exceptions import LockError

from gpuflow.broker.keys import Keys
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.ledger import Ledger
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.protocol import REPLICA_UNIT
from gpuflow.routing.families import task_of
from gpuflow.serving.models import ServedModel
from gpuflow.serving.store import ServedModels

log = get_logger("gpuflow.serving")

#: A round that takes longer is taken for dead, in seconds.
LOCK_SECONDS: Final = 60.0
#: A command waits so long for the round of another process, in seconds.
LOCK_WAIT_SECONDS: Final = 10.0
#: A replica that has failed for good is submitted again after so many seconds, then twice as many each time, at most.
FIRST_PAUSE_SECONDS: Final = 5.0
LONGEST_PAUSE_SECONDS: Final = 300.0
_MOST_ERROR: Final = 500


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why replicas of a model have failed for good, how often since one was loaded, and when last (Unix seconds)."""

    count: int = 0
    at: float = 0.0
    error: str = ""

    @property
    def due(self) -> float:
        """Return when the next replica may be submitted, in Unix seconds."""
        if not self.count:
            return 0.0
        return self.at + min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self.count - 1, 20))


@dataclass(frozen=True, kw_only=True)
class ServedStatus:
    """A served model, the records of its replicas that have not ended, and its last failure."""

    model: ServedModel
    replicas: tuple[TaskRecord, ...] = ()
    failure: Failure = Failure()

    @property
    def warm(self) -> list[TaskRecord]:
        """Return the replicas whose model is loaded."""
        return [record for record in self.replicas if is_warm(record)]

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able."""
        model = self.model
        return {
            "name": model.name,
            "model": str(model.source.get("identifier")),
            "taskType": model.task_type,
            "replicas": model.replicas,
            "loaded": len(self.warm),
            "workers": sorted(str(record.worker) for record in self.warm),
            "owner": model.owner,
            "createdBy": model.created_by,
            "createdAt": model.created_at,
            "tasks": [
                {"id": record.id, "state": str(record.state), "worker": record.worker, "loaded": is_warm(record)}
                for record in self.replicas
            ],
            "error": self.failure.error,
        }


class Replicas:
    """The replicas of the served models of one fleet."""

    def __init__(self, app: GPUFlow) -> None:
        self._app = app
        self._client: Any = app.redis
        self._keys = app.keys
        self._models = ServedModels(app.redis, app.keys, app.signer)

    def reconcile(self, *, wait: bool = False) -> int:
        """Make one round, unless another process does; return how many replicas were submitted or cancelled.

        With `wait`, its end is waited for first. Raises redis errors, OperationalError.
        """
        lock = self._client.lock(
            f"{self._keys.served}.lock", timeout=LOCK_SECONDS, blocking=wait, blocking_timeout=LOCK_WAIT_SECONDS
        )
        if not lock.acquire():
            return 0
        try:
            return self._round()
        finally:
            try:
                lock.release()
            except LockError:
                log.warning("serving_lock_expired")

    def statuses(self) -> list[ServedStatus]:
        """Return how every served model stands. Read-only."""
        return statuses(self._app.ledger)

    def _round(self) -> int:
        known = _known(self._client, self._keys)
        models, failures = self._models.all(), _failures(self._client, self._keys)
        if not known and not models:
            return 0
        records = dict(zip(known, self._app.ledger.find_many(list(known)), strict=True))
        marks = {_mark(model): model for model in models.values()}
        now = float(self._client.time()[0])
        living: dict[str, list[TaskRecord]] = {name: [] for name in models}
        unwanted: list[str] = []
        for id, record in records.items():
            model = marks.get(known[id])
            if record is None or record.state.final:
                if record is not None and model is not None and record.state is not TaskState.CANCELLED:
                    failures[model.name] = self._note_failure(model, record, failures.get(model.name, Failure()), now)
                self._client.hdel(self._keys.served_replicas, id)
            elif model is None:
                unwanted.append(id)
            else:
                living[model.name].append(record)
        changes = 0
        for name, model in models.items():
            replicas = living[name]
            if name in failures and any(is_warm(record) for record in replicas):
                self._client.hdel(self._keys.served_failures, name)
            unwanted += [record.id for record in _surplus(replicas, model.replicas)]
            if now >= failures.get(name, Failure()).due:
                changes += self._submit_some(model, model.replicas - len(replicas), failures.get(name, Failure()))
        for name in set(failures).difference(models):
            self._client.hdel(self._keys.served_failures, name)
        for id in unwanted:
            self._app.cancel_task(id, "the model is not to be served by so many any more")
            log.info("replica_cancelled", task=id)
        return changes + len(unwanted)

    def _submit_some(self, model: ServedModel, count: int, before: Failure) -> int:
        """Submit so many replicas; return how many were. One that cannot be is a failure of the model."""
        try:
            for _ in range(count):
                self._submit(model)
        except GPUFlowError as error:
            log.error("replica_not_submitted", model=model.name, cause=str(error))
            now = float(self._client.time()[0])
            text = str(error)[:_MOST_ERROR]
            self._write_failure(model.name, Failure(count=before.count + 1, at=now, error=text))
            return 0
        return max(0, count)

    def _submit(self, model: ServedModel) -> None:
        """Submit one more replica; it is known before it is there, so that none is lost sight of."""
        id = str(uuid.uuid4())
        self._client.hset(self._keys.served_replicas, id, _mark(model))
        self._app.send_task(
            task_of(model.task_type),
            kwargs={"spec": model.replica_spec()},
            task_id=id,
            owner=model.owner,
            title=f"replica of {model.name}",
            replica_of=model.name,
        )
        log.info("replica_submitted", model=model.name, task=id)

    def _note_failure(self, model: ServedModel, record: TaskRecord, before: Failure, now: float) -> Failure:
        error = dict(record.error or {})
        failure = Failure(
            count=before.count + 1,
            at=record.finished_at or now,
            error=str(error.get("message") or f"a replica ended {record.state}")[:_MOST_ERROR],
        )
        self._write_failure(model.name, failure)
        log.warning("replica_failed", model=model.name, task=record.id, cause=failure.error)
        return failure

    def _write_failure(self, name: str, failure: Failure) -> None:
        text = json.dumps({"count": failure.count, "at": failure.at, "error": failure.error})
        self._client.hset(self._keys.served_failures, name, text)


def statuses(ledger: Ledger) -> list[ServedStatus]:
    """Return how every served model stands: one round trip where none is served. Read-only; raises redis errors."""
    models = ServedModels(ledger.client, ledger.keys).all()
    if not models:
        return []
    known, failures = _known(ledger.client, ledger.keys), _failures(ledger.client, ledger.keys)
    records = ledger.as_seen(ledger.find_many(list(known)))
    found = []
    for name, model in models.items():
        of_it = [record for record in records if not record.state.final and known.get(record.id) == _mark(model)]
        found.append(ServedStatus(model=model, replicas=tuple(of_it), failure=failures.get(name, Failure())))
    return found


def is_warm(record: TaskRecord) -> bool:
    """Say whether the model of a replica is loaded: its progress says so, by its unit."""
    loaded = record.progress is not None and record.progress.get("unit") == REPLICA_UNIT
    return record.state is TaskState.RUNNING and loaded and not record.lost


def _known(client: Any, keys: Keys) -> dict[str, str]:
    found: dict[str, str] = client.hgetall(keys.served_replicas)
    return found


def _failures(client: Any, keys: Keys) -> dict[str, Failure]:
    return {name: _failure(text) for name, text in client.hgetall(keys.served_failures).items()}


def _mark(model: ServedModel) -> str:
    """Return what is kept of a replica beside its id: of which model it is, and since which `serve`."""
    return f"{model.name}\n{model.uid}"


def _surplus(replicas: Sequence[TaskRecord], wanted: int) -> list[TaskRecord]:
    """Return the replicas that are too many: those that wait before those that load, the youngest first."""
    order = sorted(replicas, key=lambda one: (is_warm(one), one.state is TaskState.RUNNING, -one.created_at))
    return order[: max(0, len(replicas) - wanted)]


def _failure(text: str) -> Failure:
    try:
        found: Mapping[str, Any] = json.loads(text)
        return replace(
            Failure(), count=int(found["count"]), at=float(found["at"]), error=str(found["error"])[:_MOST_ERROR]
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return Failure()
