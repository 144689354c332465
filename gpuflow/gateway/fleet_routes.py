"""`/api/queue/submit`, `/api/workers` and `/api/queues`: shipped configurations by name, and the fleet.

Called by HTTP alone; see `tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.fleet.queue_rows import queue_rows
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.fleet.standing import public
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import idempotency_key, model_of, other_body, same_work
from gpuflow.gateway.documents import answers, body
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.pipelines import submit_template
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller, owner_for
from gpuflow.gateway.shapes import QueueList, QueueSubmit, Submitted, WorkerList, WorkerShape
from gpuflow.gateway.tasks import KEY_HEADER, RecordId, is_id, submitted, told
from gpuflow.gateway.tasks import PREFIX as TASKS
from gpuflow.spec import Template
from gpuflow.spec.presets import list_presets, load_preset
from gpuflow.templates import parse
from gpuflow.tokens.rights import Grant

#: What of a worker's load tells of the work of others.
_OF_OTHERS: Final = frozenset({"reservation", "sessions"})
_EXAMPLE = {"config_name": "quickstart", "target": "worker", "worker_labels": {"gpu_type": "a100*"}}


def fleet_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of the fleet."""
    router = APIRouter(prefix="/api", dependencies=[Depends(gatekeeper)], tags=["fleet"])

    @router.post(
        "/queue/submit",
        status_code=201,
        response_model=Submitted,
        summary="Submit a shipped configuration",
        responses=answers(404, 409, 413, 422),
        openapi_extra={
            **body(_EXAMPLE, "application/json", schema={"$ref": "#/components/schemas/QueueSubmit"}),
            "parameters": [KEY_HEADER],
        },
    )
    async def queue_submit(request: Request, caller: Caller) -> Any:
        """Submit a shipped pipeline by its name, for workers whose labels match."""
        key, ask = idempotency_key(request), await model_of(request, QueueSubmit)
        return await calls.run(lambda app: _submit(app, ask, key, caller))

    @router.get("/workers", response_model=WorkerList, summary="List workers", responses=answers())
    async def workers(
        caller: Caller,
        everyone: Annotated[bool, Query(alias="all", description="Also those that have gone")] = False,
    ) -> JSONResponse:
        """List the workers that are there, with what they can do and what they run."""

        def listed(app: GPUFlow) -> list[dict[str, Any]]:
            fleet = Fleet(app.redis, app.keys)
            known, _ = fleet.readable()
            return as_seen(app, [one for one in fleet.as_seen(known) if everyone or not one.is_gone], caller)

        return JSONResponse({"workers": await calls.run(listed)})

    @router.get("/workers/{id}", response_model=WorkerShape, summary="Show a worker", responses=answers(404))
    async def worker(id: RecordId, caller: Caller) -> JSONResponse:
        """Show all that is known of a worker."""

        def shown(app: GPUFlow) -> list[dict[str, Any]]:
            fleet = Fleet(app.redis, app.keys)
            found = fleet.find(id) if is_id(id) else None
            if found is None:
                raise Problem(404, "unknown", f"no worker {id[:100]!r}; GET /api/workers?all=true lists them")
            return as_seen(app, fleet.as_seen([found]), caller)

        return JSONResponse((await calls.run(shown))[0])

    @router.get("/queues", response_model=QueueList, summary="List queues", responses=answers())
    async def queues() -> JSONResponse:
        """List the queues: what each asks for, what waits, what runs, and who serves it."""
        rows = await calls.run(lambda app: queue_rows(app.redis, app.keys, app.settings.task_topic))
        return JSONResponse({"queues": rows})

    return router


def as_seen(app: GPUFlow, workers: Sequence[WorkerEntry], caller: Grant) -> list[dict[str, Any]]:
    """Return workers as the caller may see them: of one owner's callers, without others' tasks, models and waits."""
    shown = [public(worker) for worker in workers]
    if caller.scope is None:
        return shown
    ids = sorted({task for worker in workers for task in worker.tasks})
    own = {record.id for record in app.ledger.find_many(ids) if record is not None and caller.sees(record.owner)}
    for worker in shown:
        worker["tasks"] = [task for task in worker["tasks"] if task in own]
        worker["load"] = {name: value for name, value in worker["load"].items() if name not in _OF_OTHERS}
    return shown


def _submit(app: GPUFlow, ask: QueueSubmit, key: str | None, caller: Grant) -> dict[str, Any]:
    if ask.target == "local":
        found = [{"path": "target", "message": "a gateway runs nothing itself; use worker or auto, or `gpuflow run`"}]
        raise Problem(422, "invalid-body", "target local cannot be had here; `errors` says why", errors=found)
    names = list_presets("pipelines")
    if ask.config_name not in names:
        raise Problem(404, "unknown", f"no configuration {ask.config_name[:100]!r}; there are: {', '.join(names)}")
    template = parse(_labelled(load_preset("pipelines", ask.config_name), ask.worker_labels))
    if template.is_pipeline or any(stage.is_split for stage in template.stages):
        return submit_template(app, template, key, False, caller)
    return _submit_task(app, template, key, caller)


def _submit_task(app: GPUFlow, template: Template, key: str | None, caller: Grant) -> dict[str, Any]:
    warnings = told(app, template, fail_fast=False)
    task = submit(template, idempotency_key=key, owner=owner_for(caller, template.owner), uploads=False, app=app)
    record = app.ledger.find(task.id) if key else None
    if record is not None and not same_work(app, template, [record.spec], as_task=True):
        raise other_body(str(key))
    return submitted(TASKS, task.id, "task", warnings)


def _labelled(data: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a shipped template that asks for workers with these labels, in each of its stages."""
    if not labels:
        return data
    spec = _with_labels(data["spec"], labels)
    for places in (spec.get("stages"), (spec.get("graph") or {}).get("nodes")):
        for stage in places or ():
            if "resources" in (stage.get("spec") or {}):
                stage["spec"] = _with_labels(stage["spec"], labels)
    return {**data, "spec": spec}


def _with_labels(spec: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    resources = spec.get("resources") or {}
    return {**spec, "resources": {**resources, "labels": {**(resources.get("labels") or {}), **labels}}}
