"""What users call: submit a task or a pipeline, watch it, get its result, cancel, retry, resume.

Everything is read from the records in Redis, so a handle works from any process (`gpuflow.get(id)`), and interrupting
a wait cancels nothing. Waiting uses the event streams; it neither holds a thread of yours nor needs a Celery worker
here. All of it also works inside a running event loop: the async forms run the waiting in a thread.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpuflow.artifacts.destination import data_store
from gpuflow.artifacts.large_values import refer_large, refer_large_matrix, refuse_large_arguments
from gpuflow.artifacts.references import References, is_reference
from gpuflow.artifacts.store import Store
from gpuflow.artifacts.task_access import client_hosts
from gpuflow.artifacts.upload_view import upload_bar
from gpuflow.artifacts.uploads import refuse_uploads, upload_checks, with_uploads
from gpuflow.broker.transport import RECORD_HEADER
from gpuflow.celery_app import GPUFlow
from gpuflow.celery_app import app as default_app
from gpuflow.errors import BrokerUnavailable, InvalidTemplate, UnknownTask
from gpuflow.handles import PipelineRun, StageView, Task, reachable
from gpuflow.logs import get_logger
from gpuflow.pipelines.controller import RECONCILE_TASK
from gpuflow.pipelines.records import new_pipeline_fields, signed_part
from gpuflow.pipelines.resolve import task_specs
from gpuflow.routing.families import CONTROL_QUEUE, call_of
from gpuflow.spec import Template
from gpuflow.submission import SPLIT, id_for_key, with_declared_resources
from gpuflow.submission_checks import warn_at_submit
from gpuflow.templates import parse
from gpuflow.traces.recording import of_submit

log = get_logger("gpuflow.client")

Source = str | os.PathLike[str] | Mapping[str, Any] | Template


def submit(
    source: Source,
    *,
    idempotency_key: str | None = None,
    owner: str | None = None,
    uploads: bool = True,
    fail_fast: bool = False,
    app: GPUFlow | None = None,
) -> Task:
    """Submit one task and return its handle. `source`: a task spec, a template, a path, or a shipped name.

    Files of `data.upload` are sent first, to the fleet's store; `uploads=False` refuses them, for a template that
    somebody else has written (an HTTP service must not send its own files). A warning is logged when no live worker
    can serve it; with `fail_fast` that is NoCapableWorker. Raises InvalidTemplate (nothing is written or sent then, nor
    with NoCapableWorker), ArtifactError, BrokerUnavailable.
    """
    app = app or default_app
    if isinstance(source, Mapping) and "taskType" in source:
        source = {"apiVersion": "gpuflow/v1", "kind": "Task", "spec": source}
    template = parse(source, more=upload_checks(source) if uploads else None)
    if template.is_pipeline:
        raise InvalidTemplate("the template has stages; submit it with submit_pipeline()")
    template = with_declared_resources(template, app)
    who = owner if owner is not None else template.owner
    task_id = _new_id(who, idempotency_key)
    repeated = fail_fast and idempotency_key is not None and _is_there(lambda: app.ledger.find(task_id))
    warn_at_submit(app, template, fail_fast=fail_fast and not repeated)
    if len(task_specs(template.stages[0], _no_upstream, _no_load)) > 1:
        raise InvalidTemplate(SPLIT)
    template = with_data(template, app, uploads)
    (spec,) = task_specs(template.stages[0], _no_upstream, _no_load)
    name, args, kwargs, options = call_of(spec)
    _until_sent(
        app,
        lambda: app.send_task(
            name,
            args,
            kwargs,
            **options,
            owner=who,
            title=template.name,
            labels=template.labels,
            task_id=task_id,
        ),
    )
    return Task(task_id, app)


def with_data(template: Template, app: GPUFlow, uploads: bool) -> Template:
    """Return the template with its local files and large inline data in the fleet's store. Sends nothing twice.

    With `uploads` False local files are refused. Raises InvalidTemplate, ArtifactError.
    """

    def store() -> Store | None:
        return data_store(app.settings, app.broker_address())

    if not uploads:
        refuse_uploads(template)
    sent = with_uploads(template, store, upload_bar)
    stages = tuple(
        replace(
            stage,
            spec=refer_large(stage.spec, store, at_dispatch=False),
            matrix=refer_large_matrix(stage.matrix, store),
        )
        for stage in sent.stages
    )
    return replace(sent, spec=refer_large(sent.spec, store, at_dispatch=False), stages=stages)


def _new_id(owner: str, idempotency_key: str | None, *, pipeline: bool = False) -> str:
    return id_for_key(owner, idempotency_key, pipeline=pipeline) if idempotency_key else str(uuid.uuid4())


def _is_there(find: Callable[[], object]) -> bool:
    """Whether a record is there: its submit is a repeat. False where the broker is away, which the submit tells."""
    try:
        with reachable():
            return find() is not None
    except BrokerUnavailable:
        return False


def _until_sent(app: GPUFlow, send: Callable[[], object]) -> None:
    """Send, again and again while the broker is away; what is sent twice under one id is written once.

    Raises BrokerUnavailable after `submit_timeout_seconds`.
    """
    deadline = time.monotonic() + app.settings.submit_timeout_seconds
    pause = 0.1
    while True:
        try:
            with reachable():
                send()
            return
        except BrokerUnavailable:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            log.debug("submit_waits_for_broker", seconds_left=round(left, 1))
            time.sleep(min(pause, left))
            pause = min(pause * 2, 2.0)


def _no_upstream(stage: str) -> Mapping[str, Any]:
    raise InvalidTemplate(f"a single task cannot refer to stage {stage!r}; submit a pipeline")


def _no_load(value: Any) -> Any:
    return value


def submit_pipeline(
    source: Source,
    *,
    idempotency_key: str | None = None,
    owner: str | None = None,
    uploads: bool = True,
    fail_fast: bool = False,
    app: GPUFlow | None = None,
) -> PipelineRun:
    """Submit a pipeline (or a single task as a pipeline of one stage) and return its handle.

    Files, `uploads` and `fail_fast` as in `submit`. Raises InvalidTemplate (nothing is written or sent then),
    NoCapableWorker, ArtifactError, BrokerUnavailable.
    """
    app = app or default_app
    template = with_declared_resources(parse(source, more=upload_checks(source) if uploads else None), app)
    who = owner if owner is not None else template.owner
    pipeline_id = _new_id(who, idempotency_key, pipeline=True)
    repeated = fail_fast and idempotency_key is not None and _is_there(lambda: app.pipelines.find(pipeline_id))
    warn_at_submit(app, template, fail_fast=fail_fast and not repeated)
    template = with_data(template, app, uploads)
    refuse_large_arguments(template)
    submission = of_submit(
        app.traces,
        pipeline_id,
        "",
        what="pipeline",
        attributes={"gpuflow.pipeline.id": pipeline_id, "gpuflow.owner": who},
    )
    fields = new_pipeline_fields(
        name=template.name, owner=who, template=template.to_dict(), traceparent=submission.traceparent
    )
    if app.signer is not None:
        part = signed_part(pipeline_id, name=template.name, owner=who, template=json.loads(fields["template"]))
        fields["signature"] = app.signer.sign("pipeline", part)
    header = {"kind": "pipeline", "id": pipeline_id, "fields": fields}
    _until_sent(
        app,
        lambda: app.send_task(
            RECONCILE_TASK,
            args=(pipeline_id,),
            queue=CONTROL_QUEUE,
            ignore_result=True,
            headers={RECORD_HEADER: header},
        ),
    )
    if app.traces is not None:
        app.traces.submitted(submission)
    return PipelineRun(pipeline_id, app)


def get(record_id: str, *, app: GPUFlow | None = None) -> Task | PipelineRun:
    """Return the handle of a task or pipeline by its id, from any process. Raises UnknownTask."""
    app = app or default_app
    with reachable():
        if app.pipelines.find(record_id) is not None:
            return PipelineRun(record_id, app)
        if app.ledger.find(record_id) is not None:
            return Task(record_id, app)
    raise UnknownTask(f"no task or pipeline {record_id!r}; `gpuflow status` lists those of this fleet")


def load_reference(value: Any, *, app: GPUFlow | None = None) -> Any:
    """Return what a reference `{"$artifact": ...}` stands for; of a result, a mapping with its fields loaded.

    Results that come by Celery's own `AsyncResult.get()` hold references where they are large; any other value comes
    back as it is. Raises ArtifactError.
    """
    references = References((app or default_app).settings, hosts=client_hosts((app or default_app).settings))
    return references.load(value) if is_reference(value) else references.fields(value)


__all__ = [
    "PipelineRun",
    "StageView",
    "Task",
    "get",
    "load_reference",
    "reachable",
    "submit",
    "submit_pipeline",
]
