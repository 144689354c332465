"""`GET /metrics`: what the fleet counts, for Prometheus. Read from the broker at each request; the gateway keeps none
of it.

The token is the gateway's (`authorization: {type: Bearer, ...}` in Prometheus' scrape configuration).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import redis
from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.problems import Problem
from gpuflow.settings import Settings

#: How long the broker has for its answer, in seconds.
ANSWER_SECONDS: Final = 5.0
#: Count of the merge layer -> name of the metric (Prometheus adds `_total`), and what it counts.
_MERGE_COUNTS: Final = {
    "calls": ("gpuflow_merge_calls", "Calls that could be merged"),
    "new": ("gpuflow_merge_runs", "Runs that such calls have begun"),
    "coalesced": ("gpuflow_merge_coalesced", "Calls that joined a run of the very same call"),
    "batched": ("gpuflow_merge_batched", "Calls that joined a waiting run of compatible ones"),
    "hit": ("gpuflow_merge_hits", "Calls that an earlier result has answered"),
    "regrouped": ("gpuflow_merge_regrouped", "Calls of a run that were tried again by themselves"),
    "released": ("gpuflow_merge_released", "Calls that ran by themselves because their run was gone"),
    "saved_generations": ("gpuflow_merge_saved_generations", "Answers that did not have to be generated"),
    "saved_tokens": ("gpuflow_merge_saved_tokens", "Tokens of these answers"),
}


class FleetCollector(Collector):
    """Metrics of one fleet, by its counts in Redis."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client: Any = client
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once. Raises redis errors."""
        counts = self._client.hgetall(self._keys.merge)
        for name, (metric, text) in _MERGE_COUNTS.items():
            yield CounterMetricFamily(metric, text, value=float(counts.get(name, 0)))
        kept = float(self._client.zcard(self._keys.merge_results))
        yield GaugeMetricFamily("gpuflow_merge_kept_results", "Results that may answer further calls", value=kept)
        size = float(counts.get("kept_bytes", 0))
        yield GaugeMetricFamily("gpuflow_merge_kept_result_bytes", "Bytes of these results", value=size)


def metrics_router(settings: Settings, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the route of the metrics. It answers 503 where the gateway has no broker, or that does not answer."""
    router = APIRouter(dependencies=[Depends(gatekeeper)], tags=["metrics"])
    registry = CollectorRegistry(auto_describe=False)
    if settings.redis_url:
        client = redis.Redis.from_url(
            settings.redis_url,
            decode_responses=True,
            socket_connect_timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
        )
        registry.register(FleetCollector(client, Keys(settings.key_prefix)))

    @router.get("/metrics", response_class=PlainTextResponse, summary="What the fleet counts")
    def metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        if not settings.redis_url:
            raise Problem(503, "no-broker", "the gateway knows no broker; set REDIS_URL where it runs")
        try:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
        except (RedisError, OSError):
            raise Problem(503, "broker-away", "the broker does not answer; try again") from None

    return router


__all__ = ["FleetCollector", "metrics_router"]
