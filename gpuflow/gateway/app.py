"""Puts the HTTP API together. Called by `gpuflow gateway` and by tests; it reads no setting by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from anyio import to_thread
from fastapi import FastAPI

from gpuflow.gateway import problems
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.results import results_router
from gpuflow.gateway.uploads import Limits, Uploads
from gpuflow.settings import Settings

_SWEEP_SECONDS: Final = 3600.0


def create_app(settings: Settings, *, limits: Limits | None = None) -> FastAPI:
    """Return the API over the results folder of `settings`, which is made where it is missing. Raises OSError."""
    folder = ResultsFolder(settings.results_dir)
    uploads = Uploads(folder, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(uploads))
        try:
            yield
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping

    app = FastAPI(
        title="gpuflow", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    problems.install(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the gateway answers."""
        return {"status": "ok"}

    app.include_router(results_router(folder, uploads, Gatekeeper(settings)))
    return app


async def _sweep(uploads: Uploads) -> None:
    while True:
        await to_thread.run_sync(uploads.remove_old_parts)
        await asyncio.sleep(_SWEEP_SECONDS)
