"""`/api/v1/tasks`: submit, list, look, cancel, retry, explain, and the log of a task.

Called by HTTP alone. Everything is read from the broker at each request; what blocks runs in the threads of `Calls`.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.explaining import explain_records
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import (
    idempotency_key,
    other_body,
    read_template,
    refuse_function_of,
    refuse_functions,
    same_work,
    template_of,
)
from gpuflow.gateway.documents import answers, body
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.paging import page
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller, owner_for
from gpuflow.gateway.shapes import Ended, ExplanationList, Submitted, TaskDetail, TaskPage
from gpuflow.handles import Task
from gpuflow.ledger.eventlog import EventCursor
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.spec import Template
from gpuflow.spec.report import line_text
from gpuflow.submission import id_for_key
from gpuflow.submission_checks import problems_at_submit
from gpuflow.tokens.rights import Grant

PREFIX: Final = "/api/v1/tasks"
#: An id of a task or pipeline; what is none of it names nothing.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LOG_EVENTS: Final = 10_000
_EXAMPLE: Final = {
    "taskType": "inference",
    "model": {"source": {"identifier": "Qwen/Qwen2.5-0.5B-Instruct"}},
    "data": {"type": "list", "items": ["What is a lease?"]},
    "inference": {"max_tokens": 64, "temperature": 0},
}

RecordId = Annotated[str, Path(description="An id, as it was given at the submit", examples=["6f1d4c1e"])]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most records of a page")]
Cursor = Annotated[str | None, Query(max_length=500, description="`next` of the page before")]
Owner = Annotated[str | None, Query(max_length=200, description="Only those of this owner")]
NameOf = Annotated[str | None, Query(max_length=200, description="Only those of this name")]
FailFast = Annotated[bool, Query(description="Refuse, with 409, what no live worker can serve")]
KEY_HEADER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    "description": "The same key again gives the first id and runs nothing",
}
TEMPLATE_TYPES: Final = ("application/json", "application/yaml")


def tasks_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of tasks."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(gatekeeper)], tags=["tasks"])

    @router.post(
        "",
        status_code=201,
        response_model=Submitted,
        summary="Submit a task",
        responses=answers(409, 413, 415, 422),
        openapi_extra={**body(_EXAMPLE, *TEMPLATE_TYPES), "parameters": [KEY_HEADER]},
    )
    async def submit_task(request: Request, caller: Caller, fail_fast: FailFast = False) -> Any:
        """Submit one task: its spec, or a template with one task, as JSON or YAML.

        Every mistake is listed at once, and nothing is written then. With `Idempotency-Key` a repeated request gives
        the first id; with another body under the same key it is 409.
        """
        key, text = idempotency_key(request), await template_of(request)
        return await calls.run(lambda app: _submit(app, text, key, fail_fast, caller))

    @router.get("", response_model=TaskPage, summary="List tasks", responses=answers())
    async def list_tasks(
        caller: Caller,
        limit: Limit = 50,
        cursor: Cursor = None,
        state: Annotated[TaskState | None, Query(description="Only those in this state")] = None,
        owner: Owner = None,
        name: NameOf = None,
    ) -> JSONResponse:
        """List tasks, the newest first. A page with filters may hold fewer than `limit`; the last has `next` null."""

        def wanted(record: TaskRecord) -> bool:
            return (
                (state is None or record.state is state)
                and (owner is None or record.owner == owner)
                and (name is None or record.name == name)
                and caller.sees(record.owner)
            )

        def listed(app: GPUFlow) -> dict[str, Any]:
            ledger = app.ledger
            scoped = caller.scope is not None
            found, after = page(app.redis, app.keys.tasks, cursor, limit, ledger.find_many, wanted, scoped=scoped)
            return {"tasks": [record.public() for record in ledger.as_seen(found)], "next": after}

        return JSONResponse(await calls.run(listed))

    @router.get("/{id}", response_model=TaskDetail, summary="Show a task", responses=answers(404))
    async def show_task(id: RecordId, caller: Caller) -> JSONResponse:
        """Show a task: state, progress, error, how its attempts went, and the result where it has succeeded.

        Large fields of a result are references; `responses.json` of the task's results holds all of it.
        """

        def shown(app: GPUFlow) -> dict[str, Any]:
            task = handle(app, id, caller)
            record = task.record()
            attempts = [entry.public() for entry in task.attempts()]
            return {**record.public(), "result": record.result, "attempts": attempts}

        return JSONResponse(await calls.run(shown))

    @router.delete(
        "/{id}",
        response_model=Ended,
        summary="Cancel a task",
        responses={**answers(404), 202: {"model": Ended, "description": "Its worker stops it now."}},
    )
    async def cancel_task(id: RecordId, caller: Caller) -> JSONResponse:
        """Cancel a task. One that has ended is left as it is."""
        outcome = await calls.run(lambda app: handle(app, id, caller, to_steer=True).cancel())
        return JSONResponse({"id": id, "outcome": outcome}, status_code=202 if outcome == "requested" else 200)

    @router.post(
        "/{id}/retry", status_code=202, response_model=Ended, summary="Run an ended task again",
        responses=answers(404, 409),
    )  # fmt: skip
    async def retry_task(id: RecordId, caller: Caller) -> JSONResponse:
        """Queue a task again that has ended and has not succeeded."""

        def retried(app: GPUFlow) -> bool:
            task = handle(app, id, caller, to_steer=True)
            refuse_function_of(task.record(), app.settings.gateway_functions)
            return task.retry()

        if not await calls.run(retried):
            raise Problem(
                409, "nothing-to-retry", f"task {id} has not ended, or has succeeded; there is nothing to retry"
            )
        return JSONResponse({"id": id, "outcome": "queued"}, status_code=202)

    @router.get("/{id}/explain", response_model=ExplanationList, summary="Why it waits", responses=answers(404))
    async def explain_task(id: RecordId, caller: Caller) -> JSONResponse:
        """Explain why a task waits, or what runs it, worker by worker."""

        def explained(app: GPUFlow) -> list[dict[str, Any]]:
            record = handle(app, id, caller).record()
            sees = None if caller.scope is None else caller.sees
            return [one.to_dict() for one in explain_records(app, [record], sees=sees)]

        return JSONResponse({"explanations": await calls.run(explained)})

    @router.get(
        "/{id}/logs",
        response_class=PlainTextResponse,
        summary="The log of a task",
        responses=answers(404),
    )
    async def logs(id: RecordId, caller: Caller) -> PlainTextResponse:
        """Return the log lines of all attempts that the event stream still holds, as text."""

        def lines(app: GPUFlow) -> str:
            handle(app, id, caller).record()
            return log_text(app, id)

        return PlainTextResponse(await calls.run(lines))

    return router


def _submit(app: GPUFlow, text: str, key: str | None, fail_fast: bool, caller: Grant) -> dict[str, Any]:
    template = read_template(text)
    owner = owner_for(caller, template.owner)
    if fail_fast and key and app.ledger.find(id_for_key(owner, key)) is not None:
        fail_fast = False  # it was submitted before, and its answer was lost
    warnings = told(app, template, fail_fast)
    task = submit(template, idempotency_key=key, owner=owner, uploads=False, app=app)
    record = app.ledger.find(task.id) if key else None
    if record is not None and not (
        record.name == template.name and same_work(app, template, [record.spec], as_task=True)
    ):
        raise other_body(str(key))
    return submitted(PREFIX, task.id, "task", warnings)


def told(app: GPUFlow, template: Template, fail_fast: bool) -> list[str]:
    """Return what the submitter is to know: fields that are not used, and stages that no live worker can run.

    Raises Problem 403 for a function that nobody may call here.
    """
    refuse_functions(template, app.settings.gateway_functions)
    problems = problems_at_submit(app, template, fail_fast=fail_fast)
    return [line_text(template.source, warning) for warning in template.warnings] + problems


def submitted(prefix: str, id: str, kind: Literal["task", "pipeline"], warnings: list[str]) -> dict[str, Any]:
    """Return the answer to a submit."""
    url = f"{prefix}/{id}"
    return {"id": id, "kind": kind, "url": url, "events": f"{url}/events", "warnings": warnings}


def handle(app: GPUFlow, id: str, caller: Grant, *, to_steer: bool = False) -> Task:
    """Return the handle of a task. Raises Problem 404 where there is none, or none that the caller sees.

    `to_steer`: it is to be cancelled or retried. A run of merged calls may answer those of other owners, so for whoever
    sees one owner alone there is none to steer.
    """
    record = app.ledger.find(id) if _ID.fullmatch(id) else None
    if record is None or not caller.sees(record.owner) or (to_steer and record.is_run and caller.scope is not None):
        raise no_record("task", id)
    return Task(id, app)


def is_id(id: str) -> bool:
    """Whether a text may be the id of a record."""
    return _ID.fullmatch(id) is not None


def no_record(kind: str, id: str) -> Problem:
    """Return the answer for an id that names nothing."""
    return Problem(404, "unknown", f"no {kind} {id[:100]!r}; GET /api/v1/{kind}s lists those of this fleet")


def log_text(app: GPUFlow, id: str) -> str:
    """Return the log lines of a task that its stream holds."""
    cursor = EventCursor(app.event_log, [id])
    lines: list[str] = []
    while len(lines) < _LOG_EVENTS and (events := cursor.wait(0.001)):
        for event in events:
            text = _text_of(event.name, event.data)
            if text:
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.at))
                lines += [f"{at} {line}" for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def _text_of(name: str, data: Any) -> str:
    if name == "state":
        return f"state {data.get('state')}"
    if name in ("log", "worker"):
        return str(data.get("message") or data.get("line") or data.get("text") or "")
    return ""
