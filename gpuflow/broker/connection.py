"""A kombu connection that uses the leased transport for `redis://` URLs, and shows the URL as the user wrote it.

kombu's own table of transports is not touched, so every other Celery app in the process keeps the stock transport.
The transport is named by its path, so that pooled connections have it too and share no pool with a stock app that
talks to the same Redis.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from celery.app.amqp import AMQP
from kombu import Connection

_TRANSPORT: Final = "gpuflow.broker.transport:Transport"
_REDIS_SCHEMES: Final = frozenset({"redis", "rediss"})


class LeasedConnection(Connection):  # type: ignore[misc]
    """A broker connection of the gpuflow app."""

    def __init__(self, hostname: Any = "localhost", *args: Any, transport: Any = None, **kwargs: Any) -> None:
        url = hostname[0] if isinstance(hostname, list | tuple) and hostname else hostname
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
        if scheme in _REDIS_SCHEMES and transport in (None, scheme):
            transport = _TRANSPORT
        self._shown_scheme = scheme if scheme in _REDIS_SCHEMES else "redis"
        super().__init__(hostname, *args, transport=transport, **kwargs)

    def _info(self, resolve: bool = True) -> Any:
        """Return the connection's parameters; for people (`resolve`), with the transport's URL scheme."""
        info = super()._info(resolve=resolve)
        if not resolve:
            return info
        return tuple(
            (name, self._shown_scheme if name == "transport" and value == _TRANSPORT else value) for name, value in info
        )


class LeasedAMQP(AMQP):  # type: ignore[misc]
    """Celery's message layer, on leased connections."""

    Connection = LeasedConnection
