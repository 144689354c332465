"""Keeps GPUs of this machine free for a task that needs several of them, so that small ones do not starve it.

The first capable machine claims the task (Redis: one machine for each message), and its GPUs (the lock directory: one
reservation on a machine, which all workers there honour). What is more urgent, or was queued before, may still use the
reserved GPUs; what comes behind may if its time limit ends before the task could start. Asked by the admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.broker.priorities import list_keys
from gpuflow.broker.scripts import broker_script
from gpuflow.fleet.gpu_reservation import Reservation, boot_seconds
from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.placement import ReservedBefore
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import MachineGpus

log = get_logger("gpuflow.reserving")

#: A reservation that is not renewed ends after this many seconds; a waiting worker looks every second.
TERM_SECONDS: Final = 10.0
_NEVER: Final = float("inf")


class Reserving:
    """The reservation of this machine as one worker sees and makes it."""

    def __init__(self, gpus: MachineGpus, client: redis.Redis, keys: Keys, worker: str) -> None:
        self._gpus = gpus
        self._client: Any = client
        self._keys = keys
        self._worker = worker
        self._now: Reservation | None = None
        self._ready: tuple[str, ...] = ()
        self._tag = ""

    @property
    def current(self) -> Reservation | None:
        """The reservation as it was when it was looked at last."""
        return self._now

    def look(self, ready: Sequence[str]) -> None:
        """Read the reservation; one of ours whose queue is empty by now ends. `ready` is the order of the queues."""
        self._ready = tuple(ready)
        self._now = self._gpus.reservation()
        ours = self._now is not None and self._now.worker == self._worker
        if ours and self._now is not None and self._now.queue not in ready and self._is_empty(self._now.queue):
            self.end()

    def _is_empty(self, queue: str) -> bool:
        """Whether nothing waits in a queue, which may merely not be among the names that were looked at."""
        try:
            return self._client.zscore(self._keys.ready, queue) is None
        except RedisError:
            return False

    def before(self, queue: str, asked: Callable[[str], Requirement]) -> ReservedBefore | None:
        """Return what a task of `queue` has to leave free; `asked` tells what the tasks of a queue ask for."""
        now = self._now
        if now is None or queue == now.queue or _is_before(queue, now.queue, self._ready):
            return None
        seconds = None if now.deadline is None else now.deadline - boot_seconds()
        return ReservedBefore(gpus=now.gpus, asked=asked(now.queue), seconds=seconds)

    def reserve(self, queue: str, asked: Requirement, whole: Capability, free: Capability) -> None:
        """Reserve GPUs for the next task of `queue`, or renew that.

        Those that are free already are chosen first, then those that will be free soonest. One of ours for a queue that
        stands behind gives way.
        """
        if self._now is not None and self._now.worker != self._worker:
            return
        if self._now is not None and self._now.queue != queue:
            if not _is_before(queue, self._now.queue, self._ready):
                return
            self.end()
        ends = self._gpus.ends()
        idle = {gpu.uuid for gpu in free.gpus}
        chosen = _soonest(asked, whole, idle, ends)
        claimed = self._claim_message(queue) if chosen else None
        if claimed is None:
            return
        tag, task = claimed
        if self._now is not None and self._now.task != task:
            self.end()
        self._tag = tag
        self._now = self._gpus.reserve(
            task=task,
            queue=queue,
            gpus=chosen,
            worker=self._worker,
            term_seconds=TERM_SECONDS,
            deadline=self._deadline([ends.get(uuid) for uuid in chosen if uuid not in idle]),
        )

    def _deadline(self, ends: Sequence[float | None]) -> float | None:
        """Return when a task could start that waits for these ends: never later than what was said of it before.

        Otherwise each small task that is let in would put it off a little, and so for ever.
        """
        known = [end for end in ends if end is not None]
        found = max(known) if known and len(known) == len(ends) else None
        before = self._now.deadline if self._now is not None else None
        return min((end for end in (found, before) if end is not None), default=None)

    def task_began(self, queue: str) -> None:
        """Note that a task of `queue` begins here; the machine is kept free for it no longer, whoever made it so."""
        now = self._now
        if now is None or now.queue != queue:
            return
        if now.worker == self._worker:
            self.end()
        else:
            self._now = None
            self._gpus.drop(now.task, now.worker)

    def end(self) -> None:
        """End our reservation, if there is one: its task has begun, here or elsewhere."""
        now, self._now = self._now, None
        if now is not None and now.worker == self._worker:
            self._gpus.drop(now.task, self._worker)
            try:
                self._client.delete(self._keys.reserved(self._tag))
            except RedisError as error:
                log.debug("reservation_left_to_expire", cause=str(error))

    def _claim_message(self, queue: str) -> tuple[str, str] | None:
        """Return tag and task id of the first message of `queue` that no other machine is reserved for, or None."""
        lists = [self._keys.prefix + key for key in list_keys([queue])]
        try:
            found: Any = broker_script("reserve")(
                self._client, [self._keys.reserved(""), *lists], [self._worker, TERM_SECONDS]
            )
        except RedisError as error:
            log.debug("not_reserved", cause=str(error))
            return None
        return (str(found[0]), str(found[1])) if found else None


def _is_before(queue: str, other: str, ready: Iterable[str]) -> bool:
    """Whether `queue` stands before `other` in the order of the ready index."""
    return next((name for name in ready if name in (queue, other)), other) == queue


def _soonest(asked: Requirement, whole: Capability, idle: set[str], ends: Mapping[str, float]) -> tuple[str, ...]:
    """Return the GPUs that serve `asked` soonest, as far as their ends are known; none when it fits in no way."""
    order = sorted(whole.gpus, key=lambda gpu: (gpu.uuid not in idle, ends.get(gpu.uuid, _NEVER), gpu.index))
    for count in range(asked.gpu_count, len(order) + 1):
        fit = match(asked, whole.only([gpu.uuid for gpu in order[:count]]))
        if fit.fits:
            return fit.gpus[: asked.gpu_count]
    return ()
