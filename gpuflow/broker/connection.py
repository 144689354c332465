"""A kombu connection that uses the leased transport for `redis://` URLs, and shows the URL as the user wrote it.

kombu's own table of transports is not touched, so every other Celery app in the process keeps the stock transport.
The transport is named by its path, so that pooled connections have it too and share no pool with a stock app that
talks to the same Redis.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from celery.app.amqp import AMQP
from kombu import Connection, Producer
from kombu.pools import PoolGroup, ProducerPool, connections, register_group, use_global_limit

_TRANSPORT: Final = "gpuflow.broker.transport:Transport"
_REDIS_SCHEMES: Final = frozenset({"redis", "rediss"})
#: A Unix socket is `redis+socket:///path?virtual_host=0` for kombu. Pooled connections would lose our transport with
#: the prefix, so it is taken away, and a transport of its own says that the rest is not to be parsed.
_SOCKET_SCHEME: Final = "redis+socket"
_SOCKET_TRANSPORT: Final = "gpuflow.broker.transport:SocketTransport"


def socket_url(url: str) -> str | None:
    """Return a redis-py URL of a Unix socket (`unix:///path?db=0`) as Celery spells it, None for any other URL.

    kombu wants `redis+` before it, and Celery's result backend does not.
    """
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return None
    query = parse_qs(parts.query)
    login = parts.netloc
    if "password" in query:
        user = query.get("username", [parts.username or ""])[-1]
        login = f"{quote(user, safe='')}:{quote(query['password'][-1], safe='')}@"
    return f"socket://{login}{parts.path}?virtual_host={query.get('db', ['0'])[-1]}"


class LeasedConnection(Connection):  # type: ignore[misc]
    """A broker connection of the gpuflow app."""

    def __init__(self, hostname: Any = "localhost", *args: Any, transport: Any = None, **kwargs: Any) -> None:
        url = hostname[0] if isinstance(hostname, list | tuple) and hostname else hostname
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
        if scheme in _REDIS_SCHEMES and transport in (None, scheme):
            transport = _TRANSPORT
        elif scheme == _SOCKET_SCHEME and transport in (None, "redis"):
            hostname, transport = url.removeprefix("redis+"), _SOCKET_TRANSPORT
        self._shown_scheme = scheme if scheme in _REDIS_SCHEMES else "redis"
        super().__init__(hostname, *args, transport=transport, **kwargs)

    def as_uri(self, *args: Any, **kwargs: Any) -> str:
        """Return the URL, that of a Unix socket as Celery and Flower spell it."""
        uri = str(super().as_uri(*args, **kwargs))
        return f"redis+{uri}" if uri.startswith("socket://") else uri

    def _info(self, resolve: bool = True) -> Any:
        """Return the connection's parameters; for people (`resolve`), with the transport's URL scheme."""
        info = super()._info(resolve=resolve)
        if not resolve:
            return info
        return tuple(
            (name, self._shown_scheme if name == "transport" and value in (_TRANSPORT, _SOCKET_TRANSPORT) else value)
            for name, value in info
        )


class LeasedProducer(Producer):  # type: ignore[misc]
    """A producer that looks first whether an exchange or a queue is declared: kombu copies it before it looks."""

    def maybe_declare(self, entity: Any, retry: bool = False, **retry_policy: Any) -> Any:
        """Declare an exchange or a queue that is not declared on this connection."""
        connection = self.channel.connection  # None: the channel is closed
        known = connection.client.declared_entities if connection is not None else ()
        if entity is not None and entity.can_cache_declaration and hash(entity) in known:
            return False
        return super().maybe_declare(entity, retry, **retry_policy)


class LeasedProducerPool(ProducerPool):  # type: ignore[misc]
    """Producers on leased connections."""

    Producer = LeasedProducer


class _ProducerPools(PoolGroup):  # type: ignore[misc]
    def create(self, connection: Any, limit: int | None) -> LeasedProducerPool:
        return LeasedProducerPool(connections[connection], limit=limit)


#: The pools of producers of this process, by the connections that they are for.
producer_pools: Final = register_group(_ProducerPools(limit=use_global_limit))


class LeasedAMQP(AMQP):  # type: ignore[misc]
    """Celery's message layer, on leased connections."""

    Connection = LeasedConnection
    Producer = LeasedProducer
    #: Celery empties it after a fork.
    _producer_pool: LeasedProducerPool | None

    @property
    def producer_pool(self) -> LeasedProducerPool:
        """The producers of the app."""
        if self._producer_pool is None:
            self._producer_pool = producer_pools[self.app.connection_for_write()]
            self._producer_pool.limit = self.app.pool.limit
        return self._producer_pool

    publisher_pool = producer_pool
