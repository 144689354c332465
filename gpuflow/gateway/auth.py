"""Who may call the HTTP API: the holder of the token; without one nobody, or programs of this machine.

A dependency of the routers. It compares in constant time, and says nothing of the token in any answer.
"""

from __future__ import annotations

import hmac
import math
from typing import Final

from fastapi import Request

from gpuflow.audit.actors import act_as
from gpuflow.gateway.login import HOW_TO_MAKE_ONE
from gpuflow.gateway.peers import host_of, is_loopback
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.wrong_tokens import WrongTokens
from gpuflow.settings import Settings

#: The header by which workers may send their token, where `Authorization` belongs to a proxy.
WORKER_HEADER: Final = "X-Worker-Token"
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow"'}
_REFUSED: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow", error="invalid_token"'}


class Gatekeeper:
    """Lets requests with the right token pass. Raises Problem 401, 403 or 429 for all others.

    `open_here`: without a token, answer every program of this machine, of whatever user.
    """

    def __init__(self, settings: Settings, *, open_here: bool = False) -> None:
        self._open_here = open_here
        self.wrong_tokens = WrongTokens()
        token = settings.worker_token.get_secret_value() if settings.worker_token else ""
        self._token = token.encode("utf-8")

    async def __call__(self, request: Request) -> None:
        """Check one request."""
        if not self._token:
            if not self._open_here:
                raise Problem(403, "no-token-set", f"this gateway has no token and answers nobody; {HOW_TO_MAKE_ONE}")
            _only_from_here(request)
            act_as(f"gateway:{_address(request)}")
            return
        given = _given(request)
        if given is None:
            raise Problem(401, "no-token", "send the token of this gateway: Authorization: Bearer <token>", _CHALLENGE)
        self._limit(request, right=hmac.compare_digest(given, self._token))
        act_as(f"gateway:{_address(request)}")

    def _limit(self, request: Request, *, right: bool) -> None:
        """Raise for a wrong token, and for any from an address that has sent too many wrong ones and no right one."""
        address = _address(request)
        wait = self.wrong_tokens.wait_seconds(address)
        if right and (not wait or self.wrong_tokens.proven(address)):
            self.wrong_tokens.note_right(address)
            return
        if not right:
            self.wrong_tokens.note_wrong(address, request.url.path)
        if wait:
            seconds = math.ceil(wait)
            detail = f"{address} has sent too many wrong tokens; correct the token and come again in {seconds} s"
            raise Problem(429, "too-many-wrong-tokens", detail, {"Retry-After": str(seconds)})
        raise Problem(401, "wrong-token", "the token is not that of this gateway", _REFUSED)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _given(request: Request) -> bytes | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip().encode("latin-1")
    worker = request.headers.get(WORKER_HEADER, "").strip()
    return worker.encode("latin-1") if worker else None


def _only_from_here(request: Request) -> None:
    """Refuse what a web page makes a browser of this machine send: another host's name, or another site's page."""
    host = host_of(f"//{request.headers.get('host', '')}")
    origin = request.headers.get("origin")
    if not is_loopback(host) or (origin is not None and not is_loopback(host_of(origin))):
        raise Problem(
            403,
            "not-from-here",
            "this gateway has no token and answers programs of its own machine; "
            "call it as 127.0.0.1, or set GPUFLOW_WORKER_TOKEN where it runs",
        )
