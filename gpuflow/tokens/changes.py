"""The one place that every change of a token passes: made, replaced, cut, removed. It is logged, and audited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from gpuflow.audit.actors import actor_here
from gpuflow.audit.entries import record
from gpuflow.broker.keys import Keys
from gpuflow.logs import get_logger

log = get_logger("gpuflow.tokens")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was done to which token; `detail` holds no secret."""

    action: str
    target: str
    detail: Mapping[str, Any]


def note_change(client: redis.Redis, keys: Keys, change: Change) -> None:
    """Write down a change by who acts in this context. What was changed is so by now.

    An audit log that cannot be written is told, not raised.
    """
    actor = actor_here()
    try:
        record(client, keys, change.action, change.target, change.detail, actor=actor)
    except RedisError as error:
        log.error("audit_not_written", action=change.action, target=change.target, cause=str(error))
    log.info("token_changed", action=change.action, actor=actor, target=change.target, **change.detail)
