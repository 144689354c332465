"""Who may call the HTTP API: holders of the fleet's token, of tokens of people, and of workers, each by their role.

A dependency of the routers. It compares in constant time, and says nothing of the token in any answer. A token of the
store costs one round trip, and none again for CACHE_SECONDS: so long a token that is revoked may open new requests.
"""

from __future__ import annotations

import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request

from gpuflow.audit.actors import act_as
from gpuflow.gateway.login import HOW_TO_MAKE_ONE
from gpuflow.gateway.peers import host_of, is_loopback
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.revocation import OpenRequests
from gpuflow.gateway.rights import keep_grant, needed
from gpuflow.gateway.wrong_tokens import WrongTokens
from gpuflow.settings import Settings
from gpuflow.tokens.rights import FLEET, Grant
from gpuflow.tokens.texts import Kind, TokenText, read_token

#: The header by which workers may send their token, where `Authorization` belongs to a proxy.
WORKER_HEADER: Final = "X-Worker-Token"
#: So long an answer of the store holds, in seconds.
CACHE_SECONDS: Final = 2.0
#: Tokens that are remembered.
_MOST_KNOWN: Final = 4096
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow"'}
_REFUSED: Final = {"WWW-Authenticate": 'Bearer realm="gpuflow", error="invalid_token"'}


Find = Callable[[TokenText], Awaitable[Grant | None]]


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What a request gives as its token."""

    text: bytes = field(repr=False)
    is_bearer: bool


class Gatekeeper:
    """Lets requests with a right token pass, where their role may do it. Raises Problem 401, 403, 429 or 503 else.

    `open_here`: without a token, answer every program of this machine, of whatever user. `find` returns what a token
    of the store stands for, None for one that is none. The token of the settings is that of the fleet: it may all.
    """

    def __init__(self, settings: Settings, *, find: Find, requests: OpenRequests, open_here: bool = False) -> None:
        self._open_here = open_here
        self.wrong_tokens = WrongTokens()
        self._find = find
        self._requests = requests
        self._known: OrderedDict[str, tuple[Grant, float]] = OrderedDict()
        token = settings.worker_token.get_secret_value() if settings.worker_token else ""
        self._token = token.encode("utf-8")

    async def __call__(self, request: Request) -> None:
        """Check one request, and remember for what its token stands."""
        if not self._token:
            if not self._open_here:
                raise Problem(403, "no-token-set", f"this gateway has no token and answers nobody; {HOW_TO_MAKE_ONE}")
            _only_from_here(request)
            self._admit(request, FLEET)
            return
        given = _given(request)
        if given is None:
            raise Problem(401, "no-token", "send the token of this gateway: Authorization: Bearer <token>", _CHALLENGE)
        grant = await self._grant_of(request, given)
        right = needed(request.method, getattr(request.scope.get("route"), "path", ""))
        if not grant.may(right):
            who = f"worker {grant.worker}" if grant.worker else f"a {grant.role}"
            raise Problem(403, "not-authorised", f"the token is of {who}, which may not do this; it needs: {right}")
        self._admit(request, grant)
        self._requests.enter(request.scope, grant)

    def _admit(self, request: Request, grant: Grant) -> None:
        """Keep what the request may do, and under whose name what it does stands in the audit log."""
        keep_grant(request, grant)
        act_as(_actor(grant, _address(request)))

    async def _grant_of(self, request: Request, given: _Given) -> Grant:
        """Return what a token stands for. Raises Problem 401 for a wrong one, 429 where its address is not heard.

        Of an address that has sent too many wrong tokens and no right one, the token of the settings is not heard, and
        those of the store are looked up at a bounded rate. What was not looked up is not counted as wrong.
        """
        address = _address(request)
        is_heard = not self.wrong_tokens.wait_seconds(address) or self.wrong_tokens.proven(address)
        if hmac.compare_digest(given.text, self._token):
            if not is_heard:
                raise self._too_many(address)
            grant: Grant | None = FLEET
        else:
            token = read_token(given.text.decode("latin-1"))
            if token is None or (token.kind is Kind.USER and not given.is_bearer):
                grant = None
            elif (grant := self._cached(token)) is None:
                if not is_heard and not self.wrong_tokens.may_look_up(address):
                    raise self._too_many(address)
                grant = await self._of_store(token)
        if grant is not None:
            self.wrong_tokens.note_right(address)
            return grant
        too_many = self.wrong_tokens.wait_seconds(address) > 0
        self.wrong_tokens.note_wrong(address, request.url.path)
        raise self._too_many(address) if too_many else wrong_token()

    def _cached(self, token: TokenText) -> Grant | None:
        """Return what a token stood for not longer than CACHE_SECONDS ago."""
        known = self._known.get(token.digest)
        return known[0] if known is not None and time.monotonic() < known[1] else None

    async def _of_store(self, token: TokenText) -> Grant | None:
        """Return what a token of the store stands for, and remember that for CACHE_SECONDS."""
        until = time.monotonic() + CACHE_SECONDS
        self._known.pop(token.digest, None)
        grant = await self._find(token)
        if grant is not None:
            self._known[token.digest] = grant, until
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return grant

    def _too_many(self, address: str) -> Problem:
        seconds = max(1, math.ceil(self.wrong_tokens.wait_seconds(address)))
        detail = f"{address} has sent too many wrong tokens; correct the token and come again in {seconds} s"
        return Problem(429, "too-many-wrong-tokens", detail, {"Retry-After": str(seconds)})


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _actor(grant: Grant, address: str) -> str:
    """Return who acts, as the audit log names it; the token of the fleet is anybody's who has it."""
    return f"{grant.actor} {address}" if grant.token_id or grant.worker else f"gateway:{address}"


def wrong_token() -> Problem:
    """Return the answer for a token that is not valid."""
    return Problem(401, "wrong-token", "the token is not valid for this gateway", _REFUSED)


def _given(request: Request) -> _Given | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return _Given(text=value.strip().encode("latin-1"), is_bearer=True)
    worker = request.headers.get(WORKER_HEADER, "").strip()
    return _Given(text=worker.encode("latin-1"), is_bearer=False) if worker else None


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
