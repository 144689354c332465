"""The OpenAPI document of the HTTP API, at `/openapi.json`, and the statuses that its routes share.

Routes give `responses=answers(404, ...)`: each such status is a problem. The document is for holders of the token, like
everything else.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gpuflow import __version__
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.openai_shapes import Chat, Completion, Embeddings
from gpuflow.gateway.problems import MEDIA_TYPE
from gpuflow.gateway.shapes import NewServed, NewUserToken, NewWorker, ProblemShape, QueueSubmit

_REF: Final = "#/components/schemas/{model}"
_MEANINGS: Final = {
    400: "The request cannot be read: a parameter, a header, or a body that is no JSON or UTF-8.",
    401: "There is no token, or it is not valid.",
    403: "The token may not do this; or the gateway has no token and answers its own machine alone.",
    404: "There is no such thing.",
    405: "The address has no such method; `Allow` names those that it has.",
    408: "The body came too slowly.",
    409: "It contradicts what there is already.",
    411: "The length of the body is missing.",
    412: "A condition of the request is not met.",
    413: "The body is too large.",
    415: "The type of the body cannot be read.",
    416: "The file has no such range.",
    422: "The body has mistakes; `errors` lists all of them.",
    429: "Too much at once; come again.",
    500: "The gateway failed; its log says why.",
    503: "The broker or the store is away, or the gateway stops; `Retry-After` says when to come again.",
    507: "The disk of the results is full.",
}
#: What any request with a token may be answered.
COMMON: Final = (400, 401, 403, 429, 500, 503)
#: Bodies that routes read by themselves.
_READ: Final[tuple[type[BaseModel], ...]] = (
    QueueSubmit,
    Chat,
    Completion,
    Embeddings,
    NewWorker,
    NewUserToken,
    NewServed,
)
_DESCRIPTION: Final = """
The HTTP API of a gpuflow fleet. Send a token as `Authorization: Bearer TOKEN`; what it may do is its role's. Errors
are problem+json (RFC 9457);
programs tell them apart by `type`.
"""


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of the problems that a route may answer, beside those of every route."""
    return {
        status: {
            "description": _MEANINGS[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemShape")}}},
        }
        for status in sorted({*COMMON, *statuses})
    }


def body(example: Any, *types: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the documentation of a body that a route reads by itself."""
    content = {kind: {"schema": schema or {"type": "object"}, "example": example} for kind in types}
    return {"requestBody": {"required": True, "content": content}}


def body_of_model(model: type[BaseModel]) -> dict[str, Any]:
    """Return the documentation of a JSON body that a route reads by itself as a model."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, gatekeeper: Gatekeeper) -> None:
    """Give the app its document. Called when every route is in place."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="gpuflow", version=__version__, description=_DESCRIPTION, routes=app.routes)
            components = made.setdefault("components", {})
            _, extra = models_json_schema(
                [(ProblemShape, "serialization"), *((model, "validation") for model in _READ)], ref_template=_REF
            )
            components.setdefault("schemas", {}).update(extra["$defs"])
            _without_fastapis_mistakes(made)
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "worker": {"type": "apiKey", "in": "header", "name": "X-Worker-Token"},
            }
            made["security"] = [{"bearer": []}, {"worker": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    router = APIRouter(dependencies=[Depends(gatekeeper)], include_in_schema=False)

    @router.get("/openapi.json")
    async def openapi(_: Request) -> JSONResponse:
        """Return the document."""
        return JSONResponse(json.loads(json.dumps(app.openapi())))

    app.include_router(router)


def _without_fastapis_mistakes(document: dict[str, Any]) -> None:
    """Take out the answer to bad parameters that FastAPI writes in by itself: here it is 400, a problem."""
    for methods in document["paths"].values():
        for operation in methods.values():
            if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
