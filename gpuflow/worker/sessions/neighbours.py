"""Workers of one machine ask each other for GPUs that only an idle session holds.

A worker whose next task finds no GPU says so under one key of the machine; the others look there while they keep an
idle session. A wish that nobody renews is over after some seconds.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.routing.requirement import Requirement

log = get_logger("gpuflow.sessions")

#: A wish is told at most this often, and is over when it was not told for so long (seconds).
_TELL_SECONDS: Final = 1.0
_TERM_SECONDS: Final = 4


class Neighbours:
    """The wishes of the workers that share the GPUs of `machine`, as one of them sees and tells them."""

    def __init__(self, client: redis.Redis, keys: Keys, machine: str, worker: str) -> None:
        self._client: Any = client
        self._key = keys.wish(machine)
        self._machine = machine
        self._worker = worker
        self._told_at = float("-inf")

    def wish(self, asked: Requirement) -> None:
        """Say that a task with this ask finds no GPU here. Never raises."""
        now = time.monotonic()
        if not self._machine or now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        told = json.dumps({"worker": self._worker, "requirement": asked.to_dict()})
        try:
            self._client.set(self._key, told, ex=_TERM_SECONDS)
        except RedisError as error:
            log.debug("wish_not_told", cause=str(error))

    def granted(self) -> None:
        """Say that the wish told last is fulfilled, if there is one. Never raises."""
        if time.monotonic() - self._told_at < _TERM_SECONDS:
            self._told_at = float("-inf")
            try:
                self._client.delete(self._key)
            except RedisError as error:
                log.debug("wish_not_ended", cause=str(error))

    def wished(self) -> Requirement | None:
        """Return what a task of another worker asks for, None for nothing. Never raises."""
        try:
            raw = self._client.get(self._key) if self._machine else None
            told = json.loads(raw) if raw else {}
            return (
                Requirement.from_dict(told["requirement"]) if told.get("worker", self._worker) != self._worker else None
            )
        except (RedisError, GPUFlowError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.debug("wish_not_read", cause=str(error))
            return None
