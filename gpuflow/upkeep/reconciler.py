"""Mends what no step of the normal flow will mend: one round over records, messages, pipelines and workers.

Every repair is idempotent, logged, and counted in `gpuflow.repairs`. Called by the duties of beat under a lock; two
rounds at once would do no harm either. It decides nothing itself: each repair is a compare-and-set of the ledger, of
the pipeline controller or of the registry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from redis.client import NEVER_DECODE

from gpuflow.broker.answers import passes
from gpuflow.broker.keys import RECONCILED_AT
from gpuflow.broker.priorities import list_keys
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.registry import Fleet
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.pipelines.records import PipelineState
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES

log = get_logger("gpuflow.reconciler")

#: Ephemeral workers that have gone are forgotten after this many seconds.
FORGET_EPHEMERAL_SECONDS: Final = 3600.0
#: Demand queues that nothing was published to for so many seconds are forgotten.
FORGET_QUEUE_SECONDS: Final = 3600.0
#: Messages read in one round trip.
_CHUNK: Final = 500


class Reconciler:
    """Reconciles one fleet."""

    def __init__(self, app: GPUFlow) -> None:
        self.app = app
        self.client: Any = app.redis
        self.keys = app.keys
        self.fleet = Fleet(app.redis, app.keys)

    def run(self) -> dict[str, int]:
        """Make one round; return how many repairs of each kind it made.

        A repair that stumbles over what it reads keeps none of the others from being made. Raises redis errors of a
        server that takes nothing now.
        """
        repairs: dict[str, Callable[[], int]] = {
            "message_restored": self.restore_messages,
            "cancel_obeyed": self.end_unwanted,
            "cancel_told": self.tell_cancelled,
            "calls_completed": self.complete_calls,
            "pipeline_settled": self.reconcile_pipelines,
            "worker_offline": lambda: len(self.fleet.note_silent()),
            "worker_forgotten": lambda: len(self.fleet.forget_gone(FORGET_EPHEMERAL_SECONDS, self._retention_seconds)),
            "queue_forgotten": self.forget_queues,
            "class_forgotten": lambda: len(self.fleet.forget_classes()),
            "record_let_go": self.let_records_expire,
            "index_trimmed": self.trim_indexes,
        }
        made = {kind: self._made(kind, repair) for kind, repair in repairs.items()}
        for kind, count in made.items():
            if count:
                self.client.hincrby(self.keys.repairs, kind, count)
                log.info("repaired", kind=kind, count=count)
        self.client.hset(self.keys.metrics, RECONCILED_AT, self.client.time()[0])
        return made

    def _made(self, kind: str, repair: Callable[..., int], *about: str) -> int:
        try:
            return repair(*about)
        except Exception as error:
            if not isinstance(error, GPUFlowError | ValueError | KeyError | TypeError) and passes(error):
                raise
            log.exception("repair_failed", kind=kind, about=about)
            return 0

    @property
    def _retention_seconds(self) -> float:
        return self.app.settings.retention_days * 86_400

    def restore_messages(self) -> int:
        """Put back the messages of unfinished tasks that are nowhere."""
        unfinished = set(self.app.ledger.unfinished())
        if not unfinished:
            return 0
        count = 0
        for task_id in sorted(unfinished.difference(self._message_ids())):
            answer = self.app.ledger.restore(task_id, least_age_seconds=2 * self.app.settings.lease_seconds)
            if answer == "restored":
                log.warning("message_restored", task=task_id)
                count += 1
            elif answer == "lost":
                log.error("message_missing", task=task_id, mend=f"`gpuflow cancel {task_id}`, then submit it again")
        return count

    def end_unwanted(self) -> int:
        """End tasks that were cancelled, whose workers were lost, and which nobody has ended since; return how many."""
        unfinished = self.app.ledger.unfinished()
        pipe = self.client.pipeline(transaction=False)
        for task_id in unfinished:
            pipe.hexists(self.keys.task(task_id), "cancel_requested")
        wanted = [task_id for task_id, asked in zip(unfinished, pipe.execute(), strict=True) if asked]
        count = self.app.end_unwanted(wanted)
        if count:
            log.warning("cancel_obeyed", count=count)
        return count

    def tell_cancelled(self) -> int:
        """Tell Celery of tasks that somebody cancelled who was ended before he could; return of how many."""
        untold = self.app.ledger.untold(least_age_seconds=2 * self.app.settings.lease_seconds)
        count = self.app.tell_cancelled(untold)
        if count:
            log.warning("cancel_told", tasks=untold)
        return count

    def complete_calls(self) -> int:
        """Complete merged calls whose run has ended, or is gone, and was completed by nobody; return how many runs."""
        runs: dict[str, list[TaskRecord]] = {}
        for record in self.app.ledger.find_many(self.app.ledger.unfinished()):
            if record is not None and record.state is TaskState.MERGED and record.run:
                runs.setdefault(record.run, []).append(record)
        now = float(self.client.time()[0])
        left = 0
        for run_id, run in zip(runs, self.app.ledger.find_many(list(runs)), strict=True):
            callers = runs[run_id]
            if run is None:
                left += sum(self._made("calls_completed", self._release, caller.id) for caller in callers)
            elif run.state.final and now - (run.finished_at or now) > 2 * self.app.settings.lease_seconds:
                left += self._made("calls_completed", self._complete, run_id, callers[0].call or "")
        return left

    def _release(self, caller_id: str) -> int:
        log.warning("run_gone", caller=caller_id)
        return int(self.app.merger.release(caller_id))

    def _complete(self, run_id: str, call: str) -> int:
        log.warning("calls_completed", run=run_id)
        return int(self.app.merger.complete(run_id, of_caller=call))

    def reconcile_pipelines(self) -> int:
        """Reconcile every running pipeline: mends one whose join never fired. Returns how many moved by that."""
        return sum(self._made("pipeline_settled", self._reconcile_pipeline, one) for one in self._running_pipelines())

    def _reconcile_pipeline(self, pipeline_id: str) -> int:
        before = self.app.pipelines.find(pipeline_id)
        if before is None:
            return 0
        self.app.pipeline_controller.reconcile(pipeline_id)
        after = self.app.pipelines.find(pipeline_id)
        if after is None or (after.state, after.stages) == (before.state, before.stages):
            return 0
        log.warning("pipeline_settled", pipeline=pipeline_id, state=str(after.state))
        return 1

    def forget_queues(self) -> int:
        """Forget demand queues that are used no more and that no unfinished record names."""
        ids = self.app.ledger.unfinished()
        named = {record.queue for record in self.app.ledger.find_many(ids) if record is not None}
        return len(self.fleet.forget_queues(named, FORGET_QUEUE_SECONDS))

    def let_records_expire(self) -> int:
        """Give a time to the final records that were kept for a pipeline which names them no more (after a resume)."""
        count = start = 0
        oldest = time.time() - self._retention_seconds
        while ids := self.client.zrangebyscore(self.keys.tasks, "-inf", oldest, start=start, num=_CHUNK):
            start += len(ids)
            pipe = self.client.pipeline(transaction=False)
            for task_id in ids:
                pipe.hmget(self.keys.task(task_id), "pipeline", "finished_at")
                pipe.ttl(self.keys.task(task_id))
            answers = pipe.execute()
            for task_id, (pipeline, finished_at), seconds in zip(ids, answers[::2], answers[1::2], strict=True):
                if not pipeline or not finished_at or seconds != -1:
                    continue
                if self.client.hget(self.keys.pipeline(pipeline), "state") != PipelineState.RUNNING:
                    for key in (self.keys.task(task_id), self.keys.events(task_id), self.keys.attempts(task_id)):
                        self.client.expire(key, int(self._retention_seconds))
                    count += 1
        return count

    def trim_indexes(self) -> int:
        """Take ids out of the indexes whose records have expired."""
        count = 0
        oldest = time.time() - self._retention_seconds
        for index, key in (
            (self.keys.tasks, self.keys.task),
            (self.keys.dead, self.keys.task),
            (self.keys.pipelines, self.keys.pipeline),
        ):
            ids = self.client.zrangebyscore(index, "-inf", oldest, start=0, num=_CHUNK)
            gone = [record_id for record_id in ids if not self.client.exists(key(record_id))]
            if gone:
                count += int(self.client.zrem(index, *gone))
        return count

    def _running_pipelines(self) -> list[str]:
        ids = self.client.zrange(self.keys.pipelines, 0, -1)
        pipe = self.client.pipeline(transaction=False)
        for pipeline_id in ids:
            pipe.hget(self.keys.pipeline(pipeline_id), "state")
        states = pipe.execute()
        return [key for key, state in zip(ids, states, strict=True) if state == PipelineState.RUNNING]

    def _message_ids(self) -> set[str]:
        """Return the task ids of all messages, waiting, leased or delayed.

        The delayed and leased ones are read last: a message moves from its list to them while we read.
        """
        ids = set(self._waiting_ids())
        for raw in self._raw("HVALS", self.keys.parked):
            ids.add(_task_id(raw.split(b"\n", 2)[-1]))
        ids.update(_task_id(raw) for raw in self._raw("HVALS", self.keys.unacked))
        return ids

    def _waiting_ids(self) -> Iterator[str]:
        queues = [*self.client.smembers(self.keys.queues), CONTROL_QUEUE, *NOTICE_QUEUES, self.app.settings.task_topic]
        for key in list_keys(queues):
            start = 0
            while chunk := self._raw("LRANGE", f"{self.keys.prefix}{key}", start, start + _CHUNK - 1):
                yield from map(_task_id, chunk)
                start += _CHUNK

    def _raw(self, *command: Any) -> list[bytes]:
        """Return an answer as it came: one message that is no text must not spoil the others."""
        answer: list[bytes] = self.client.execute_command(*command, **{NEVER_DECODE: True})
        return answer


def _task_id(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["headers"]["id"])
    except (ValueError, KeyError, TypeError):
        return ""
