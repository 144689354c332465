"""Mends what no step of the normal flow will mend: one round over records, messages, pipelines and workers.

Every repair is idempotent, logged, and counted in `gpuflow.repairs`. Called by the duties of beat under a lock; two
rounds at once would do no harm either. It decides nothing itself: each repair is a compare-and-set of the ledger, of
the pipeline engine or of the registry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from gpuflow.broker.priorities import list_keys
from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.registry import Fleet
from gpuflow.logs import get_logger
from gpuflow.pipelines.records import PipelineState
from gpuflow.routing.families import CONTROL_QUEUE

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
        """Make one round; return how many repairs of each kind it made. Raises redis errors."""
        made = {
            "message_restored": self.restore_messages(),
            "pipeline_settled": self.settle_pipelines(),
            "worker_offline": len(self.fleet.note_silent()),
            "worker_forgotten": len(self.fleet.forget_gone(FORGET_EPHEMERAL_SECONDS, self._retention_seconds)),
            "queue_forgotten": self.forget_queues(),
            "class_forgotten": len(self.fleet.forget_classes()),
            "index_trimmed": self.trim_indexes(),
        }
        for kind, count in made.items():
            if count:
                self.client.hincrby(self.keys.repairs, kind, count)
                log.info("repaired", kind=kind, count=count)
        return made

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

    def settle_pipelines(self) -> int:
        """Settle every running pipeline: mends one whose join never fired. Returns how many moved by that."""
        moved = 0
        for pipeline_id in self._running_pipelines():
            before = self.app.pipelines.find(pipeline_id)
            if before is None:
                continue
            self.app.engine.settle(pipeline_id)
            after = self.app.pipelines.find(pipeline_id)
            if after is not None and (after.state, after.stages) != (before.state, before.stages):
                log.warning("pipeline_settled", pipeline=pipeline_id, state=str(after.state))
                moved += 1
        return moved

    def forget_queues(self) -> int:
        """Forget demand queues that are used no more and that no unfinished record names."""
        ids = self.app.ledger.unfinished()
        named = {record.queue for record in self.app.ledger.find_many(ids) if record is not None}
        return len(self.fleet.forget_queues(named, FORGET_QUEUE_SECONDS))

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
        for raw in self.client.hvals(self.keys.parked):
            ids.add(_task_id(raw.split("\n", 2)[-1]))
        ids.update(_task_id(raw) for raw in self.client.hvals(self.keys.unacked))
        return ids

    def _waiting_ids(self) -> Iterator[str]:
        queues = [*self.client.smembers(self.keys.queues), CONTROL_QUEUE, self.app.settings.task_topic]
        for key in list_keys(queues):
            start = 0
            while chunk := self.client.lrange(f"{self.keys.prefix}{key}", start, start + _CHUNK - 1):
                yield from map(_task_id, chunk)
                start += _CHUNK


def _task_id(raw: str) -> str:
    try:
        return str(json.loads(raw)["headers"]["id"])
    except (ValueError, KeyError, TypeError):
        return ""
