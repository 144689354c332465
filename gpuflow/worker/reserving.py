"""Keeps GPUs of this machine free for a task that needs several of them, so that small ones do not starve it.

The first capable machine claims the task (Redis: one machine for each message), and its GPUs (the lock directory: one
reservation on a machine, which all workers there honour). What is more urgent, or was queued before, may still use the
reserved GPUs; what comes behind may if its time limit ends before the task could start. Asked by the admission.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.gate import ANY_TIME
from gpuflow.broker.keys import Keys
from gpuflow.broker.priorities import list_keys
from gpuflow.broker.scripts import broker_script
from gpuflow.fleet.gpu_reservation import Reservation, boot_seconds
from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import MachineGpus

log = get_logger("gpuflow.reserving")

#: A reservation that is not renewed ends after this many seconds; a waiting worker looks every second.
TERM_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a queue may use of the GPUs that are free: these, and how long its task may take on them at most."""

    capability: Capability
    most_seconds: float = ANY_TIME


class Reserving:
    """The reservation of this machine as one worker sees and makes it."""

    def __init__(self, gpus: MachineGpus, client: redis.Redis, keys: Keys, worker: str) -> None:
        self._gpus = gpus
        self._client: Any = client
        self._keys = keys
        self._worker = worker
        self._now: Reservation | None = None
        self._tag = ""

    @property
    def current(self) -> Reservation | None:
        """The reservation as it was when it was looked at last."""
        return self._now

    def look(self, ready: Sequence[str]) -> None:
        """Read the reservation; one of ours whose queue is empty by now ends."""
        self._now = self._gpus.reservation()
        ours = self._now is not None and self._now.worker == self._worker
        if ours and self._now is not None and self._now.queue not in ready:
            self.end()

    def room(self, queue: str, ready: Sequence[str], free: Capability) -> tuple[Room, ...]:
        """Return what a queue may use of `free`: without the reserved GPUs, and with them for a limited time."""
        now = self._now
        if now is None or queue == now.queue or _is_before(queue, now.queue, ready):
            return (Room(capability=free),)
        others = [gpu.uuid for gpu in free.gpus if gpu.uuid not in now.gpus]
        rest = Room(capability=free.only(others))
        seconds = now.deadline - boot_seconds() if now.deadline is not None else 0.0
        return (rest, Room(capability=free, most_seconds=seconds)) if seconds > 0 else (rest,)

    def claim(
        self, queue: str, asked: Requirement, whole: Capability, free: Capability, ends: Mapping[str, float | None]
    ) -> None:
        """Reserve GPUs for the next task of `queue`, or renew that; `ends`: when each GPU in use is free at the latest.

        Those that are free already are chosen first, then those that will be free soonest.
        """
        if self._now is not None and (self._now.worker, self._now.queue) != (self._worker, queue):
            return
        idle = {gpu.uuid for gpu in free.gpus}
        order = sorted(whole.gpus, key=lambda gpu: (gpu.uuid not in idle, _latest(ends.get(gpu.uuid)), gpu.index))
        chosen: tuple[str, ...] = ()
        for count in range(asked.gpu_count, len(order) + 1):
            fit = match(asked, whole.only([gpu.uuid for gpu in order[:count]]))
            if fit.fits:
                chosen = fit.gpus[: asked.gpu_count]
                break
        claimed = self._claim_message(queue) if chosen else None
        if claimed is None:
            return
        self._tag, task = claimed
        waits = [ends.get(uuid) for uuid in chosen if uuid not in idle]
        now = time.monotonic()
        known = [end - now for end in waits if end is not None]
        self._now = self._gpus.reserve(
            task=task,
            queue=queue,
            gpus=chosen,
            worker=self._worker,
            term_seconds=TERM_SECONDS,
            deadline=boot_seconds() + max(known) if known and len(known) == len(waits) else None,
        )

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


def _latest(end: float | None) -> float:
    return float("inf") if end is None else end
