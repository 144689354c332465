"""Reads task records and runs the Lua steps on them. Used by clients, the worker and pipelines alike."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

import redis
from redis.client import NEVER_DECODE

from gpuflow.audit.actors import actor_here
from gpuflow.audit.entries import audit_preamble
from gpuflow.broker.held_messages import live_leases
from gpuflow.broker.keys import Keys
from gpuflow.broker.lease import NEVER, Lease
from gpuflow.broker.publication import THE_SAME
from gpuflow.broker.scripts import Script, load_script, script_text
from gpuflow.broker.signed_messages import signed_anew
from gpuflow.broker.sweeper import BELL_SECONDS
from gpuflow.errors import UnknownTask
from gpuflow.ledger.records import HEAD_FIELDS, RECORD_SCHEMA, AttemptEntry, TaskRecord, Usage
from gpuflow.ledger.states import TaskState, lua_preamble
from gpuflow.signatures import SignatureRefused, Signer

#: So many lost workers end a task: it may be the task that takes its machines down.
MAX_LOSSES: Final = 10
#: Answer of commit.lua for the call that made the task end; a repeat has another one.
_COMMITTED: Final = 1
#: Answer of retry.lua for a run of merged calls.
_IS_RUN: Final = -2
#: The same for a replica of a served model.
_IS_REPLICA: Final = -3
#: ... for one whose message was changed between a look and the step.
_CHANGED: Final = -4


@dataclass(frozen=True, kw_only=True)
class StartVerdict:
    """Answer of START: what to do with the delivery, the record's state, the attempt, and failures so far.

    `alone`: a warm session is to answer it by itself. `lost` is the attempt that was found lost, 0 for none;
    `queued_since` when the task of an attempt that begins began to wait (Unix seconds), 0 where that is not known.
    """

    verdict: Literal["begin", "final", "live", "lost", "avoid", "newer", "merged", "gone"]
    state: str
    attempt: int
    failures: int = 0
    alone: bool = False
    lost: int = 0
    queued_since: float = 0.0


class Observer(Protocol):
    """Is told of each step of this process that began or ended an attempt or a task. Raises nothing."""

    def started(self, task_id: str, verdict: StartVerdict) -> None:
        """START has answered."""

    def requeued(self, task_id: str, attempt: int) -> None:
        """An attempt has ended, and its task waits again."""

    def lost(self, task_id: str, attempt: int) -> None:
        """An attempt was found lost, and its task waits again."""

    def ended(self, task_id: str, attempt: int = 0) -> None:
        """A task has ended, by this attempt or with it lost (0: without one)."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who writes about an attempt: its number, and the token of the process that runs it."""

    attempt: int
    token: str


def ledger_script(name: str) -> Script:
    """Return a Lua step of the ledger, with the table of allowed moves and what the steps share before it."""
    broker, ledger = (script_text(package, "common") for package in ("gpuflow.broker", "gpuflow.ledger"))
    shared = (lua_preamble(), broker, audit_preamble(), ledger)
    return load_script("gpuflow.ledger", name, "".join(shared))


def _unreadable(entry: str) -> dict[str, Any]:
    """Read one entry of the messages that were put aside; earlier versions kept the message as it was."""
    try:
        told = json.loads(entry)
        return {name: told[name] for name in ("at", "list", "why", "message")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"at": 0, "list": "", "why": "it is not JSON with a delivery tag", "message": entry}


class RecordPart(NamedTuple):
    """Some fields of a task's record, as they are stored: `message` is that which its attempts begin from."""

    state: str
    run: str
    pipeline: str
    message: str


