"""Which addresses a task may reach through gpuflow's own requests. Pure: it judges names and addresses, resolves none.

Three rules, by the address that is connected to: metadata services and link-local addresses never; the broker never;
loopback and private addresses where the operator lists them (GPUFLOW_ALLOW_HOSTS) or has configured that very host.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gpuflow.policy.refusal import Refusal

SETTING: Final = "GPUFLOW_ALLOW_HOSTS"
#: What `gpuflow run` and `gpuflow up` list: the user of this machine is its operator.
LOCAL_NETWORKS: Final = (
    "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
)  # fmt: skip

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
#: Link-local addresses and the metadata services of clouds (AWS, GCP, Alibaba, Azure, Oracle) that are not.
_NEVER: Final[tuple[_Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128", "100.100.100.200/32",
        "168.63.129.16/32", "192.0.0.192/32",
    )
)  # fmt: skip
_NEVER_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
#: Addresses of IPv6 whose last 32 bits are the address of IPv4 that is reached (RFC 4291, 6052, 8215).
_LAST_32_BITS: Final = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))
_SITE_LOCAL: Final = ipaddress.IPv6Network("fec0::/10")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host of the operator's configuration, lower case, and its port."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str | None) -> Place | None:
        """Return the place of a URL, None for one without a host."""
        try:
            parts = urlsplit(url or "")
            host, port = parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)
        except ValueError:
            return None
        return cls(host=_plain(host), port=port) if host and port else None


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """What may be reached: `allowed` are names, globs and networks, `own` the operator's, `brokers` never."""

    allowed: tuple[str, ...] = ()
    own: tuple[Place, ...] = ()
    brokers: tuple[Place, ...] = ()

    def refusal(self, host: str, port: int, address: str, *, path: str = "") -> Refusal | None:
        """Say why a connection to `address`, which is what `host` stands for, is refused; None: it is not."""
        if (never := never_refusal(host, address, path=path)) is not None:
            return never
        found = reached(address)
        shown = _shown(host, address)
        if found.is_global and not found.is_multicast and not _is_site_local(found):
            return None
        if Place(host=_plain(host), port=port) in self.own or self._lists(host, found):
            return None
        return Refusal(
            path=path,
            setting=SETTING,
            message=(
                f"{shown} is an address of this machine or of a private network, which tasks do not reach; to allow "
                f"it, list it in {SETTING} of the worker"
            ),
        )

    def name_refusal(self, host: str, port: int, *, path: str = "") -> Refusal | None:
        """Judge a host by its name alone, for where somebody else resolves it (a proxy)."""
        name = _plain(host)
        literal = spelled_address(name)
        if literal is None and (name == "localhost" or name.endswith(".localhost")):
            literal = "127.0.0.1"
        if literal is None:
            literal = "8.8.8.8"  # any public address: only the name counts
        return self.refusal(host, port, literal, path=path)

    def broker_refusal(self, host: str, port: int, *, path: str = "") -> Refusal:
        """Return the refusal of what is the fleet's broker."""
        return Refusal(
            path=path, setting="", message=f"{host}:{port} is the broker of the fleet; no setting lets a task reach it"
        )

    def _lists(self, host: str, address: IPAddress) -> bool:
        name = _plain(host)
        for entry in self.allowed:
            network = _network(entry)
            if network is None:
                if fnmatch.fnmatchcase(name, _plain(entry)):
                    return True
            elif address.version == network.version and address in network:
                return True
        return False


def never_refusal(host: str, address: str, *, path: str = "") -> Refusal | None:
    """Say why a connection is refused whatever the operator lists; None: it is not."""
    if not (_is_never(reached(address)) or _plain(host) in _NEVER_NAMES):
        return None
    message = "is link-local or a metadata service of the machine; no setting lets a task reach it"
    return Refusal(path=path, setting="", message=f"{_shown(host, address)} {message}")


def _shown(host: str, address: str) -> str:
    return host if host == address else f"{host} ({address})"


def reached(address: str) -> IPAddress:
    """Return the address that is reached by one: that within an IPv6 address, where it carries one of IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found
    inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
    if inner is None and int(found) > 1 and any(found in network for network in _LAST_32_BITS):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    return inner or found


def spelled_address(host: str) -> str | None:
    """Return the address that a host spells in any way the system reads: 2130706433, 0177.1, [::1]; None for a name."""
    text = host.strip("[]")
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(text)) if text and text[0].isdigit() else None
    except (OSError, ValueError):
        return None


def _is_never(address: IPAddress) -> bool:
    return any(address.version == network.version and address in network for network in _NEVER)


def _is_site_local(address: IPAddress) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and address in _SITE_LOCAL


def _network(entry: str) -> _Network | None:
    try:
        return ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        return None


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
