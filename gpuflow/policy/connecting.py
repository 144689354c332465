"""Connects to hosts that tasks name: each is resolved once, judged by its addresses, and connected to by those alone.

Used for every request that gpuflow makes for a task, in the worker, its readers and its children. Through a proxy the
target is judged by its name, since the proxy resolves it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from gpuflow.errors import NotAllowed
from gpuflow.policy.hosts import Hosts, Place, reached
from gpuflow.policy.refusal import Refusal


def judged_addresses(host: str, port: int, hosts: Hosts) -> list[str]:
    """Return the addresses of a host, all of which may be reached. Raises NotAllowed, OSError."""
    addresses = _addresses(host, port)
    for address in addresses:
        _raise_if(hosts.refusal(host, port, address))
        if any(place.port == port and _is_at(place, host, address) for place in hosts.brokers):
            _raise_if(hosts.broker_refusal(host, port))
    return addresses


def client(hosts: Hosts | None, **options: Any) -> httpx.Client:
    """Return an HTTP client that reaches what `hosts` lets it (None: everything)."""
    if hosts is None:
        return httpx.Client(**options)

    def judge(request: httpx.Request) -> None:
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        _raise_if(hosts.name_refusal(request.url.host, port))

    made = httpx.Client(event_hooks={"request": [judge]}, **options)
    # Not the connections to the operator's own proxies, which httpx keeps apart. It has no public way to a backend;
    # were this one gone, nothing may be sent past the policy.
    pool = getattr(made._transport, "_pool", None)
    if not isinstance(pool, httpcore.ConnectionPool) or not hasattr(pool, "_network_backend"):
        made.close()
        raise NotAllowed("this version of httpx cannot be held to GPUFLOW_ALLOW_HOSTS; install the pinned one")
    pool._network_backend = _JudgingBackend(hosts)
    return made


class _JudgingBackend(httpcore.NetworkBackend):
    """Opens the connections of an HTTP client."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._inner = hosts, httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to one of the addresses of a host."""
        try:
            addresses = judged_addresses(host, port, self._hosts)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} has no address") from error
        for address in addresses[:-1]:
            try:
                return self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """Refuse: no task names one."""
        raise NotAllowed(f"{path} is no host; tasks reach hosts alone")


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    if not addresses:
        raise OSError(f"{host} has no address")
    return list(addresses)


def _is_at(place: Place, host: str, address: str) -> bool:
    if place.host == host.lower() or place.host == address:
        return True
    try:
        return str(reached(address)) in {str(reached(one)) for one in _addresses(place.host, place.port)}
    except (OSError, UnicodeError):
        return False


def _raise_if(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise NotAllowed(refusal.message, refusal.setting)
