"""`gpuflow.explain()`: why a task waits, or what would become of a template. Reads the fleet; writes nothing.

The answer itself is made by `gpuflow.routing.explain`. Used by the command line, by the checks at submit, and from
Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.uploads import checked_uploads, upload_checks
from gpuflow.broker.priorities import DEFAULT_PRIORITY
from gpuflow.celery_app import GPUFlow
from gpuflow.celery_app import app as default_app
from gpuflow.errors import GPUFlowError, UnknownTask
from gpuflow.fleet.queue_rows import queue_rows
from gpuflow.fleet.queue_views import next_tasks, queue_view
from gpuflow.fleet.registry import Fleet
from gpuflow.fleet.worker_views import worker_views
from gpuflow.handles import reachable
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.affinity import limit_seconds
from gpuflow.routing.explain import Explanation
from gpuflow.routing.explain import explain as explain_task
from gpuflow.routing.offers import Offers, asked_name, is_function, secrets_asked
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.routing.session_names import session_name
from gpuflow.routing.views import QueueView, TaskView, WorkerView
from gpuflow.spec import Template
from gpuflow.submission import LIGHT_TYPES, choose_requirements, with_declared_resources
from gpuflow.templates import parse

#: How a task of another owner is named.
_OTHER: Final = "another task"
Source = str | os.PathLike[str] | Mapping[str, Any] | Template


def explain(source: Source, *, app: GPUFlow | None = None) -> list[Explanation]:
    """Explain every task of a run that was submitted (`source` is its id), or of a template that was not.

    `print("\\n".join(explanation.to_lines()))` shows one to people, `to_dict()` gives it to programs. Raises
    UnknownTask, InvalidTemplate, BrokerUnavailable.
    """
    app = app or default_app
    with reachable():
        if isinstance(source, str) and not Path(source).exists():
            records = find_records(app, source)
            if records:
                return explain_records(app, records)
        return explain_template(app, _template(source))


def find_records(app: GPUFlow, record_id: str) -> list[TaskRecord]:
    """Return the tasks of a pipeline or task; empty when there is no such id."""
    pipeline = app.pipelines.find(record_id)
    if pipeline is None:
        ids = [record_id]
    else:
        ids = [task for stage in pipeline.stages.values() for task in stage.tasks]
    return app.ledger.as_seen(app.ledger.find_many(ids))


def explain_records(
    app: GPUFlow, records: Sequence[TaskRecord], *, sees: Callable[[str], bool] | None = None
) -> list[Explanation]:
    """Explain tasks that were submitted. `sees` says of owners whether their tasks may be named; None: all may."""
    now = server_time(app)
    workers = worker_views(Fleet(app.redis, app.keys), app.ledger, now)
    if sees is not None:
        workers = _without_others(app, workers, sees)
    found = []
    for record in _as_run(app, records):
        waits = str(record.state) in ("PENDING", "QUEUED")
        queue = queue_view(app.redis, app.keys, app.ledger, record.queue, record.id if waits else "", now)
        ask = Requirement.from_dict(record.requirement or {})
        found.append(explain_task(ask, _task_view(app, record, workers, now), queue, workers))
    return found


def _without_others(app: GPUFlow, workers: Sequence[WorkerView], sees: Callable[[str], bool]) -> list[WorkerView]:
    """Return the workers without names and ids of tasks whose owner is not to be seen."""
    reserved = [worker.reservation for worker in workers if worker.reservation is not None]
    ids = sorted({task.id for worker in workers for task in worker.tasks} | {one.task for one in reserved})
    own = {record.id for record in app.ledger.find_many(ids) if record is not None and sees(record.owner)}
    return [
        replace(
            worker,
            tasks=tuple(task if task.id in own else replace(task, id=_OTHER, name="") for task in worker.tasks),
            reservation=worker.reservation
            if worker.reservation is None or worker.reservation.task in own
            else replace(worker.reservation, task=_OTHER, name=""),
        )
        for worker in workers
    ]


def _as_run(app: GPUFlow, records: Sequence[TaskRecord]) -> list[TaskRecord]:
    """Return the run of merged calls in place of each task that waits for one, under the task's name."""
    ids = [record.run if record.state is TaskState.MERGED and record.run else record.id for record in records]
    found = {record.id: record for record in app.ledger.as_seen(app.ledger.find_many(ids))}
    return [replace(found.get(id, record), name=record.name) for id, record in zip(ids, records, strict=True)]


def explain_queues(app: GPUFlow) -> list[dict[str, Any]]:
    """Return every queue (`fleet.queue_rows`) with `why`: the verdict on the task that is next in it; None where
    nothing waits, or it is not known. Read-only.
    """
    now = server_time(app)
    fleet = Fleet(app.redis, app.keys)
    entries, _ = fleet.readable()
    rows = queue_rows(app.redis, app.keys, app.settings.task_topic, entries)
    waiting = [row for row in rows if row["waiting"]]
    workers = worker_views(fleet, app.ledger, now, entries) if waiting else []
    heads = next_tasks(app.redis, app.keys, [row["name"] for row in waiting])
    records = dict(zip(heads, app.ledger.find_many(list(heads.values())), strict=True)) if heads else {}
    for row in rows:
        row["why"] = None
        if not row["waiting"]:
            continue
        queue = QueueView(name=row["name"], depth=row["waiting"])
        record = records.get(row["name"])
        if record is not None and row["requirement"] is not None:
            try:
                ask = Requirement.from_dict(record.requirement or row["requirement"])
            except (GPUFlowError, KeyError, TypeError, ValueError):
                continue  # of a newer version
            row["why"] = explain_task(ask, _task_view(app, record, workers, now), queue, workers).verdict
        elif not row["workers"]:
            row["why"] = "no worker that takes work serves this queue"
    return rows


