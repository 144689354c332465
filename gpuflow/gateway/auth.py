"""Who may call the HTTP API: the holder of the token, or, where none is set, programs of this machine alone.

A dependency of the routers. It compares in constant time, and says nothing of the token in any answer.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final
from urllib.parse import urlsplit

from fastapi import Request

from gpuflow.gateway.problems import Problem
from gpuflow.settings import Settings

#: The header by which workers may send their token, where `Authorization` belongs to a proxy.
WORKER_HEADER: Final = "X-Worker-Token"
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow"'}
_REFUSED: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow", error="invalid_token"'}


class Gatekeeper:
    """Lets requests with the right token pass. Raises Problem 401 or 403 for all others."""

    def __init__(self, settings: Settings) -> None:
        token = settings.worker_token.get_secret_value() if settings.worker_token else ""
        self._token = token.encode("utf-8")

    async def __call__(self, request: Request) -> None:
        """Check one request."""
        if not self._token:
            _only_from_here(request)
            return
        given = _given(request)
        if given is None:
            raise Problem(401, "no-token", "send the token of this gateway: Authorization: Bearer <token>", _CHALLENGE)
        if not hmac.compare_digest(given, self._token):
            raise Problem(401, "wrong-token", "the token is not that of this gateway", _REFUSED)


def _given(request: Request) -> bytes | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip().encode("latin-1")
    worker = request.headers.get(WORKER_HEADER, "").strip()
    return worker.encode("latin-1") if worker else None


def _only_from_here(request: Request) -> None:
    """Refuse what a web page makes a browser of this machine send: another host's name, or another site's page."""
    host = _host_of(f"//{request.headers.get('host', '')}")
    origin = request.headers.get("origin")
    if not is_loopback(host) or (origin is not None and not is_loopback(_host_of(origin))):
        raise Problem(
            403,
            "not-from-here",
            "this gateway has no token and answers programs of its own machine alone; "
            "call it as 127.0.0.1, or set GPUFLOW_WORKER_TOKEN where it runs",
        )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or address of this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
