"""Whether a broker runs on this machine, by its URL alone."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_here(broker_url: str) -> bool:
    """Say whether a broker runs on this machine: at a loopback address or a unix socket."""
    parts = urlsplit(broker_url)
    if parts.scheme not in ("redis", "rediss") or parts.hostname in (None, "localhost"):
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
