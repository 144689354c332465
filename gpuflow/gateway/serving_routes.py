"""`/api/admin/models`: models that stay loaded, for operators. Called by HTTP alone."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import JSONResponse, Response

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import BrokerUnavailable, GPUFlowError, InvalidTemplate
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import model_of as body_model
from gpuflow.gateway.documents import answers, body_of_model
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.shapes import NewServed, Served, ServedList
from gpuflow.protocol import whole_text
from gpuflow.serving.asking import model_of
from gpuflow.serving.models import is_name, parts_of
from gpuflow.serving.replicas import Replicas
from gpuflow.serving.store import ServedModels

ModelName = Annotated[str, Path(description="Name of a served model; it may have slashes")]


def serving_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of served models."""
    router = APIRouter(prefix="/api/admin", dependencies=[Depends(gatekeeper)], tags=["admin"])

    @router.get("/models", response_model=ServedList, summary="List served models", responses=answers())
    async def list_served() -> JSONResponse:
        """List the models that stay loaded, and on which workers they are."""
        return JSONResponse({"models": await calls.run(_listed)})

    @router.post(
        "/models", status_code=201, response_model=Served, summary="Serve a model",
        responses=answers(409, 413, 422), openapi_extra=body_of_model(NewServed),
    )  # fmt: skip
    async def serve(request: Request) -> JSONResponse:
        """Keep a model loaded on a number of workers, or change that number."""
        ask = await body_model(request, NewServed)
        name = ask.name or ask.model

        def served(app: GPUFlow) -> dict[str, Any]:
            parts = parts_of(ask.model, embedding=ask.embedding, engine=ask.engine, accelerators=ask.accelerators)
            model = model_of(app, parts, name=name, replicas=ask.replicas, owner=ask.owner or "")
            try:
                ServedModels(app.redis, app.keys, app.signer).serve(model)
            except (InvalidTemplate, BrokerUnavailable):
                raise
            except GPUFlowError as error:
                raise Problem(409, "model-served", whole_text(str(error))) from None
            Replicas(app).reconcile(wait=True)
            found = [one for one in _listed(app) if one["name"] == name]
            if not found:
                raise Problem(409, "model-served", whole_text(f"model {name!r} was stopped meanwhile; serve it again"))
            return found[0]

        return JSONResponse(await calls.run(served), status_code=201)

    @router.delete("/models/{name:path}", status_code=204, summary="Serve a model no more", responses=answers(404))
    async def stop(name: ModelName) -> Response:
        """Let the replicas of a model go; calls that it is answering go on."""

        def stopped(app: GPUFlow) -> bool:
            done = is_name(name) and ServedModels(app.redis, app.keys, app.signer).stop(name)
            if done:
                Replicas(app).reconcile(wait=True)
            return done

        if not await calls.run(stopped):
            detail = f"no model {name[:100]!r} is served; GET /api/admin/models lists them"
            raise Problem(404, "unknown", whole_text(detail))
        return Response(status_code=204)

    return router


def _listed(app: GPUFlow) -> list[dict[str, Any]]:
    return [status.public() for status in Replicas(app).statuses()]