def explain_template(app: GPUFlow, template: Template) -> list[Explanation]:
    """Explain what would become of the tasks of a template."""
    template = with_declared_resources(template, app)
    now = server_time(app)
    workers = worker_views(Fleet(app.redis, app.keys), app.ledger, now)
    found = []
    for stage in template.stages:
        resources, is_whole = _known_resources(stage.spec)
        ask = choose_requirements(app, resources, light=stage.task_type in LIGHT_TYPES)[0]
        queue = queue_view(app.redis, app.keys, app.ledger, ask.queue_name(), "", now)
        task = TaskView(
            name=stage.name,
            executor=asked_name(stage.spec),
            secrets=secrets_asked(stage.spec),
            priority=_priority(stage.spec),
            limit_seconds=limit_seconds(stage.spec),
            ahead_of=_ahead_of(app, queue.name, workers),
        )
        found.append(_as_known(explain_task(ask, task, queue, workers), is_whole))
    return found


def _known_resources(spec: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return what of `resources` is known before the stages that it refers to have ended, and whether that is all."""
    given = spec.get("resources") or {}
    if "${" not in str(given):
        return given, True
    known = {}
    for name, value in given.items():
        kept = {key: one for key, one in value.items() if "${" not in str(one)} if isinstance(value, Mapping) else value
        if kept and "${" not in str(kept):
            known[name] = kept
    return known, False


def _as_known(found: Explanation, is_whole: bool) -> Explanation:
    if is_whole:
        return found
    return replace(found, verdict=f"{found.verdict}; its resources refer to results, and are known when it starts")


def explain_here(template: Template, worker: WorkerView) -> list[Explanation]:
    """Explain a template on one machine, without a fleet: functions are none of it, unless `--include` brings them."""
    found = []
    without_functions = replace(worker, offers=Offers(), gpu_offers=None)
    for stage in template.stages:
        wants_gpu = bool(worker.capability.gpus) and stage.task_type not in LIGHT_TYPES
        resources, is_whole = _known_resources(stage.spec)
        ask = requirement_from_resources(resources, gpu_available=wants_gpu)[0]
        task = TaskView(name=stage.name, executor=asked_name(stage.spec), secrets=secrets_asked(stage.spec))
        here = without_functions if is_function(task.executor) else worker
        found.append(_as_known(explain_task(ask, task, QueueView(name=ask.queue_name()), [here]), is_whole))
    return found


def server_time(app: GPUFlow) -> float:
    """Return the time of the broker, in Unix seconds."""
    client: Any = app.redis
    seconds, micros = client.time()
    return float(seconds) + float(micros) / 1e6


def _template(source: Source) -> Template:
    if isinstance(source, Template):
        checked_uploads(source)
        return source
    if isinstance(source, str) and _looks_like_id(source) and not Path(source).exists():
        raise UnknownTask(f"no task or pipeline {source!r}; `gpuflow status` lists those of this fleet")
    if isinstance(source, Mapping) and "taskType" in source:
        source = {"apiVersion": "gpuflow/v1", "kind": "Task", "spec": source}
    return parse(source, more=upload_checks(source))


def _looks_like_id(text: str) -> bool:
    return len(text) == 36 and text.count("-") == 4


def _task_view(app: GPUFlow, record: TaskRecord, workers: Sequence[WorkerView], now: float) -> TaskView:
    client: Any = app.redis
    avoids, until, alternatives = client.hmget(app.keys.task(record.id), "avoid_worker", "avoid_until", "alternatives")
    queues = [one["queue"] for one in json.loads(alternatives)] if alternatives else [record.queue]
    return TaskView(
        id=record.id,
        name=record.name,
        state=str(record.state),
        executor=asked_name(record.runs) if record.spec.get("taskType") else record.task_type,
        secrets=secrets_asked(record.spec),
        attempt=record.attempt,
        priority=_priority(record.spec),
        wait_seconds=None if record.not_before is None else record.not_before - now,
        avoids=avoids or None,
        avoid_seconds=float(until) - now if until else None,
        worker=record.worker,
        record_schema=record.schema,
        session=session_name(record.spec, queues),
        running_seconds=None if record.started_at is None else max(0.0, now - record.started_at),
        limit_seconds=limit_seconds(record.spec),
        ahead_of=_ahead_of(app, record.queue, workers),
    )


def _ahead_of(app: GPUFlow, queue: str, workers: Sequence[WorkerView]) -> frozenset[str]:
    """Return the queues with tasks that machines are reserved for, as far as `queue` goes before them."""
    reserved = sorted({worker.reservation.queue for worker in workers if worker.reservation is not None})
    if not reserved:
        return frozenset()
    pipe: Any = app.redis.pipeline(transaction=False)
    for name in (queue, *reserved):
        pipe.zrank(app.keys.ready, name)
    place, *places = (float("inf") if rank is None else rank for rank in pipe.execute())
    return frozenset(name for name, its in zip(reserved, places, strict=True) if place < its)


def _priority(spec: Mapping[str, Any]) -> int:
    priority = spec.get("priority")
    return priority if isinstance(priority, int) else DEFAULT_PRIORITY
