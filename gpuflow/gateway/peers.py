"""Who is at the other end of a request: its address, behind a proxy too, and the name by which it was asked. Pure.

A header that says who asks is believed from the proxies of GPUFLOW_TRUSTED_PROXIES, and refused from all others: behind
a proxy that the gateway does not know of, every client would look like a program of this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from gpuflow.gateway.problems import Problem

_FORWARDED: Final = frozenset({"forwarded", "x-real-ip"})
_FORWARDED_PREFIX: Final = "x-forwarded-"
#: One customer of a provider usually has so many bits of an IPv6 address.
_IPV6_PREFIX: Final = 64


class Peers:
    """Knows the trusted proxies."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """`trusted`: addresses or networks. Raises ValueError."""
        self._trusted = [ipaddress.ip_network(each) for each in trusted]

    def trusts(self, address: str) -> bool:
        """Say whether an address is that of a trusted proxy."""
        found = _parsed(address)
        return found is not None and any(found in each for each in self._trusted if each.version == found.version)

    def client_of(self, scope: Scope) -> str:
        """Return the address of who sent a request. Raises Problem for one that may not come in this way."""
        peer = str((scope.get("client") or ("",))[0])
        headers = Headers(scope=scope)
        if not self.trusts(peer):
            self._refuse_forwarded(headers, peer)
            self._refuse_other_names(headers, scope)
            return peer
        hops = [hop.strip() for line in headers.getlist("x-forwarded-for") for hop in line.split(",")]
        for hop in reversed(hops):
            if _parsed(hop) is None:
                raise Problem(400, "bad-header", "X-Forwarded-For of the proxy holds no list of addresses")
            if not self.trusts(hop):
                return hop
        return peer

    def _refuse_forwarded(self, headers: Headers, peer: str) -> None:
        for name in headers:
            if name in _FORWARDED or name.startswith(_FORWARDED_PREFIX):
                raise Problem(
                    403,
                    "forwarded",
                    f"the request has the header {name!r} of a proxy that this gateway does not know; if there is one, "
                    f"set GPUFLOW_TRUSTED_PROXIES to its address ({peer}) where the gateway runs",
                )

    def _refuse_other_names(self, headers: Headers, scope: Scope) -> None:
        """Refuse what a page of another name, which resolves to this machine, makes a browser of this machine send."""
        server = str((scope.get("server") or ("",))[0])
        if is_loopback(server) and not is_loopback(host_of(f"//{headers.get('host', '')}")):
            raise Problem(
                403,
                "not-from-here",
                "the request came to the loopback address of this machine under another name; call it as 127.0.0.1, or "
                "set GPUFLOW_TRUSTED_PROXIES to the address of the proxy that sent it",
            )


def group_of(address: str) -> str:
    """Return what is limited as one: an IPv4 address (also in IPv6 form), or the network of an IPv6 address."""
    found = _parsed(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
    return str(found) if found is not None else "unknown"


def host_of(url: str) -> str:
    """Return the host of a URL, an empty text where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or address of this machine's loopback."""
    found = _parsed(host)
    return host == "localhost" or (found is not None and found.is_loopback)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
