"""Which right each route needs, in one table, and whose work a request may see. Pure but for reading the request.

A route that is not listed needs the right of administrators, so that a forgotten line shuts it.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends, Request

from gpuflow.gateway.problems import Problem
from gpuflow.protocol import whole_text
from gpuflow.tokens.rights import Grant, Right

_TASKS: Final = "/api/v1/tasks"
_PIPELINES: Final = "/api/v1/pipelines"
_RESULTS: Final = "/api/v1/results"
_ADMIN: Final = "/api/admin"
#: (method, route) -> the right that it needs.
ROUTES: Final[dict[tuple[str, str], Right]] = {
    ("POST", _TASKS): Right.SUBMIT,
    ("GET", _TASKS): Right.READ,
    ("GET", f"{_TASKS}/{{id}}"): Right.READ,
    ("DELETE", f"{_TASKS}/{{id}}"): Right.SUBMIT,
    ("POST", f"{_TASKS}/{{id}}/retry"): Right.SUBMIT,
    ("GET", f"{_TASKS}/{{id}}/explain"): Right.READ,
    ("GET", f"{_TASKS}/{{id}}/logs"): Right.READ,
    ("GET", f"{_TASKS}/{{id}}/events"): Right.READ,
    ("POST", _PIPELINES): Right.SUBMIT,
    ("GET", _PIPELINES): Right.READ,
    ("GET", f"{_PIPELINES}/{{id}}"): Right.READ,
    ("DELETE", f"{_PIPELINES}/{{id}}"): Right.SUBMIT,
    ("POST", f"{_PIPELINES}/{{id}}/resume"): Right.SUBMIT,
    ("GET", f"{_PIPELINES}/{{id}}/events"): Right.READ,
    ("POST", "/api/queue/submit"): Right.SUBMIT,
    ("GET", "/api/workers"): Right.READ,
    ("GET", "/api/workers/{id}"): Right.READ,
    ("GET", "/api/queues"): Right.READ,
    ("GET", "/v1/models"): Right.READ,
    ("GET", "/v1/models/{name:path}"): Right.READ,
    ("POST", "/v1/chat/completions"): Right.SUBMIT,
    ("POST", "/v1/completions"): Right.SUBMIT,
    ("POST", "/v1/embeddings"): Right.SUBMIT,
    ("GET", "/metrics"): Right.READ_ALL,
    ("GET", "/openapi.json"): Right.ANY,
    ("GET", f"{_ADMIN}/workers"): Right.STEER,
    ("POST", f"{_ADMIN}/workers"): Right.ADMIN,
    ("DELETE", f"{_ADMIN}/workers/{{id}}"): Right.ADMIN,
    ("POST", f"{_ADMIN}/workers/{{id}}/drain"): Right.STEER,
    ("POST", f"{_ADMIN}/workers/{{id}}/enable"): Right.STEER,
    ("POST", f"{_ADMIN}/workers/{{id}}/disable"): Right.STEER,
    ("POST", f"{_ADMIN}/workers/{{id}}/token"): Right.ADMIN,
    ("GET", f"{_ADMIN}/models"): Right.STEER,
    ("POST", f"{_ADMIN}/models"): Right.STEER,
    ("DELETE", f"{_ADMIN}/models/{{name:path}}"): Right.STEER,
    ("GET", f"{_ADMIN}/audit"): Right.ADMIN,
    ("GET", f"{_ADMIN}/tokens"): Right.ADMIN,
    ("POST", f"{_ADMIN}/tokens"): Right.ADMIN,
    ("DELETE", f"{_ADMIN}/tokens/{{id}}"): Right.ADMIN,
    ("GET", _RESULTS): Right.FILES,
    **{
        (method, f"{_RESULTS}/{{task_id}}/files{name}"): Right.FILES
        for method in ("GET", "HEAD", "POST", "DELETE")
        for name in ("", "/{name:path}")
    },
}
_GRANT: Final = "gpuflow.grant"


def needed(method: str, route: str) -> Right:
    """Return the right that a route needs."""
    return ROUTES.get((method, route), Right.ADMIN)


def keep_grant(request: Request, grant: Grant) -> None:
    """Remember for what a request's token stands."""
    request.scope[_GRANT] = grant


async def grant_of(request: Request) -> Grant:
    """Return for what a request's token stands; the gatekeeper has let it in. It takes no thread."""
    found: Grant = request.scope[_GRANT]
    return found


#: The parameter of a route that asks who calls.
Caller = Annotated[Grant, Depends(grant_of)]


def owner_for(grant: Grant, named: str) -> str:
    """Return as whom work is submitted that names this owner ('': none). Raises Problem 403 for another's."""
    owner = grant.submits_as(named)
    if owner is None:
        detail = f"this token submits as {grant.scope}, not as {named[:100]}; leave metadata.owner out"
        raise Problem(403, "foreign-owner", whole_text(detail))
    return owner
