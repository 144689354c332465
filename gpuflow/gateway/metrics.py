"""`GET /metrics`: what the fleet counts, for Prometheus. Read from the broker; the gateway keeps none of it.

The token is the gateway's (`authorization: {type: Bearer, ...}` in Prometheus' scrape configuration).
"""

from __future__ import annotations

from typing import Annotated, Final

import redis
from fastapi import APIRouter, Depends, Header
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.fleet_calls import note_outage
from gpuflow.gateway.problems import Problem
from gpuflow.metrics.collector import FleetCollector
from gpuflow.outages import outage
from gpuflow.settings import Settings

#: How long the broker has for its answer, in seconds.
ANSWER_SECONDS: Final = 5.0


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
        registry.register(FleetCollector(client, Keys(settings.key_prefix), settings.task_topic))

    @router.get("/metrics", response_class=PlainTextResponse, summary="What the fleet counts")
    def metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Return all metrics in Prometheus' text format, or in OpenMetrics' where the client asks for that."""
        if not settings.redis_url:
            raise Problem(503, "no-broker", "the gateway knows no broker; set REDIS_URL where it runs")
        try:
            if "application/openmetrics-text" in accept:
                text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
                answer = Response(text, media_type=openmetrics.CONTENT_TYPE_LATEST)
            else:
                answer = Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
            outage.answered()
            return answer
        except (RedisError, OSError) as error:
            note_outage(error)
            raise Problem(503, "broker-away", "the broker does not answer; try again") from None

    return router


__all__ = ["metrics_router"]
