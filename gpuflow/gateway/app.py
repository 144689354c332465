"""Puts the HTTP API together. Called by `gpuflow gateway` and by tests; it reads no setting by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from anyio import to_thread
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.gateway import problems
from gpuflow.gateway.api import OF_RESULTS, Api
from gpuflow.gateway.audit import note_wrong_tokens
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.doors import Doors
from gpuflow.gateway.file_rights import FileRights
from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.metrics import metrics_router
from gpuflow.gateway.peers import Peers
from gpuflow.gateway.results import results_router
from gpuflow.gateway.retention import remove_old_results, remove_stale_parts
from gpuflow.gateway.revocation import EndRevoked, OpenRequests
from gpuflow.gateway.uploads import Limits, Uploads
from gpuflow.logs import get_logger
from gpuflow.secrets import Redactor, known
from gpuflow.settings import Settings
from gpuflow.traces.context import TRACEPARENT, continuing

log = get_logger("gpuflow.gateway")

_SWEEP_SECONDS: Final = 3600.0


def create_app(settings: Settings, *, limits: Limits | None = None, open_here: bool = False) -> FastAPI:
    """Return the API over the results folder of `settings`, which is made where it is missing. Raises OSError.

    `open_here`: without a token, it answers all programs of this machine; else nobody.
    From now on the token of the settings is hidden in what this process logs.
    """
    if settings.worker_token is not None:
        known.add(Redactor([settings.worker_token.get_secret_value()]))
    folder = ResultsFolder(settings.results_dir)
    uploads = Uploads(folder, limits or limits_of(settings))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(uploads, settings))
        noting = asyncio.create_task(note_wrong_tokens(gatekeeper.wrong_tokens, api.calls))
        try:
            yield
        finally:
            for task in (sweeping, noting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await requests.aclose()
            await api.aclose()

    app = FastAPI(
        title="gpuflow", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    problems.install(app)
    calls = Calls(settings)
    requests = OpenRequests(calls.still_valid)
    app.add_middleware(_Traced)
    app.add_middleware(EndRevoked, requests=requests)
    app.add_middleware(_Stopping)
    peers = Peers(settings.trusted_proxies)
    app.add_middleware(Doors, peers=peers, most_per_address=settings.gateway_max_connections_per_address)

    @app.get("/health", include_in_schema=False)
    @app.get("/healthz", summary="Whether it answers")
    async def healthz() -> dict[str, str]:
        """Say that the gateway answers."""
        return {"status": "ok"}

    gatekeeper = Gatekeeper(settings, find=calls.find_token, requests=requests, open_here=open_here)
    rights = FileRights(calls)
    app.include_router(results_router(folder, uploads, gatekeeper, rights), responses=OF_RESULTS)
    app.include_router(metrics_router(settings, gatekeeper), responses=OF_RESULTS)
    app.state.api = api = Api(app, settings, gatekeeper, calls)
    return app


def limits_of(settings: Settings) -> Limits:
    """Return what one gateway takes in, by the settings."""
    return Limits(max_file_bytes=settings.gateway_max_file_bytes, max_uploads=settings.gateway_max_uploads)


class _Traced:
    """Lets what a request submits continue the trace that its `traceparent` names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(TRACEPARENT, "") if scope["type"] == "http" else ""
        with continuing(given):
            await self._app(scope, receive, send)


class _Stopping:
    """Ends a request that the stop of the gateway cuts off by a problem instead of a traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http" or begun:
                raise
            detail = "the gateway stops; go on with it when it is there again"
            await problems.answer(problems.Problem(503, "stopping", detail, {"Retry-After": "1"}))(scope, receive, send)


async def _sweep(uploads: Uploads, settings: Settings) -> None:
    """Keep the results folder in order: the uploads' own parts, other stale parts, old results."""
    duties: tuple[Callable[[], object], ...] = (
        uploads.remove_old_parts,
        lambda: remove_stale_parts(settings),
        lambda: remove_old_results(settings),
    )
    while True:
        for duty in duties:
            try:
                await to_thread.run_sync(duty)
            except Exception:  # the next round comes in any case
                log.exception("sweep_stumbled")
        await asyncio.sleep(_SWEEP_SECONDS)
