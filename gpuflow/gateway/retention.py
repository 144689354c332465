"""Keeps the gateway's folder in order where it is the place that results are uploaded to, and no worker does so.

Called by the gateway every hour, in a thread. Results are judged by the records of the fleet: without REDIS_URL none
goes. Parts of transfers are judged by themselves.
"""

from __future__ import annotations

from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.logs import get_logger
from gpuflow.settings import Settings
from gpuflow.upkeep.parts_cleaning import clean_store
from gpuflow.upkeep.results_cleaning import ResultsCleaner

log = get_logger("gpuflow.retention")

_EVERY_SECONDS: Final = 3000.0
_CONNECT_SECONDS: Final = 5
#: A broker that says nothing for so long is asked again an hour later.
_ANSWER_SECONDS: Final = 30


def remove_old_results(settings: Settings, *, now: float | None = None) -> int:
    """Clean the results folder once as a worker does, and return how much has gone; a failure is logged alone.

    `now` in Unix seconds.
    """
    if settings.redis_url is None:
        return 0
    try:
        client: Any = redis.Redis.from_url(
            settings.redis_url,
            decode_responses=True,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
        )
        with client:
            cleaner = ResultsCleaner(
                client,
                Keys(settings.key_prefix),
                settings.results_dir,
                retention_seconds=settings.retention_days * 86_400,
            )
            return len(cleaner.run(every_seconds=_EVERY_SECONDS, now=now))
    except (RedisError, OSError, ValueError) as error:
        log.warning("results_not_cleaned", cause=str(error))
        return 0


def remove_stale_parts(settings: Settings, *, now: float | None = None) -> int:
    """Remove the stale parts of the results folder, and return how many; a failure is logged alone."""
    try:
        return len(clean_store(settings.results_dir, every_seconds=_EVERY_SECONDS, now=now))
    except OSError as error:
        log.warning("parts_not_cleaned", cause=str(error))
        return 0
