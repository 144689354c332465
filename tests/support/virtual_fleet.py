"""Workers without processes on a virtual clock: the real admission, ready index and Lua, but no children and no locks.

`VirtualWorker` looks for work as `broker.transport.Channel` does. `VirtualGpus` stands for `worker.machine_gpus`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from gpuflow.broker.keys import Keys
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.look import PAGE_NAMES, RESCAN_SECONDS, Look
from gpuflow.broker.priorities import list_keys, queue_of
from gpuflow.broker.scripts import broker_script
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.fleet.gpu_reservation import Reservation
from gpuflow.routing.affinity import session_of
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.routing.placement import FreeGpus
from gpuflow.worker.admission import Admission
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.slots import Limits


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class VirtualGpus:
    """The GPUs of one machine for all its workers: what `MachineGpus` answers, from plain dictionaries."""

    def __init__(self, capability: Capability, clock: Clock) -> None:
        self._total = {gpu.uuid: gpu.total_mib for gpu in capability.gpus}
        self._clock = clock
        self._ends: dict[str, float] = {}
        self._reservation: Reservation | None = None
        self.users: dict[str, list[Hold]] = {uuid: [] for uuid in self._total}

    def snapshot(self, capability: Capability) -> FreeGpus:
        uuids = [gpu.uuid for gpu in capability.gpus]
        free = frozenset(uuid for uuid in uuids if not self.users[uuid])
        return FreeGpus(whole=free, room_mib={uuid: self._room(uuid) for uuid in uuids})

    def _room(self, uuid: str) -> int:
        users = self.users[uuid]
        if any(hold.share_mib is None for hold in users):
            return 0
        return self._total[uuid] - sum(hold.share_mib or 0 for hold in users)

    def shared(self) -> bool:
        return any(hold.share_mib for users in self.users.values() for hold in users)

    def claim(self, uuids: Sequence[str], share_mib: int | None = None) -> Hold | None:
        if any(self.users[uuid] if share_mib is None else self._room(uuid) < share_mib for uuid in uuids):
            return None
        hold = Hold(uuids, share_mib=share_mib)
        for uuid in uuids:
            self.users[uuid].append(hold)
            self._ends.pop(uuid, None)
        return hold

    def release(self, hold: Hold, *, wait_seconds: float = 0) -> bool:
        if not hold.closed:
            hold.close()
            for uuid in hold.uuids:
                self.users[uuid].remove(hold)
        return True

    def group(self) -> str:
        return f"@machine:{','.join(self._total)}"

    def note_end(self, hold: Hold, seconds: float) -> None:
        if hold.share_mib is None:
            self._ends.update(dict.fromkeys(hold.uuids, self._clock() + seconds))

    def ends(self) -> dict[str, float]:
        return dict(self._ends)

    def reservation(self) -> Reservation | None:
        if self._reservation is not None and self._reservation.expires <= self._clock():
            self._reservation = None
        return self._reservation

    def reserve(self, *, term_seconds: float, gpus: Sequence[str], **fields: Any) -> Reservation:
        there = self.reservation()
        if there is None or (there.task, there.worker) == (fields["task"], fields["worker"]):
            there = Reservation(expires=self._clock() + term_seconds, gpus=tuple(gpus), **fields)
            self._reservation = there
        return there

    def drop(self, task: str, worker: str) -> bool:
        there = self.reservation()
        if there is None or (there.task, there.worker) != (task, worker):
            return False
        self._reservation = None
        return True


@dataclass(kw_only=True)
class Taken:
    """A message that a worker has taken."""

    tag: str
    task: str
    queue: str


class VirtualWorker:
    """One worker: looks, takes, and gives back. Nothing runs."""

    def __init__(
        self, name: str, client: redis.Redis, capability: Capability, gpus: VirtualGpus, clock: Clock, limits: Limits
    ) -> None:
        keys = Keys("")
        self.name, self.client, self.keys, self.clock, self.gpus = name, client, keys, clock, gpus
        self.look = Look()
        self.leases = LeaseTable(keys, 600, owner=name)
        self.leases.connect(client, keep=False)
        made: Any = gpus
        self.admission = Admission(
            QueueMatcher(client, keys, capability), limits, made, Reserving(made, client, keys, name)
        )
        self.leases.gate = self.admission
        self.admission.matcher.enlist()

    def hear(self, token: str | None) -> None:
        """Read the doorbell."""
        if token is not None:
            self.look.woken((self.leases.bell, token))

    def step(self) -> Taken | bool:
        """Look once: return what was taken, else whether it is to look again at once."""
        look, gate = self.look, self.admission
        if not look.begin(self.clock()):
            return False
        look.plain = gate.open_queues([CONTROL_QUEUE])
        look.chosen = gate.choose(look.names_to_choose(), look.barren, look.full)
        look.queues = [*look.plain, *(choice.queue for choice in look.chosen)]
        key, raw, names = self._pop()
        look.page = names
        if key:
            queue = queue_of(key)
            look.found(queue)
            message = json.loads(raw)
            tag = message["properties"]["delivery_tag"]
            self.leases.accept(tag, queue, key, raw)
            gate.on_leased(queue, tag, *session_of(raw))
            self.leases.start(tag)
            return Taken(tag=tag, task=message["headers"]["id"], queue=queue)
        gate.chosen_none()
        look.in_vain(self.clock())
        fitting = gate.fitting(look.page, look.barren)
        if not fitting and len(names) == PAGE_NAMES:
            rest = self.client.zrange(self.keys.ready, PAGE_NAMES, -1)
            fitting = gate.fitting(rest, look.barren)
            look.page = rest if fitting else []
        if not fitting or look.refused(fitting):
            look.again_at = self.clock() + RESCAN_SECONDS
            return False
        return True

    def _pop(self) -> tuple[str, str, list[str]]:
        keys, look, waits_as = self.keys, self.look, self.admission.waits_as
        groups = [*look.plain, *filter(None, (waits_as, waits_as and self.admission.machine))]
        answer: Any = broker_script("pop")(
            self.client,
            [
                *(keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, self.leases.bell),
                *list_keys(look.queues),
            ],
            [
                self.leases.owner,
                600,
                look.to_json(groups, self.admission.message_filter, PAGE_NAMES if waits_as else 0),
            ],
        )
        return answer[0], answer[1], answer[2]

    def begin(self, taken: Taken, limit_seconds: float | None) -> tuple[str, ...]:
        """Start the child: return its GPUs."""
        allocation = self.admission.keep(taken.tag, limit_seconds)
        assert allocation is not None
        return allocation.gpus

    def finish(self, taken: Taken) -> None:
        """The child has gone and its result is committed, as the supervisor and Celery do it."""
        self.admission.child_gone(taken.tag)
        self.leases.wake(machine=True)
        assert self.leases.settle(taken.tag, "ack")
        self.admission.release(taken.tag)


@dataclass
class Publisher:
    """Publishes messages of demand queues as the transport does, without records."""

    client: redis.Redis
    keys: Keys = field(default_factory=Keys)

    def publish(
        self, task: str, queue: str, requirement: Mapping[str, Any], priority: int, hints: Mapping[str, Any]
    ) -> None:
        told = json.dumps(hints)[1:-1] + ", "
        message = {"body": "", "headers": {"id": task}, "properties": {"delivery_tag": f"tag-{task}"}}
        keys = self.keys
        broker_script("publish")(
            self.client,
            [
                list_keys([queue])[9 - priority],
                *(keys.ready, keys.delayed, keys.parked, keys.task(task), keys.tasks, keys.queues),
                *(keys.queue(queue), keys.events(task)),
            ],
            [json.dumps(message), 60, "", f"tag-{task}", "", queue, json.dumps(requirement), told],
        )
