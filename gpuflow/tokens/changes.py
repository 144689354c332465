"""The one place that every change of a token passes: made, replaced, cut, removed. It is logged, and audited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from gpuflow.audit.entries import record
from gpuflow.broker.keys import Keys
from gpuflow.logs import get_logger

log = get_logger("gpuflow.tokens")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was done to which token, and by whom; `detail` holds no secret."""

    action: str
    actor: str
    target: str
    detail: Mapping[str, Any]


def note_change(client: redis.Redis, keys: Keys, change: Change) -> None:
    """Write a change down. What was changed is so by now: an audit log that cannot be written is told, not raised."""
    try:
        record(client, keys, change.action, change.target, change.detail, actor=change.actor)
    except RedisError as error:
        log.error("audit_not_written", action=change.action, target=change.target, cause=str(error))
    log.info("token_changed", action=change.action, actor=change.actor, target=change.target, **change.detail)
