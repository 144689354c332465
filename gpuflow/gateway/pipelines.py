"""`/api/v1/pipelines`: submit, list, look, cancel and resume pipelines. Called by HTTP alone; see `tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit_pipeline
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import (
    idempotency_key,
    other_body,
    read_template,
    refuse_functions,
    same_work,
    template_of,
)
from gpuflow.gateway.documents import answers, body
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.paging import page
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller, owner_for
from gpuflow.gateway.shapes import Ended, PipelineDetail, PipelinePage, Submitted
from gpuflow.gateway.tasks import (
    KEY_HEADER,
    TEMPLATE_TYPES,
    Cursor,
    FailFast,
    Limit,
    NameOf,
    Owner,
    RecordId,
    is_id,
    no_record,
    submitted,
    told,
)
from gpuflow.handles import PipelineRun
from gpuflow.pipelines.records import PipelineRecord, PipelineState
from gpuflow.spec import Template
from gpuflow.submission import id_for_key
from gpuflow.tokens.rights import Grant

PREFIX: Final = "/api/v1/pipelines"
_EXAMPLE: Final = {
    "apiVersion": "gpuflow/v1",
    "metadata": {"name": "two"},
    "spec": {
        "stages": [
            {"name": "one", "spec": {"taskType": "echo", "echo": {"message": "hello"}}},
            {"name": "two", "spec": {"taskType": "echo", "echo": {"message": "${one.result.message}"}}},
        ]
    },
}


def pipelines_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of pipelines."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(gatekeeper)], tags=["pipelines"])

    @router.post(
        "",
        status_code=201,
        response_model=Submitted,
        summary="Submit a pipeline",
        responses=answers(409, 413, 415, 422),
        openapi_extra={**body(_EXAMPLE, *TEMPLATE_TYPES), "parameters": [KEY_HEADER]},
    )
    async def submit_one(request: Request, caller: Caller, fail_fast: FailFast = False) -> Any:
        """Submit a template with stages, or one task as a pipeline of one stage. Mistakes and keys as for tasks."""
        key, text = idempotency_key(request), await template_of(request)
        return await calls.run(lambda app: submit_template(app, read_template(text), key, fail_fast, caller))

    @router.get("", response_model=PipelinePage, summary="List pipelines", responses=answers())
    async def list_pipelines(
        caller: Caller,
        limit: Limit = 50,
        cursor: Cursor = None,
        state: Annotated[PipelineState | None, Query(description="Only those in this state")] = None,
        owner: Owner = None,
        name: NameOf = None,
        label: Annotated[
            str | None, Query(max_length=300, description="Only those whose metadata.labels have it: team=nlp")
        ] = None,
    ) -> JSONResponse:
        """List pipelines, the newest first; pages as those of tasks."""

        def wanted(record: PipelineRecord) -> bool:
            return (
                (state is None or record.state is state)
                and (owner is None or record.owner == owner)
                and (name is None or record.name == name)
                and (label is None or _has_label(record, label))
                and caller.sees(record.owner)
            )

        def listed(app: GPUFlow) -> dict[str, Any]:
            scoped = caller.scope is not None
            found, after = page(
                app.redis, app.keys.pipelines, cursor, limit, app.pipelines.find_many, wanted, scoped=scoped
            )
            return {"pipelines": [record.public() for record in found], "next": after}

        return JSONResponse(await calls.run(listed))

    @router.get("/{id}", response_model=PipelineDetail, summary="Show a pipeline", responses=answers(404))
    async def show(id: RecordId, caller: Caller) -> JSONResponse:
        """Show a pipeline with its stages and their tasks."""
        return JSONResponse(await calls.run(lambda app: run_of(app, id, caller).status()))

    @router.delete("/{id}", response_model=Ended, summary="Cancel a pipeline", responses=answers(404))
    async def cancel(id: RecordId, caller: Caller) -> JSONResponse:
        """Cancel all of a pipeline that has not ended."""
        ended = await calls.run(lambda app: run_of(app, id, caller).cancel())
        return JSONResponse({"id": id, "outcome": "cancelled" if ended else "final"})

    @router.post(
        "/{id}/resume", status_code=202, response_model=Ended, summary="Run what is not done", responses=answers(404)
    )
    async def resume(id: RecordId, caller: Caller) -> JSONResponse:
        """Go on with a pipeline that has ended: `resumed`, `running` (not ended yet) or `succeeded` (all done)."""

        def resumed(app: GPUFlow) -> str:
            run = run_of(app, id, caller)
            refuse_functions(Template.from_dict(app.pipelines.get(id).template), app.settings.gateway_functions)
            return run.resume()

        outcome = await calls.run(resumed)
        return JSONResponse({"id": id, "outcome": outcome}, status_code=202)

    return router


def submit_template(
    app: GPUFlow, template: Template, key: str | None, fail_fast: bool, caller: Grant
) -> dict[str, Any]:
    """Submit a template as a pipeline. Raises Problem 409 for a key of other work, and the errors of a submit."""
    owner = owner_for(caller, template.owner)
    if fail_fast and key and app.pipelines.find(id_for_key(owner, key, pipeline=True)) is not None:
        fail_fast = False  # it was submitted before, and its answer was lost
    warnings = told(app, template, fail_fast)
    run = submit_pipeline(template, idempotency_key=key, owner=owner, uploads=False, app=app)
    record = app.pipelines.find(run.id) if key else None
    if record is not None:
        kept = Template.from_dict(record.template)
        same = (record.name, graph_of(kept)) == (template.name, graph_of(template))
        if not same or not same_work(app, template, [stage.spec for stage in kept.stages], as_task=False):
            raise other_body(str(key))
    return submitted(PREFIX, run.id, "pipeline", warnings)


def run_of(app: GPUFlow, id: str, caller: Grant) -> PipelineRun:
    """Return the handle of a pipeline. Raises Problem 404 where there is none, or none that the caller sees."""
    record = app.pipelines.find(id) if is_id(id) else None
    if record is None or not caller.sees(record.owner):
        raise no_record("pipeline", id)
    return PipelineRun(id, app)


def _has_label(record: PipelineRecord, label: str) -> bool:
    name, separator, value = label.partition("=")
    if not name:
        raise Problem(400, "bad-label", "label takes NAME=VALUE, or NAME for any value")
    metadata = record.template.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return isinstance(labels, Mapping) and name in labels and (not separator or str(labels[name]) == value)


def graph_of(template: Template) -> list[Any]:
    """Return what makes two templates with the same specs different work: names, order, matrices, conditions."""
    return [[one.name, list(one.depends_on), one.matrix or None, one.condition] for one in template.stages]