class Ledger:
    """The task records of one fleet.

    `client` must decode responses. `events_maxlen` and `events_max_bytes` cap each event stream; final records are kept
    for `retention_seconds`. `observer` is told of what begins and ends. `signer` signs what is queued again.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        events_maxlen: int = 10_000,
        events_max_bytes: int = 16 << 20,
        retention_seconds: int = 30 * 86_400,
        observer: Observer | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.client: Any = client
        self.signer = signer
        self.observer = observer
        self.keys = keys
        self.events_maxlen = events_maxlen
        self.events_max_bytes = events_max_bytes
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

    def heads(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        """Return records as `find_many` does, without what may be large: spec, requirement, result and manifest."""
        pipe = self.client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hmget(self.keys.task(task_id), HEAD_FIELDS)
        found = [
            {name: value for name, value in zip(HEAD_FIELDS, values, strict=True) if value is not None}
            for values in pipe.execute()
        ]
        return [TaskRecord.from_hash(raw) if raw.get("state") else None for raw in found]

    def ids(
        self,
        *,
        chunk: int,
        since: float | None = None,
        until: float | None = None,
        of: Literal["all", "unfinished", "dead"] = "all",
    ) -> Iterator[list[str]]:
        """Yield the ids of tasks, the newest first, at most `chunk` at once; of those submitted in a span alone.

        `since` and `until` are Unix seconds on the server's clock. `of`: of all tasks, of those that have not ended, or
        of the dead letters.
        """
        low, high = "-inf" if since is None else since, "+inf" if until is None else until
        if of == "all":
            # One answer for all: pages by rank would tell a task twice when another is submitted meanwhile.
            found = self.client.zrevrangebyscore(self.keys.tasks, high, low)
        else:
            members = self.unfinished() if of == "unfinished" else self.client.zrange(self.keys.dead, 0, -1)
            times: dict[str, float] = {}
            for first in range(0, len(members), chunk):
                part = members[first : first + chunk]
                scores = self.client.zmscore(self.keys.tasks, part)
                times |= {id: score for id, score in zip(part, scores, strict=True) if score is not None}
            newest = sorted(times, key=lambda id: times[id], reverse=True)
            found = [id for id in newest if float(low) <= times[id] <= float(high)]
        yield from (found[first : first + chunk] for first in range(0, len(found), chunk))

    def now(self) -> float:
        """Return the time of the server in Unix seconds, by which records are written."""
        seconds, microseconds = self.client.time()
        return float(seconds) + float(microseconds) / 1e6

    def names(self, task_ids: Sequence[str]) -> dict[str, str]:
        """Return the names of the tasks that have a record, in one round trip: cheap where the records are large."""
        pipe = self.client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hget(self.keys.task(task_id), "name")
        return {task_id: name for task_id, name in zip(task_ids, pipe.execute(), strict=True) if name}

    def as_seen(self, records: Sequence[TaskRecord | None]) -> list[TaskRecord]:
        """Return those that there are as people are to see them: without a live lease no attempt runs, its task waits.

        The record itself says so when the next attempt begins, or at once when the task is cancelled.
        """
        seen = {record.id: record for record in records if record is not None}
        if doubtful := self._without_lease(seen.values()):
            # What has ended, or begun anew, since it was read has another record by now.
            newest = {record.id: record for record in self.find_many(doubtful) if record is not None}
            seen |= newest
            for id in self._without_lease(newest.values()):
                seen[id] = replace(seen[id], state=TaskState.QUEUED, lost=True)
        return list(seen.values())

    def _without_lease(self, records: Iterable[TaskRecord]) -> list[str]:
        """Return the ids of those that run by their records, and whose delivery nobody holds."""
        running = [r for r in records if r.tag and r.state in (TaskState.STARTING, TaskState.RUNNING)]
        if not running:
            return []
        owners = live_leases(self.client, self.keys, [str(record.tag) for record in running])
        return [record.id for record in running if owners.get(str(record.tag)) != record.owner_token]

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
        call: str = "",
        returned: str = NEVER,
        fetches: bool = False,
    ) -> StartVerdict:
        """Begin the next attempt of a task for the delivery `tag`, which `owner_token` holds (START).

        `returned` is when its message had last gone back before this delivery (`Lease.returned`). `new_fields` are
        those of the record of a task that has none; without them it is `gone`. A message that `fetches` is that of a
        caller which comes for the end of its run, and begins nothing.

        A call whose answer was lost is repeated with the same `call`: the attempt that it began is then answered again.
        """
        keys = self.keys
        pairs = [part for item in (new_fields or {}).items() for part in item]
        verdict, state, attempt, failures, alone, *found = ledger_script("start")(
            self.client,
            [
                keys.task(task_id),
                keys.leases,
                keys.owners,
                keys.events(task_id),
                keys.tasks,
                keys.attempts(task_id),
                keys.dead,
                keys.unfinished,
                keys.ready,
            ],
            [
                task_id,
                worker,
                owner_token,
                tag,
                lowest_attempt,
                self.events_maxlen,
                RECORD_SCHEMA,
                MAX_LOSSES,
                self.retention_seconds,
                call or uuid.uuid4().hex,
                returned,
                "1" if fetches else "",
                *pairs,
            ],
        )
        lost, _, queued_since = (found[0] if found else "").partition(" ")
        answer = StartVerdict(
            verdict=verdict,
            state=state,
            attempt=int(attempt),
            failures=int(failures),
            alone=bool(alone),
            lost=int(lost or 0),
            queued_since=float(queued_since or 0),
        )
        if self.observer is not None:
            self.observer.started(task_id, answer)
        return answer

    def report(
        self, task_id: str, holder: Holder, events: Iterable[str] = (), progress: str = "", celery_meta: str = ""
    ) -> Literal["ok", "cancel", "behind", "superseded"]:
        """Append events (JSON lines) of an attempt; learn whether it is to stop.

        `behind`: nothing was written, since the server knows an older state of the task; the lease decides then.
        `celery_meta` is what Celery's result entry is to say, written in the same step.
        """
        answer: Literal["ok", "cancel", "behind", "superseded"] = ledger_script("report")(
            self.client,
            [self.keys.task(task_id), self.keys.events(task_id), self.keys.celery_result(task_id)],
            [
                str(holder.attempt),
                holder.token,
                progress,
                self.events_maxlen,
                celery_meta,
                self.retention_seconds,
                uuid.uuid4().hex,
                self.events_max_bytes,
                *events,
            ],
        )
        return answer

    def commit(
        self,
        task_id: str,
        state: TaskState,
        *,
        holder: Holder | None,
        result: Any = None,
        error: Mapping[str, Any] | None = None,
        manifest: str = "",
        log_tail: str = "",
        usage: Usage | None = None,
    ) -> bool:
        """Set the final state, if `holder` runs the current attempt (None: if no attempt runs). False when refused."""
        keys = self.keys
        done = ledger_script("commit")(
            self.client,
            [keys.task(task_id), keys.events(task_id), keys.attempts(task_id), keys.dead, keys.unfinished],
            [
                str(state),
                "" if holder is None else str(holder.attempt),
                "" if holder is None else holder.token,
                "" if result is None else json.dumps(result, ensure_ascii=False),
                "" if error is None else json.dumps(error, ensure_ascii=False),
                manifest,
                log_tail,
                self.events_maxlen,
                self.retention_seconds,
                uuid.uuid4().hex,
                "" if usage is None else usage.to_json(),
                actor_here(),
            ],
        )
        if done == _COMMITTED and self.observer is not None:
            self.observer.ended(task_id, 0 if holder is None else holder.attempt)
        return bool(done)

    def yield_attempt(
        self,
        task_id: str,
        holder: Holder,
        tag: str,
        *,
        reason: Literal["failed", "preempted"],
        error: Mapping[str, Any] | None = None,
        log_tail: str = "",
        delay_seconds: float = 0,
        avoid: str = "",
        avoid_seconds: float = 0,
        alone: bool = False,
        usage: Usage | None = None,
        instead: Sequence[str] = THE_SAME,
    ) -> Literal["queued", "cancel", "refused"]:
        """End an attempt but not its task (YIELD): record and message wait again, in one step.

        `failed` counts for `max_attempts`, `preempted` does not. `avoid` is a worker that is not to take it, `instead`
        what comes for its message; with `alone`, a session answers it by itself. `cancel`: a user wants it cancelled.
        """
        keys = self.keys
        answer: Literal["queued", "cancel", "refused"] = ledger_script("yield")(
            self.client,
            [
                keys.task(task_id),
                keys.events(task_id),
                keys.attempts(task_id),
                keys.leases,
                keys.unacked,
                keys.owners,
                keys.ready,
                keys.delayed,
                keys.parked,
            ],
            [
                str(holder.attempt),
                holder.token,
                tag,
                reason,
                "" if error is None else json.dumps(error, ensure_ascii=False),
                log_tail,
                delay_seconds,
                avoid,
                avoid_seconds,
                self.events_maxlen,
                BELL_SECONDS,
                int(alone),
                "" if usage is None else usage.to_json(),
                *instead,
            ],
        )
        if answer == "queued" and self.observer is not None:
            self.observer.requeued(task_id, holder.attempt)
        return answer

    def reclaim(self, leases: Mapping[str, Lease], owner: str, lease_seconds: float, *, new_run: bool) -> set[str]:
        """Take back leases that nobody holds, unless a higher attempt exists; returns the tags held again.

        After a new server run, also those that an older snapshot gives to the owner of a lower attempt.
        """
        keys = self.keys
        args: list[Any] = [owner, lease_seconds, "1" if new_run else "0"]
        records = []
        for tag, lease in leases.items():
            records.append(keys.task(lease.task))
            args += [tag, lease.list_key, "" if lease.attempt is None else str(lease.attempt), lease.raw]
        held = ledger_script("reclaim")(
            self.client,
            [keys.leases, keys.unacked, keys.owners, keys.delayed, keys.parked, keys.ready, *records],
            args,
        )
        return set(held)

    def restore(self, task_id: str, *, least_age_seconds: float) -> str:
        """Put the message of a task back if it is nowhere; see restore.lua for the answers."""
        keys = self.keys
        answer, _, lost = ledger_script("restore")(
            self.client,
            [
                keys.task(task_id),
                keys.events(task_id),
                keys.attempts(task_id),
                keys.unacked,
                keys.parked,
                keys.ready,
                keys.unfinished,
            ],
            [task_id, least_age_seconds, self.events_maxlen, BELL_SECONDS],
        ).partition(" ")
        if lost and self.observer is not None:
            self.observer.lost(task_id, int(lost))
        return str(answer)

    def unfinished(self) -> list[str]:
        """Return the ids of all tasks that are not final."""
        return sorted(self.client.smembers(self.keys.unfinished))

    def attempts(self, task_id: str) -> list[AttemptEntry]:
        """Return how each ended attempt of a task went, the first one first."""
        return self.attempts_of([task_id])[task_id]

    def attempts_of(self, task_ids: Sequence[str]) -> dict[str, list[AttemptEntry]]:
        """Return how the ended attempts of several tasks went, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hgetall(self.keys.attempts(task_id))
        found = zip(task_ids, pipe.execute(), strict=True)
        return {id: [AttemptEntry.from_json(raw[number]) for number in sorted(raw, key=int)] for id, raw in found}

    def dead(self, limit: int = 1000) -> list[TaskRecord]:
        """Return the dead letters, newest first; at most `limit`."""
        ids = self.client.zrevrange(self.keys.dead, 0, limit - 1)
        return [record for record in self.find_many(ids) if record is not None and record.state is TaskState.DEAD]

    def unreadable(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the messages that nobody could read or run, newest first: `at`, `list`, `why`, `message`.

        What is no UTF-8 in them is shown as U+FFFD.
        """
        raw = self.client.execute_command("LRANGE", self.keys.unreadable, 0, limit - 1, **{NEVER_DECODE: True})
        return [_unreadable(entry.decode("utf-8", "replace")) for entry in raw]

    def forget_unreadable(self) -> int:
        """Forget these messages; return how many there were."""
        step = ledger_script("forget_unreadable")
        return int(step(self.client, [self.keys.unreadable, self.keys.audit], [actor_here()]))

    def purge(self, task_id: str) -> bool:
        """Forget a dead task: record, events, attempts. False if it is not among the dead letters."""
        keys = self.keys
        of_task = [keys.task(task_id), keys.events(task_id), keys.attempts(task_id)]
        done = ledger_script("purge")(
            self.client, [*of_task, keys.dead, keys.tasks, keys.audit], [task_id, actor_here()]
        )
        return bool(done)

    def cancel(self, task_id: str, reason: str = "cancelled by a user") -> tuple[str, str]:
        """Cancel: returns (`cancelled`|`requested`|`final`, state). Raises UnknownTask."""
        answer = ledger_script("cancel")(self.client, *self._cancelling(task_id, reason))
        verdict, state = self._cancelled(task_id, answer)
        if verdict == "unknown":
            raise UnknownTask(f"no task {task_id!r}; `gpuflow status` lists those of this fleet")
        return verdict, state

    def cancel_many(self, task_ids: Sequence[str], reason: str, *, again: bool = False) -> list[tuple[str, str]]:
        """Cancel tasks in one round trip; one may be `unknown`. `again`: those cancelled and lost; others `left`."""
        calls = [self._cancelling(task_id, reason, again=again) for task_id in task_ids]
        answers = ledger_script("cancel").many(self.client, calls)
        return [self._cancelled(task_id, answer) for task_id, answer in zip(task_ids, answers, strict=True)]

    def _cancelled(self, task_id: str, answer: Sequence[Any]) -> tuple[str, str]:
        verdict, state, *lost = answer
        if verdict == "cancelled" and lost and self.observer is not None:  # without: it was done by an earlier call
            self.observer.ended(task_id, int(lost[0]))
        return verdict, state

    def _cancelling(self, task_id: str, reason: str, *, again: bool = False) -> tuple[list[str], list[str | int]]:
        keys = self.keys
        return [
            keys.task(task_id),
            keys.events(task_id),
            keys.attempts(task_id),
            keys.dead,
            keys.delayed,
            keys.parked,
            keys.unfinished,
            keys.ready,
            keys.leases,
            keys.unacked,
            keys.owners,
            keys.untold,
        ], [reason, self.events_maxlen, self.retention_seconds, uuid.uuid4().hex, actor_here(), int(again)]

    def untold(self, *, least_age_seconds: float, limit: int = 200) -> list[str]:
        """Return tasks that were cancelled so long ago and that nobody has told Celery of, the oldest first."""
        until = self.now() - least_age_seconds
        found: list[str] = self.client.zrangebyscore(self.keys.untold, "-inf", until, start=0, num=limit)
        return found

    def parts(self, task_ids: Sequence[str]) -> list[RecordPart]:
        """Return what Celery has to be told tasks by, in one round trip; empty where there is no record."""
        pipe = self.client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hmget(self.keys.task(task_id), "state", "run", "pipeline", "message")
        return [RecordPart(*(text or "" for text in texts)) for texts in pipe.execute()]

    def tell_cancelled(self, entries: Mapping[str, str], expires_seconds: int) -> None:
        """Store Celery's entries of cancelled tasks, in one round trip; not of those that were queued again since."""
        calls: list[tuple[list[str], list[str | int]]] = [
            (
                [self.keys.task(task_id), self.keys.celery_result(task_id), self.keys.untold],
                [entry, expires_seconds, task_id],
            )
            for task_id, entry in entries.items()
        ]
        if calls:
            ledger_script("tell_cancelled").many(self.client, calls)

    def told(self, task_ids: Sequence[str]) -> None:
        """Note that Celery has been told of the end of cancelled tasks."""
        if task_ids:
            self.client.zrem(self.keys.untold, *task_ids)

    def is_to_be_cancelled(self, task_id: str) -> bool:
        """Whether a user wants a running task cancelled."""
        return bool(self.client.hexists(self.keys.task(task_id), "cancel_requested"))

    def retry_task(self, task_id: str) -> bool:
        """Queue an ended task again under its id. False if it has not ended or has succeeded.

        Raises UnknownTask, also for a run of merged calls (its callers are the tasks) and a replica of a served model,
        and SignatureRefused where its stored message is not signed by a holder of the key.
        """
        tag = str(uuid.uuid4())
        done = ledger_script("retry")(
            self.client,
            [
                self.keys.task(task_id),
                self.keys.events(task_id),
                self.keys.ready,
                self.keys.celery_result(task_id),
                self.keys.attempts(task_id),
                self.keys.dead,
                self.keys.unfinished,
            ],
            [tag, self.events_maxlen, BELL_SECONDS, actor_here(), *self._signed_anew(task_id, tag)],
        )
        if done == _CHANGED:
            raise SignatureRefused("forged", f"the message of task {task_id} was changed meanwhile; try again")
        if done == _IS_RUN:
            raise UnknownTask(
                f"{task_id} is a run of merged calls and has no callers left; retry the tasks that it served"
            )
        if done == _IS_REPLICA:
            raise UnknownTask(f"{task_id} is a replica of a served model; `gpuflow serve` submits new ones by itself")
        if done < 0:
            raise UnknownTask(f"no task {task_id!r} that could be queued again; its record may have expired")
        return bool(done)

    def _signed_anew(self, task_id: str, tag: str) -> tuple[str, ...]:
        """Return the message of a task, and the same with a new tag and signature; () where nothing is signed."""
        stored = None if self.signer is None else self.client.hget(self.keys.task(task_id), "message")
        if self.signer is None or not stored:
            return ()
        return stored, signed_anew(self.signer, stored, task_id, tag)
