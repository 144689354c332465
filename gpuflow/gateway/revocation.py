"""Ends requests that are open when their token is revoked, replaced or expires: streams, downloads, uploads.

`OpenRequests` looks every CHECK_SECONDS, in one round trip for all of them, while there are any. `EndRevoked` is the
middleware: it ends the request's task, and closes a stream of events in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.gateway import problems
from gpuflow.gateway.problems import Problem
from gpuflow.logs import get_logger
from gpuflow.tokens.rights import Grant

#: How often the tokens of open requests are looked at, in seconds.
CHECK_SECONDS: Final = 2.0
_HELD: Final = "gpuflow.held"

log = get_logger("gpuflow.gateway")


@dataclass(eq=False)
class Held:
    """One open request: its task, and for what its token stands once that is known."""

    task: asyncio.Task[Any] | None
    grant: Grant | None = None
    is_revoked: bool = field(default=False)


class OpenRequests:
    """The open requests with a token of the store. Used in one event loop."""

    def __init__(self, valid: Callable[[Sequence[Grant]], Awaitable[list[bool]]]) -> None:
        self._valid = valid
        self._held: set[Held] = set()
        self._watcher: asyncio.Task[None] | None = None

    def enter(self, scope: Scope, grant: Grant) -> None:
        """Watch the token of a request."""
        held = scope.get(_HELD)
        if not isinstance(held, Held) or not grant.digest:
            return
        held.grant = grant
        self._held.add(held)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    def leave(self, held: Held) -> None:
        """Forget a request that has ended."""
        self._held.discard(held)

    async def aclose(self) -> None:
        """Stop to look."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher

    async def _watch(self) -> None:
        while self._held:
            await asyncio.sleep(CHECK_SECONDS)
            grants = {held.grant.digest: held.grant for held in self._held if held.grant is not None}
            if not grants:
                continue
            try:
                answers = await self._valid(list(grants.values()))
            except Problem:
                continue  # the broker is away; streams of events end by that themselves
            except Exception:
                log.exception("tokens_not_looked_at")
                continue
            void = {digest for digest, valid in zip(grants, answers, strict=True) if not valid}
            for held in [one for one in self._held if one.grant is not None and one.grant.digest in void]:
                if not held.is_revoked and held.task is not None:
                    held.is_revoked = True
                    held.task.cancel()


class EndRevoked:
    """The middleware that ends a request whose token is void by now."""

    def __init__(self, app: ASGIApp, *, requests: OpenRequests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = Held(task=asyncio.current_task())
        scope[_HELD] = held
        begun: dict[str, Any] = {}

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.update(message)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not held.is_revoked or held.task is None:
                raise
            held.task.uncancel()
            await _end(begun, scope, receive, send)
        finally:
            self._requests.leave(held)


async def _end(begun: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
    """Say that the token is void: by a status, or by the end of what has begun."""
    if not begun:
        problem = Problem(401, "wrong-token", "the token was revoked while this was done")
        await problems.answer(problem)(scope, receive, send)
        return
    headers = {bytes(name).lower(): bytes(value) for name, value in begun.get("headers", ())}
    if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        await send({"type": "http.response.body", "body": b": the token is not valid any more\n\n", "more_body": False})
    # Any other answer breaks off: a client must not take a part for the whole.


__all__ = ["CHECK_SECONDS", "EndRevoked", "Held", "OpenRequests"]
