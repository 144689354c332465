"""Takes a step on the broker for a delivery, however long the broker takes none.

Used by the supervisor and merged tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from celery.exceptions import Ignore
from redis.exceptions import RedisError

from gpuflow.broker.answers import passes
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.logs import get_logger

log = get_logger("gpuflow.steps")

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 2.0


def until_answered(leases: LeaseTable, tag: str, task_id: str, step: Callable[[], T]) -> T:
    """Take a step on the broker; while it takes none, try again as long as the lease is ours. Raises Ignore then.

    A step that can never be taken ends the delivery without a word: its lease runs out, and the sweep returns it. So
    does one that cannot be taken at once while the worker stops at once.
    """
    pause = 0.1
    while True:
        try:
            return step()
        except RedisError as error:
            if not passes(error):
                log.error("step_refused", task=task_id, cause=str(error))
                leases.forget(tag)
                raise Ignore from None
            if leases.is_stopping:
                log.warning("message_left_to_the_sweep", task=task_id, cause=str(error))
                raise Ignore from None
            if not leases.holds(tag):
                log.debug("attempt_superseded", task=task_id, why="lost")
                raise Ignore from None
            log.warning("broker_away", task=task_id, cause=str(error))
            leases.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
