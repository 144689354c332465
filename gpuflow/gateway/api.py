"""Puts the routes of the fleet into the HTTP API: tasks, pipelines, events, workers, queues, the document.

Called by `app.create_app`. `Api.stop` is for the server: it ends open streams when the gateway is to end.
"""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI

from gpuflow.broker.keys import Keys
from gpuflow.gateway import documents
from gpuflow.gateway.admin_routes import admin_router
from gpuflow.gateway.audit import audit_router
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.event_routes import events_router
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.fleet_routes import fleet_router
from gpuflow.gateway.heads import Heads
from gpuflow.gateway.openai_routes import openai_router
from gpuflow.gateway.pipelines import pipelines_router
from gpuflow.gateway.serving_routes import serving_router
from gpuflow.gateway.streams import Hub
from gpuflow.gateway.tasks import tasks_router
from gpuflow.settings import Settings

#: Statuses of the results service and of the metrics.
OF_RESULTS: Final = documents.answers(404, 408, 409, 411, 412, 413, 416, 422, 507)


class Api:
    """The routes of the fleet, and what they share."""

    def __init__(self, app: FastAPI, settings: Settings, gatekeeper: Gatekeeper, calls: Calls) -> None:
        self._hub: Hub | None = None
        self._settings = settings
        self.calls = calls
        app.include_router(tasks_router(self.calls, gatekeeper))
        app.include_router(pipelines_router(self.calls, gatekeeper))
        app.include_router(events_router(self.calls, self.hub, gatekeeper))
        app.include_router(fleet_router(self.calls, gatekeeper))
        app.include_router(audit_router(self.calls, gatekeeper))
        app.include_router(admin_router(self.calls, gatekeeper))
        app.include_router(serving_router(self.calls, gatekeeper))
        app.include_router(openai_router(settings, self.calls, self.hub, gatekeeper))
        app.add_middleware(Heads)
        documents.install(app, gatekeeper)

    def hub(self) -> Hub:
        """Return the hub of event streams; made in the loop that serves."""
        if self._hub is None:
            self._hub = Hub(
                lambda: self.calls.app.broker_address(),  # noqa: PLW0108  (the app is made when it is first needed)
                Keys(self._settings.key_prefix),
                most_readers=self._settings.gateway_max_streams,
            )
        return self._hub

    def stop(self) -> None:
        """End open event streams, with a hint when to come again."""
        if self._hub is not None:
            self._hub.stop()

    async def aclose(self) -> None:
        """Let go of the broker."""
        if self._hub is not None:
            await self._hub.aclose()
