"""The one place that every change of a token passes: made, replaced, cut, removed. It writes a line of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

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
    """Write a change down."""
    log.info("token_changed", action=change.action, actor=change.actor, target=change.target, **change.detail)
