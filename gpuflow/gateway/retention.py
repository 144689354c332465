"""Retention where the gateway's folder is the place that results are uploaded to, and no worker keeps it in order.

Called by the gateway every hour, in a thread. It judges by the records of the fleet: without REDIS_URL nothing goes.
"""

from __future__ import annotations

from typing import Any, Final

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.logs import get_logger
from gpuflow.settings import Settings
from gpuflow.upkeep.results_cleaning import ResultsCleaner

log = get_logger("gpuflow.retention")

_EVERY_SECONDS: Final = 3000.0
_CONNECT_SECONDS: Final = 5


def remove_old_results(settings: Settings) -> int:
    """Clean the results folder once as a worker does, and return how much has gone; a failure is logged alone."""
    if settings.redis_url is None:
        return 0
    client: Any = redis.Redis.from_url(
        settings.redis_url, decode_responses=True, socket_connect_timeout=_CONNECT_SECONDS
    )
    cleaner = ResultsCleaner(
        client, Keys(settings.key_prefix), settings.results_dir, retention_seconds=settings.retention_days * 86_400
    )
    try:
        return len(cleaner.run(every_seconds=_EVERY_SECONDS))
    except (RedisError, OSError) as error:
        log.warning("results_not_cleaned", cause=str(error))
        return 0
    finally:
        client.close()
