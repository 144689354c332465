"""What every request passes before the routes: where it comes from, how many its sender has open, how fast its body
comes, and one line of the access log when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.gateway import problems
from gpuflow.gateway.peers import Peers, group_of
from gpuflow.gateway.problems import Problem
from gpuflow.logs import get_logger

#: A body may be slower than the floor for so long, in seconds, counted while the gateway waits for it.
PATIENCE_SECONDS: Final = 30.0
#: The floor of the rate at which a body comes, in bytes per second.
FLOOR_BYTES_PER_SECOND: Final = 512
#: Nothing at all for so long ends a request, in seconds; routes may be stricter.
SILENCE_SECONDS: Final = 60.0
_MOST_PATH: Final = 200
#: What asks whether the gateway is well, every few seconds.
_HEALTH: Final = ("/health", "/healthz")
_PER_ADDRESS: Final = "GPUFLOW_GATEWAY_MAX_CONNECTIONS_PER_ADDRESS"

#: Says whether the answer to a request has begun.
Answered = Callable[[], bool]

_log = get_logger("gpuflow.access")


class Doors:
    """The middleware; `most_per_address` bounds the requests that one client has open, behind a proxy too."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        peers: Peers,
        most_per_address: int,
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._app = app
        self._peers = peers
        self._most_per_address = most_per_address
        self._patience_seconds = patience_seconds
        self._silence_seconds = silence_seconds
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it by a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._serve(scope, receive, noting, lambda: status != 0)
        finally:
            _tell(scope, status, time.monotonic() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, answered: Answered) -> None:
        try:
            client = self._peers.client_of(scope)
        except Problem as problem:
            await problems.answer(problem)(scope, receive, send)
            return
        scope["client"] = (client, (scope.get("client") or ("", 0))[1])
        key = group_of(client)
        if self._open[key] >= self._most_per_address:
            detail = f"{client} has {self._open[key]} requests open; come again, or raise {_PER_ADDRESS}"
            await problems.answer(Problem(429, "too-many-requests", detail, {"Retry-After": "1"}))(scope, receive, send)
            return
        self._open[key] += 1
        try:
            await self._app(scope, self._paced(receive, answered), send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _paced(self, receive: Receive, answered: Answered) -> Receive:
        """Return `receive` with a floor under the rate of the body. It raises Problem 408."""
        waited, came, whole = 0.0, 0, False

        async def paced() -> Message:
            nonlocal waited, came, whole
            if whole or answered():
                return await receive()  # now it tells of the client's end alone
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._silence_seconds):
                    message = await receive()
            except TimeoutError:
                raise Problem(408, "silent", f"nothing came for {self._silence_seconds:g} s; send it again") from None
            waited += time.monotonic() - began
            came += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if not whole and waited > self._patience_seconds and came < waited * FLOOR_BYTES_PER_SECOND:
                detail = f"the body comes with less than {FLOOR_BYTES_PER_SECOND} bytes per second; send it faster"
                raise Problem(408, "too-slow", detail, {"Connection": "close"})
            return message

        return paced


def _tell(scope: Scope, status: int, seconds: float) -> None:
    """Write the line of the access log; checks of health only with LOG_LEVEL=DEBUG."""
    path = quote(str(scope.get("path", "")), safe="/:@!$&'()*+,;=~-._%")[:_MOST_PATH]
    client = str((scope.get("client") or ("",))[0])
    say = _log.debug if path in _HEALTH else _log.info
    say("request", method=scope.get("method"), path=path, status=status, client=client, seconds=round(seconds, 3))
