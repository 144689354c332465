"""Reads task records and runs the Lua steps on them. Used by clients, the worker and pipelines alike."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis

from gpuflow.broker.keys import Keys
from gpuflow.broker.leases import BELL_SECONDS
from gpuflow.broker.scripts import Script, load_script
from gpuflow.errors import UnknownTask
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState, lua_preamble


@dataclass(frozen=True, kw_only=True)
class StartVerdict:
    """Answer of START: what to do with the delivery, the record's state, and the attempt."""

    verdict: Literal["begin", "final", "live", "lost"]
    state: str
    attempt: int


def ledger_script(name: str) -> Script:
    """Return a Lua step of the ledger, with the table of allowed moves before it."""
    return load_script("gpuflow.ledger", name, lua_preamble())


class Ledger:
    """The task records of one fleet.

    `client` must decode responses. `events_maxlen` caps each event stream; `retention_seconds` is how long a final
    record is kept.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        events_maxlen: int = 10_000,
        retention_seconds: int = 30 * 86_400,
    ) -> None:
        self.client: Any = client
        self.keys = keys
        self.events_maxlen = events_maxlen
        self.retention_seconds = retention_seconds

    def get(self, task_id: str) -> TaskRecord:
        """Return a record. Raises UnknownTask."""
        record = self.find(task_id)
        if record is None:
            raise UnknownTask(f"no task {task_id!r}; `gpuflow status` lists those of this fleet")
        return record

    def find(self, task_id: str) -> TaskRecord | None:
        """Return a record, or None."""
        raw = self.client.hgetall(self.keys.task(task_id))
        return TaskRecord.from_hash(raw) if raw.get("state") else None

    def find_many(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        """Return records in the order of the ids, None where there is none, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hgetall(self.keys.task(task_id))
        return [TaskRecord.from_hash(raw) if raw.get("state") else None for raw in pipe.execute()]

    def recent(self, limit: int = 50) -> list[TaskRecord]:
        """Return the newest records, newest first."""
        ids = self.client.zrevrange(self.keys.tasks, 0, limit - 1)
        return [record for record in self.find_many(ids) if record is not None]

    def start(
        self,
        task_id: str,
        *,
        worker: str,
        owner_token: str,
        tag: str,
        lowest_attempt: int = 1,
        new_fields: Mapping[str, str] | None = None,
    ) -> StartVerdict:
        """Begin the next attempt of a task for the delivery `tag`, which `owner_token` holds (START)."""
        keys = self.keys
        pairs = [part for item in (new_fields or {}).items() for part in item]
        verdict, state, attempt = ledger_script("start")(
            self.client,
            [keys.task(task_id), keys.leases, keys.owners, keys.events(task_id), keys.tasks],
            [task_id, worker, owner_token, tag, lowest_attempt, self.events_maxlen, *pairs],
        )
        return StartVerdict(verdict=verdict, state=state, attempt=int(attempt))

    def report(
        self, task_id: str, attempt: int, events: Iterable[str] = (), progress: str = ""
    ) -> Literal["ok", "cancel", "superseded"]:
        """Append events (JSON lines) of an attempt; learn whether it is to stop."""
        answer: Literal["ok", "cancel", "superseded"] = ledger_script("report")(
            self.client,
            [self.keys.task(task_id), self.keys.events(task_id)],
            [str(attempt), progress, self.events_maxlen, *events],
        )
        return answer

    def commit(
        self,
        task_id: str,
        state: TaskState,
        *,
        attempt: int | None,
        result: Any = None,
        error: Mapping[str, Any] | None = None,
        manifest: str = "",
    ) -> bool:
        """Set the final state, if `attempt` is the current one (None: if no attempt runs). False when refused."""
        done = ledger_script("commit")(
            self.client,
            [self.keys.task(task_id), self.keys.events(task_id)],
            [
                str(state),
                "" if attempt is None else str(attempt),
                "" if result is None else json.dumps(result, ensure_ascii=False),
                "" if error is None else json.dumps(error, ensure_ascii=False),
                manifest,
                self.events_maxlen,
                self.retention_seconds,
            ],
        )
        return bool(done)

    def cancel(self, task_id: str, reason: str = "cancelled by a user") -> tuple[str, str]:
        """Cancel: returns (`cancelled`|`requested`|`final`, state). Raises UnknownTask."""
        verdict, state = ledger_script("cancel")(
            self.client, [self.keys.task(task_id), self.keys.events(task_id)], [reason, self.events_maxlen]
        )
        if verdict == "unknown":
            raise UnknownTask(f"no task {task_id!r}; `gpuflow status` lists those of this fleet")
        return verdict, state

    def requeue(self, task_id: str) -> bool:
        """Queue an ended task again under its id. False if it has not ended or has succeeded. Raises UnknownTask."""
        done = ledger_script("requeue")(
            self.client,
            [
                self.keys.task(task_id),
                self.keys.events(task_id),
                self.keys.waiters,
                f"{self.keys.prefix}celery-task-meta-{task_id}",
            ],
            [str(uuid.uuid4()), self.events_maxlen, BELL_SECONDS],
        )
        if done < 0:
            raise UnknownTask(f"no task {task_id!r} that could be queued again; its record may have expired")
        return bool(done)
