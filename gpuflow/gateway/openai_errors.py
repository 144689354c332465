"""Errors of `/v1` in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from gpuflow.gateway.problems import Problem
from gpuflow.ledger.records import TaskRecord
from gpuflow.protocol import whole_text

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
#: Errors of a task that are the caller's: the message names the field.
_OF_THE_CALLER: Final = frozenset({"BadInput", "BadRequest", "InvalidTemplate"})


class OpenAIRoute(APIRoute):
    """A route whose problems are told in OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that does so."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except Problem as problem:
                return error_response(problem)

        return handled


def error_of(problem: Problem) -> dict[str, Any]:
    """Return the body that tells of a problem."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    first: Mapping[str, str] = problem.errors[0] if problem.errors else {}
    mistakes = "; ".join(f"{one['path']}: {one['message']}" for one in problem.errors[:10])
    message = whole_text(mistakes or problem.detail)
    return {"error": {"message": message, "type": kind, "param": first.get("path"), "code": problem.kind}}


def error_response(problem: Problem) -> JSONResponse:
    """Return the answer that tells of a problem."""
    status = 400 if problem.status == 422 else problem.status
    return JSONResponse(error_of(problem), status_code=status, headers=problem.headers)


def of_a_task(record: TaskRecord) -> Problem:
    """Return the problem of a task that has ended otherwise than well."""
    error = dict(record.error or {})
    message = str(error.get("message") or f"task {record.id} ended {record.state}")
    if error.get("type") in _OF_THE_CALLER:
        return Problem(400, "bad-input", whole_text(message))
    return Problem(500, "task-failed", whole_text(f"task {record.id}: {message}"), {"X-Task-Id": record.id})
