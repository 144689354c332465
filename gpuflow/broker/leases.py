"""The leases that this process holds, and the thread that keeps them.

The transport asks here which queues may be popped now, and reports what it popped. The worker puts its admission
(`Gate`) in and asks to be told when a lease is LOST. This file knows tags, owners and time; not what a task is.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.logs import get_logger

log = get_logger("gpuflow.leases")

#: Restored messages of one sweep step; more are left to the next second.
SWEEP_LIMIT: Final = 100
#: A doorbell token that nobody reads expires after this many seconds.
BELL_SECONDS: Final = 60
#: A gap between two sweeps longer than this means that nobody could renew either, in seconds.
SWEEP_GAP_SECONDS: Final = 5.0


class Gate(Protocol):
    """What may be popped now. Its methods are called on the consumer's thread."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of `queues` that a message may be taken from now, in the order to look."""

    def taken(self, queue: str, tag: str) -> None:
        """A message of `queue` was leased under `tag`."""

    def settled(self, tag: str) -> None:
        """The message of `tag` was acknowledged, put back or lost."""


class OpenGate:
    """A gate that lets every queue pass, for consumers that are not a gpuflow worker."""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return all queues."""
        return list(queues)

    def taken(self, queue: str, tag: str) -> None:
        """Do nothing."""

    def settled(self, tag: str) -> None:
        """Do nothing."""


@dataclass(kw_only=True)
class Lease:
    """One leased message: its queue, and whether work on it has begun."""

    queue: str
    started: bool = False
    on_lost: list[Callable[[], None]] = field(default_factory=list)


def new_token() -> str:
    """Return a token that no other process has."""
    return uuid.uuid4().hex


class LeaseTable:
    """Every lease of this process under one owner token.

    `lease_seconds` is the term. A background thread renews every third of it, as long as `alive()` holds: the
    consumer loop ticked within the last term. What was LOST is told to the callbacks of `on_lost`.
    """

    def __init__(self, keys: Keys, lease_seconds: float, owner: str | None = None) -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        self.owner = owner or new_token()
        self.gate: Gate = OpenGate()
        self.bell = keys.bell(self.owner)
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._client: redis.Redis | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._ticked_at = time.monotonic()
        self._renewed_at = time.monotonic()
        self._run_id = ""

    def connect(self, client: redis.Redis, *, keep: bool) -> None:
        """Use `client` (a pool of our own, it outlives channels); with `keep`, start the keeper once."""
        with self._lock:
            self._client = client
            if keep and self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="gpuflow-leases", daemon=True)
                self._thread.start()

    @property
    def client(self) -> redis.Redis:
        """The client of the last channel. Raises RuntimeError before `connect()`."""
        if self._client is None:
            raise RuntimeError("the lease table has no connection yet")
        return self._client

    def tick(self) -> None:
        """Say that the consumer loop is alive."""
        self._ticked_at = time.monotonic()

    def take(self, tag: str, queue: str) -> None:
        """Note a message that the pop script has leased to us."""
        with self._lock:
            self._leases[tag] = Lease(queue=queue)
        self.gate.taken(queue, tag)

    def start(self, tag: str, on_lost: Callable[[], None] | None = None) -> None:
        """Note that work on the message has begun: a cut connection no longer returns it."""
        with self._lock:
            lease = self._leases.get(tag)
            if lease is None:
                return
            lease.started = True
            if on_lost is not None:
                lease.on_lost.append(on_lost)

    def wake(self) -> None:
        """Make the consumer look again now (a queue has opened)."""
        pipe = self.client.pipeline()
        pipe.lpush(self.bell, "1")
        pipe.expire(self.bell, BELL_SECONDS)
        pipe.execute()

    def held(self) -> dict[str, Lease]:
        """Return a copy of all leases."""
        with self._lock:
            return dict(self._leases)

    def settle(self, tag: str, how: str) -> bool:
        """End a lease: `ack`, `front` or `back`. False when it was LOST. Raises redis errors when not told."""
        keys = self.keys
        done = load_script("gpuflow.broker", "settle")(
            self.client,
            [keys.leases, keys.unacked, keys.owners, keys.waiters, self.bell],
            [tag, self.owner, how, BELL_SECONDS],
        )
        self._forget(tag)
        if not done:
            log.warning("lease_lost", tag=tag, at=how)
        return bool(done)

    def release_unstarted(self) -> int:
        """Put every message that nothing works on back to the front; return how many. Errors leave it to the sweep."""
        count = 0
        for tag, lease in self.held().items():
            if lease.started:
                continue
            try:
                count += self.settle(tag, "front")
            except RedisError as error:
                log.info("lease_left_to_the_sweep", tag=tag, cause=str(error))
                self._forget(tag)
        return count

    def close(self) -> None:
        """Stop renewing and drop the doorbell."""
        self._stop.set()
        if self._client is not None:
            try:
                self._client.srem(self.keys.waiters, self.bell)
                self._client.delete(self.bell)
            except RedisError:
                log.debug("doorbell_left", bell=self.bell)

    def _forget(self, tag: str) -> Lease | None:
        with self._lock:
            lease = self._leases.pop(tag, None)
        if lease is not None:
            self.gate.settled(tag)
        return lease

    def _lost(self, tag: str, why: str) -> None:
        lease = self._forget(tag)
        if lease is None:
            return
        log.error("lease_lost", tag=tag, queue=lease.queue, why=why)
        for callback in lease.on_lost:
            callback()

    def _keep(self) -> None:
        next_renewal = 0.0
        while not self._stop.wait(min(1.0, self.lease_seconds / 3)):
            now = time.monotonic()
            try:
                if now >= next_renewal:
                    self._renew()
                    next_renewal = now + self.lease_seconds / 3
                self._sweep()
            except RedisError as error:
                log.warning("leases_not_renewed", cause=str(error), held=len(self._leases))
                self._give_up_expired()

    def _renew(self) -> None:
        tags = list(self.held())
        if time.monotonic() - self._ticked_at > self.lease_seconds:
            log.error("consumer_loop_stuck", held=len(tags))
            self._give_up_expired()
            return
        lost: list[Any] = []
        if tags:
            lost = load_script("gpuflow.broker", "renew")(
                self.client, [self.keys.leases, self.keys.owners], [self.owner, self.lease_seconds, *tags]
            )
        self._renewed_at = time.monotonic()
        for tag in lost:
            self._lost(tag.decode() if isinstance(tag, bytes) else tag, "another owner holds it")

    def _give_up_expired(self) -> None:
        """Stop work shortly before its lease can pass to another worker."""
        if time.monotonic() - self._renewed_at > self.lease_seconds * 0.9:
            for tag, lease in self.held().items():
                if lease.started:
                    self._lost(tag, "it could not be renewed in time")

    def _sweep(self) -> None:
        if not self._run_id:
            info: Any = self.client.info("server")
            self._run_id = str(info["run_id"])
        keys = self.keys
        restored, graced = load_script("gpuflow.broker", "sweep")(
            self.client,
            [keys.leases, keys.unacked, keys.owners, keys.waiters, keys.sweep],
            [self.lease_seconds, self._run_id, SWEEP_GAP_SECONDS, SWEEP_LIMIT, BELL_SECONDS],
        )
        if restored:
            log.warning("messages_restored", count=restored)
        if graced:
            log.info("leases_graced", count=graced)


class _Process:
    table: LeaseTable | None = None


def install(table: LeaseTable) -> None:
    """Make `table` the one that every channel of this process uses (a worker does this once at its start)."""
    _Process.table = table


def installed() -> LeaseTable | None:
    """Return the lease table of this process, if it is a worker."""
    return _Process.table
