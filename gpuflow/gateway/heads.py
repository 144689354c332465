"""HEAD for every address that has GET: the same answer without its body. The results service has a HEAD of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.gateway.results import PREFIX


class Heads:
    """Answers HEAD as GET would be answered. A stream that would not end sees `gpuflow.head` in its scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET", "gpuflow.head": True}, receive, without_body)
