"""A kombu connection that uses the leased transport for `redis://` URLs, and keeps the URL as the user wrote it.

kombu's own table of transports is not touched, so every other Celery app in the process keeps the stock transport.
"""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection

from gpuflow.broker.transport import Transport

_REDIS_SCHEMES = frozenset({"redis", "rediss", "redis+socket", "socket"})


class LeasedConnection(Connection):
    """A broker connection of the gpuflow app."""

    def get_transport_cls(self) -> Any:
        """Return the leased transport for Redis, kombu's choice for everything else (such as memory://)."""
        if self.transport_cls is None or self.transport_cls in _REDIS_SCHEMES:
            return Transport
        return super().get_transport_cls()


class LeasedAMQP(AMQP):
    """Celery's message layer, on leased connections."""

    Connection = LeasedConnection
