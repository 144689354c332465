"""Matches demand queues with what this worker has: each is decided once, when it is first seen.

A queue is served when the worker's whole capability satisfies its requirement and -Q does not leave it out. What it
asks for stands in its name; the broker is asked only where the name was cut. Workers that decide alike form a class.
A class tells Redis of a queue how well it suits when the doorbell named that queue, or a message of it was taken, so
that a publish wakes a worker that can use the message (broker/lua/common.lua). What merely waits costs no command.
Called on the consumer's thread; `names` from any.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.queue_names import family_matches, is_demand_queue
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.requirement import REQUIREMENT_SCHEMA, Requirement

log = get_logger("gpuflow.demands")

#: Hexadecimal digits of a class's name.
_CLASS_DIGITS: Final = 16
#: What was decided about queues is decided anew after this many seconds.
DECIDE_ANEW_SECONDS: Final = 600.0

#: Names are read again and again, by each worker of a process and each time that all is decided anew.
_read_name: Final = lru_cache(maxsize=16_384)(requirement_of)


class QueueMatcher:
    """The demand queues of one worker. `families` are the names that -Q gave, None for no -Q; `cost` is per hour."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        capability: Capability,
        *,
        families: Sequence[str] | None = None,
        cost: float = 0.0,
    ) -> None:
        self.client: Any = client
        self.keys = keys
        self.capability = capability
        self.families = None if families is None else tuple(name for name in families if is_demand_queue(name))
        self.cost = cost
        self._lock = threading.Lock()
        self._known: dict[str, Requirement | None] = {}
        # What was known before it was forgotten: a message that is being taken still needs it.
        self._before: dict[str, Requirement | None] = {}
        self._told: set[str] = set()
        self._decide_anew_at = time.monotonic() + DECIDE_ANEW_SECONDS
        self.name = self._class_name()

    def _class_name(self) -> str:
        """Return the name of this worker's class: one digest of all that decides what it serves."""
        what = asdict(self.capability)
        what["disk_free_mib"] = (self.capability.disk_free_mib or 0).bit_length()
        what["disk_floor_mib"] = self.capability.lacks_disk
        for gpu in what["gpus"]:
            for part in ("uuid", "index", "mig_parent_uuid"):
                gpu[part] = gpu[part] is not None
        text = json.dumps([REQUIREMENT_SCHEMA, what, self.families, self.cost], sort_keys=True)
        return "@" + hashlib.sha256(text.encode()).hexdigest()[:_CLASS_DIGITS]

    def change(self, capability: Capability) -> None:
        """Note another capability: everything is decided anew. Raises redis errors."""
        with self._lock:
            self.capability = capability
            self.name = self._class_name()
        self.forget()
        self.enlist()

    def has_free_disk(self, disk_free_mib: int | None) -> None:
        """Note how much disk is free now; all is decided anew once it has about halved or doubled, or passed the floor.

        An ask for disk is decided by what is free when its queue is looked at. Raises redis errors.
        """
        with self._lock:
            before = self.name
            self.capability = replace(self.capability, disk_free_mib=disk_free_mib)
            self.name = self._class_name()
            for name, asked in list(self._known.items()):
                if asked is not None and asked.disk_gib is not None and not match(asked, self.capability).fits:
                    del self._known[name]
                    self._told.discard(name)
        if self.name != before:
            self.forget()
            self.enlist()

    def enlist(self) -> None:
        """Say that this class exists, and that the queues that -Q names are in use. Raises redis errors.

        A stock Celery producer may send to them by name, and nobody else.
        """
        self.client.sadd(self.keys.classes, self.name)
        asks = {name: requirement_of(name) for name in self.families or ()}
        named = {name: asked for name, asked in asks.items() if asked is not None}
        if not named:
            return
        seconds, micros = self.client.time()
        pipe = self.client.pipeline()
        for name, asked in named.items():
            pipe.sadd(self.keys.queues, name)
            pipe.hsetnx(self.keys.queue(name), "requirement", json.dumps(asked.to_dict()))
            pipe.hsetnx(self.keys.queue(name), "created_at", f"{seconds}.{micros:06d}")
            pipe.hset(self.keys.queue(name), mapping={"name": name, "used_at": f"{seconds}.{micros:06d}"})
        pipe.execute()

    def served(self, names: Iterable[str]) -> dict[str, Requirement]:
        """Return those of the queues that this worker serves, with what each asks for, in the same order."""
        wanted = list(names)
        if time.monotonic() >= self._decide_anew_at:
            self._decide_anew_at = time.monotonic() + DECIDE_ANEW_SECONDS
            self.forget()
        unknown = [name for name in wanted if name not in self._known]
        if unknown:
            self._learn(unknown)
        found = ((name, self._known.get(name)) for name in wanted)
        return {name: requirement for name, requirement in found if requirement is not None}

    def requirement(self, name: str) -> Requirement | None:
        """Return what a queue asks for that was seen before, None for one that is not served."""
        known = self._known
        return known[name] if name in known else self._before.get(name)

    def names(self) -> tuple[str, ...]:
        """Return the queues that were seen and are served."""
        with self._lock:
            served = [name for name, requirement in self._known.items() if requirement is not None]
        return tuple(sorted(served))

    def forget(self) -> None:
        """Decide anew about every queue: one may have been forgotten by the fleet, and made again."""
        with self._lock:
            self._before, self._known, self._told = self._known, {}, set()

    def tell(self, name: str) -> None:
        """Say whether this class serves a queue and how well it suits, unless this worker has said so before."""
        with self._lock:
            told, capability, class_name = self._told, self.capability, self.name
        if name in told:
            return
        self.served([name])
        if name not in self._known:
            return
        try:
            score = self._suits(self._known[name], capability)
            self.client.zadd(self.keys.queue_classes(name), {class_name: score})
        except RedisError as error:
            log.warning("queue_not_told", queue=name, cause=str(error))
            return
        told.add(name)  # to what was replaced meanwhile, if the capability has changed

    def _learn(self, names: Sequence[str]) -> None:
        with self._lock:
            known, capability = self._known, self.capability
        covered = [name for name in names if self._covers(name)]
        asks: dict[str, Requirement | str | None] = {name: _read_name(name) for name in covered}
        try:
            asks |= self._stored([name for name, asked in asks.items() if asked is None])
        except RedisError as error:
            log.warning("queues_not_read", cause=str(error))
            return
        decided = dict.fromkeys(set(names).difference(covered))
        decided |= {name: self._decide(name, asked, capability) for name, asked in asks.items() if asked is not None}
        with self._lock:
            known.update(decided)  # into what was replaced meanwhile, if the capability has changed

    def _covers(self, name: str) -> bool:
        """Whether -Q lets this worker serve a queue."""
        return self.families is None or any(family_matches(name, family) for family in self.families)

    def _stored(self, names: Sequence[str]) -> dict[str, Requirement | str | None]:
        """Return the requirements that stand beside queues, as JSON, None where there is none. Raises redis errors."""
        if not names:
            return {}
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(self.keys.queue(name), "requirement")
        return dict(zip(names, pipe.execute(), strict=True))

    def _decide(self, name: str, asked: Requirement | str, capability: Capability) -> Requirement | None:
        """Return what a queue asks for, None when this worker does not serve it."""
        try:
            requirement = asked if isinstance(asked, Requirement) else Requirement.from_dict(json.loads(asked))
        except (GPUFlowError, ValueError, TypeError) as error:
            log.warning("queue_not_served", queue=name, cause=str(error))
            return None
        return requirement if match(requirement, capability).fits else None

    def _suits(self, requirement: Requirement | None, capability: Capability) -> float:
        """Return how well this class suits a requirement: least cost first, then least memory left unused."""
        if requirement is None:
            return -1
        whole = sum(gpu.vram_gb for gpu in capability.gpus)
        if requirement.gpu_count == 0:
            return self.cost * 1e6 + whole
        used = set(match(requirement, capability).gpus)
        taken = sum(gpu.vram_gb for gpu in capability.gpus if gpu.uuid in used)
        return self.cost * 1e6 + taken + whole / 1e3
