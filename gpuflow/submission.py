"""Turns a call into what is published: the queue of its requirement, and the record that travels with the message.

Called by the app's `send_task` alone. Everything is checked here, before anything is written.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpuflow import __version__
from gpuflow.artifacts.destination import data_store
from gpuflow.artifacts.large_arguments import ARGUMENTS, refer_arguments
from gpuflow.artifacts.large_values import refer_large
from gpuflow.broker.wire import MAPPING, portable
from gpuflow.errors import InvalidTemplate
from gpuflow.fleet.seen_fleet import SeenFleet
from gpuflow.functions.calls import given
from gpuflow.ledger.records import RECORD_SCHEMA, new_record_fields
from gpuflow.merge.keys import MergeKey, merge_key, plain_key
from gpuflow.protocol import FUNCTION_TYPE, is_safe_id, whole_text
from gpuflow.routing.affinity import hints
from gpuflow.routing.families import CELERYS, SPEC_OPTION, call_of, task_of
from gpuflow.routing.fit import match
from gpuflow.routing.offers import REPLICA_OF, asked_name, function_name
from gpuflow.routing.queue_names import queue_name
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import asks_gpus, requirement_from_resources, says_devices
from gpuflow.routing.session_names import function_session_name
from gpuflow.spec.function_section import is_function
from gpuflow.spec.overlay import deep_merge
from gpuflow.traces.context import TRACEPARENT
from gpuflow.traces.recording import Submission, of_submit

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.spec import Stage, Template

#: Namespace of ids made from idempotency keys: the same owner and key give the same id, in any process.
_IDEMPOTENCY: Final = uuid.UUID("6f1d4c1e-6a0b-5f0e-9b57-0f9f2f1f7f10")
_IDEMPOTENCY_OF_PIPELINES: Final = uuid.UUID("0b9a3f0e-5c1d-5d57-8f63-3c3f0a6a9d21")
#: Task types that need no GPU unless they ask for one.
LIGHT_TYPES: Final = frozenset({"echo", FUNCTION_TYPE})
#: Options of a Celery call that are its own: a call that has one is not merged.
_LIMITS: Final = frozenset({"countdown", "eta", "expires", "soft_time_limit", "time_limit"})
#: Refusal of one task whose data is to be split.
SPLIT: Final = (
    "spec.parallel (or resources.replicas) splits the data over several tasks; submit it with submit_pipeline(), which "
    "takes it as a pipeline of one stage, or leave it out"
)


@dataclass(frozen=True, kw_only=True)
class PublishableTask:
    """A call that is ready to be published."""

    task_id: str
    queue: str
    kwargs: dict[str, Any]
    summary: str
    header: dict[str, Any]
    submission: Submission


@dataclass(frozen=True, kw_only=True)
class PublishableFunction:
    """A call of a team's function by a template, ready to be published."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    queue: str
    header: dict[str, Any]
    submission: Submission


def id_for_key(owner: str, key: str, *, pipeline: bool = False) -> str:
    """Return the task or pipeline id that belongs to an idempotency key of one owner: each kind has keys of its own."""
    return str(uuid.uuid5(_IDEMPOTENCY_OF_PIPELINES if pipeline else _IDEMPOTENCY, f"{owner}\0{key}"))


def submission_header(
    app: GPUFlow, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any], options: dict[str, Any]
) -> PublishableTask:
    """Check the spec of a supervised task and describe its record. Takes our own entries out of `options`.

    Large inline data goes to the fleet's store, and a reference takes its place. Raises InvalidTemplate when the spec
    is not valid or names another family's task type, ArtifactError when the store fails.
    """
    from gpuflow.spec import canonical, shard_count

    given = kwargs.get("spec") if "spec" in kwargs else (args[0] if args else None)
    if not isinstance(given, Mapping):
        raise InvalidTemplate(f"{name} takes one argument, `spec`: a mapping with taskType; got {type(given).__name__}")
    spec = refer_large(canonical(given), lambda: data_store(app.settings, app.broker_address()))
    _refuse_uploads(spec)
    replica_of = options.pop("replica_of", None)
    if replica_of:
        spec = {**spec, REPLICA_OF: str(replica_of)}
    if shard_count(spec) > 1:
        raise InvalidTemplate(SPLIT)
    task_type = spec["taskType"]
    if task_of(task_type) != name:
        raise InvalidTemplate(f"{name} does not run taskType {task_type!r}; send it as {task_of(task_type)!r}")
    owner = options.pop("owner", None) or ""
    key = options.pop("idempotency_key", None)
    task_id = options.get("task_id") or (id_for_key(owner, key) if key else str(uuid.uuid4()))
    title = options.pop("title", None) or task_type
    pipeline, stage, labels = (options.pop(name, None) for name in ("pipeline", "stage", "labels"))
    alternatives = choose_requirements(app, spec.get("resources"), light=task_type in LIGHT_TYPES)
    requirement = alternatives[0]
    queue = options.pop("queue", None)
    queue_text = str(getattr(queue, "name", queue) or queue_name(requirement))
    if options.get("priority") is None:
        options["priority"] = spec.get("priority")
    submission = of_submit(
        app.traces,
        task_id,
        options.pop(TRACEPARENT, None) or (options.get("headers") or {}).get(TRACEPARENT) or "",
        what=task_type,
        attributes={"gpuflow.task.id": task_id, "gpuflow.task.type": task_type, "gpuflow.owner": owner},
    )
    fields = new_record_fields(
        name=title,
        task_type=task_type,
        spec=spec,
        requirement=requirement.to_dict(),
        owner=owner,
        pipeline=pipeline,
        stage=stage,
        labels=labels,
        traceparent=submission.traceparent,
    )
    if replica_of:
        fields["replica_of"] = str(replica_of)
    header = {
        "kind": "task",
        "id": task_id,
        "requirement": json.dumps(requirement.to_dict()),
        "hints": hints(spec, [queue_text] if queue is not None else [queue_name(one) for one in alternatives]),
        "fields": fields,
    }
    if len(alternatives) > 1 and queue is None:
        fields["alternatives"] = json.dumps(
            [{"queue": queue_name(one), "requirement": json.dumps(one.to_dict())} for one in alternatives]
        )
        header["fallback_seconds"] = fields["fallback_seconds"] = str(app.settings.fallback_seconds)
    if not _LIMITS & {name for name, value in options.items() if value is not None}:
        _note_call(app, spec, owner, queue_text, header, submission)
    return PublishableTask(
        task_id=task_id,
        queue=queue_text,
        kwargs={"spec": portable(spec)},
        summary=f"<{task_type}>",
        header=header,
        submission=submission,
    )


def _note_call(
    app: GPUFlow, spec: Mapping[str, Any], owner: str, queue: str, header: dict[str, Any], submission: Submission
) -> None:
    """Make a call of a task that may be merged: with what its run is, if it begins one (broker/lua/join.lua)."""
    settings, fields = app.settings, header["fields"]
    only = [{"queue": queue, "requirement": header["requirement"]}]
    alternatives = json.loads(fields["alternatives"]) if "alternatives" in fields else only
    key = merge_key(
        spec,
        owner=None if settings.merge_across_owners else owner,
        asks=[[one["queue"], one["requirement"]] for one in alternatives],
        version=__version__,
        enabled=settings.enable_task_merge,
    )
    if key is None or not is_safe_id(header["id"]):
        return
    run_fields = {name: value for name, value in fields.items() if name not in ("pipeline", "stage", "labels", "spec")}
    if submission.for_run:
        run_fields[TRACEPARENT] = submission.for_run
    stored = whole_text(json.dumps(key.spec, ensure_ascii=False))
    header["kind"] = "call"
    header["call"] = {
        "kwargs": {"spec": portable(key.spec)},
        "spec": stored,
        "fields": {**run_fields, "spec": stored},
        "options": _join_options(app, key, ttl=spec.get("resultTtlSeconds") or 0),
    }


def _join_options(app: GPUFlow, key: MergeKey, *, ttl: float) -> dict[str, Any]:
    """Return what the join of a call is told beside its messages and records (broker/lua/join.lua)."""
    settings = app.settings
    return {
        "run": str(uuid.uuid4()),
        "call": key.call,
        "batch": key.batch,
        "tokens": key.tokens,
        "max_calls": settings.task_merge_max_batch_size,
        "max_tokens": settings.task_merge_max_batch_tokens,
        "result_ttl": ttl,
        "retention": int(settings.retention_days * 86_400),
    }


def plain_call_header(
    app: GPUFlow,
    name: str,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    demand: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the record of a call of a team's own task that is merged with equal ones, or None for one that is not.

    The task says so by `@app.task(merge=True)`, or by a function of its arguments that returns the key (None: not
    merged).
    """
    task_type = _task_named(app, name, options)
    merge = getattr(task_type, "merge", None)
    limits = _LIMITS | {"retries"}
    if not merge or not app.settings.enable_task_merge or any(options.get(limit) for limit in limits):
        return None
    positional, named = list(args or ()), dict(kwargs)
    plain = json.dumps([positional, named], sort_keys=True, default=str)
    key = plain if merge is True else merge(*positional, **named)
    if key is None:
        return None
    queue = str(getattr(options.get("queue"), "name", options.get("queue")) or "")
    call = plain_key(name, str(key), queue=queue, version=__version__)
    requirement = json.loads(demand["requirement"]) if demand is not None else None
    fields = new_record_fields(name=name, task_type=name, spec={}, requirement=requirement)
    return {
        "kind": "call",
        "id": options["task_id"],
        "requirement": demand["requirement"] if demand is not None else "",
        "fields": fields,
        "call": {
            "kwargs": None,
            "spec": "{}",
            "fields": fields,
            "options": _join_options(app, call, ttl=getattr(task_type, "merge_result_ttl", 0) or 0),
        },
    }


def function_header(
    app: GPUFlow, name: str, options: Mapping[str, Any], demand: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the record of a call of a team's own function that runs in a child, or None for one that does not.

    It does as its task says (`GPUTask.runs_in_child`); of a task that this process does not have, where the call asks
    for GPUs; none of Celery's own. Raises InvalidTemplate for an id that no record can have.
    """
    task = _task_named(app, name, options)
    requirement = json.loads(demand["requirement"]) if demand is not None else None
    asks = requirement is not None and bool(requirement.get("gpu_count"))
    is_wanted = asks if task is None else _runs_in_child(task, asks or asks_gpus(getattr(task, "resources", None)))
    if not is_wanted or name.startswith(CELERYS):
        return None
    if not is_safe_id(options["task_id"]):
        raise InvalidTemplate(
            f"task_id {str(options['task_id'])[:200]!r}: the id of a task with a child of its own names a folder; use "
            "at most 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    spec = {"taskType": FUNCTION_TYPE, "function": {"name": name}}
    limit = options.get("time_limit") or getattr(task, "time_limit", None)
    warm_name = _warm_name(task)
    return {
        "kind": "task",
        "id": options["task_id"],
        "requirement": demand["requirement"] if demand is not None else "",
        "hints": {
            "x": asked_name(spec),
            **({"s": function_session_name(warm_name, [demand["queue"]])} if warm_name and demand is not None else {}),
            **({} if limit is None else {"t": float(limit)}),
        },
        "fields": new_record_fields(name=name, task_type=FUNCTION_TYPE, spec=spec, requirement=requirement),
    }


def with_declared_resources(template: Template, app: GPUFlow) -> Template:
    """Return the template with the resources of functions whose stages have no word on GPUs, where they are known here.

    So they stand in the record: which worker starts a stage makes no difference.
    """

    def declared(stage: Stage) -> Stage:
        own = stage.spec.get("resources")
        if not is_function(stage.spec) or says_devices(own):
            return stage
        given = getattr(app.tasks.get(stage.spec["function"]["name"]), "resources", None)
        if not given:
            return stage
        resources = given if isinstance(given, Mapping) else {"accelerators": given}
        return replace(stage, spec={**stage.spec, "resources": deep_merge(resources, own or {})})

    return replace(template, stages=tuple(declared(stage) for stage in template.stages))


def templated_call(
    app: GPUFlow, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any], options: dict[str, Any]
) -> PublishableFunction:
    """Describe the record of a function that a template calls, as `submission_header` does; it runs in a child.

    `options` has its canonical spec (SPEC_OPTION), and `resources` where it goes by one of its alternatives first, or
    elsewhere than that says. Takes our own entries out of `options`. Workers of a version that knows of no such calls
    leave it to others, by its schema. Raises InvalidTemplate, ArtifactError when the store fails.
    """
    spec = options.pop(SPEC_OPTION)
    owner = options.pop("owner", None) or ""
    key = options.pop("idempotency_key", None)
    task_id = options["task_id"] = options.get("task_id") or (id_for_key(owner, key) if key else str(uuid.uuid4()))
    title, pipeline, stage, labels = (options.pop(one, None) for one in ("title", "pipeline", "stage", "labels"))
    alternatives = _beginning_with(
        options.pop("resources", None), choose_requirements(app, spec.get("resources"), light=True)
    )
    asks = [(queue_name(one), json.dumps(one.to_dict())) for one in alternatives]
    submission = of_submit(
        app.traces,
        task_id,
        options.pop(TRACEPARENT, None) or (options.get("headers") or {}).get(TRACEPARENT) or "",
        what=FUNCTION_TYPE,
        attributes={"gpuflow.task.id": task_id, "gpuflow.task.type": FUNCTION_TYPE, "gpuflow.owner": owner},
    )
    fields = new_record_fields(
        name=title or name,
        task_type=FUNCTION_TYPE,
        spec=spec,
        requirement=alternatives[0].to_dict(),
        owner=owner,
        pipeline=pipeline,
        stage=stage,
        labels=labels,
        traceparent=submission.traceparent,
        schema=RECORD_SCHEMA,
    )
    limit = options.get("time_limit")
    # Where this process does not have the function, whether it is warm is for the workers that do: a session of that
    # name is then looked for, and there is none of one that is not.
    warm_name = _warm_name(_task_named(app, name, options)) or name
    header: dict[str, Any] = {
        "kind": "task",
        "id": task_id,
        "requirement": asks[0][1],
        "hints": {
            "x": function_name(name),
            "s": function_session_name(warm_name, [queue for queue, _ in asks]),
            **({} if limit is None else {"t": float(limit)}),
        },
        "fields": fields,
    }
    if len(asks) > 1:
        fields["alternatives"] = json.dumps([{"queue": queue, "requirement": asked} for queue, asked in asks])
        header["fallback_seconds"] = fields["fallback_seconds"] = str(app.settings.fallback_seconds)
    sent_args, sent_kwargs = with_large_arguments(app, name, *_readable(args, kwargs), header)
    return PublishableFunction(
        args=sent_args or (), kwargs=sent_kwargs, queue=asks[0][0], header=header, submission=submission
    )


def _beginning_with(resources: Mapping[str, Any] | None, alternatives: list[Requirement]) -> list[Requirement]:
    """Return alternatives in their order, from the one that `resources` are; those of `resources` where it is none."""
    if resources is None:
        return alternatives
    asked = list(requirement_from_resources(resources, gpu_available=False))
    names = [queue_name(one) for one in alternatives]
    if queue_name(asked[0]) not in names:
        return asked
    first = names.index(queue_name(asked[0]))
    return alternatives[first:] + alternatives[:first]


def stored_function(app: GPUFlow, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a function as its record holds it once it is submitted: without arguments that are large."""
    name, args, kwargs, _ = call_of(spec)
    header = {"fields": {"spec": json.dumps(spec)}}
    with_large_arguments(app, name, *_readable(args, kwargs), header)
    stored: dict[str, Any] = json.loads(header["fields"]["spec"])
    return stored


def _readable(args: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return arguments that a worker can read: a mapping that looks like a type of kombu's and is none stays one."""
    if not _is_readable([list(args or ()), dict(kwargs)]):
        args, kwargs = _made_readable([list(args or ()), dict(kwargs)])
    return args or (), dict(kwargs)


def _is_readable(value: Any) -> bool:
    try:
        given(value)
    except Exception:  # noqa: BLE001  (whatever the reader of a type makes of a value that is none of it)
        return False
    return True


def _made_readable(value: Any) -> Any:
    """Return a copy of JSON-able data in which each mapping of that form, and no other, is one of gpuflow's type."""
    if isinstance(value, list | tuple):
        return [_made_readable(item) for item in value]
    if not isinstance(value, Mapping):
        return whole_text(value) if isinstance(value, str) else value
    made = {whole_text(key): _made_readable(item) for key, item in value.items()}
    if made.keys() != {"__type__", "__value__"} or _is_readable(made):
        return made
    return {"__type__": MAPPING, "__value__": [list(pair) for pair in made.items()]}


def with_large_arguments(
    app: GPUFlow, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any], header: dict[str, Any]
) -> tuple[Sequence[Any] | None, dict[str, Any]]:
    """Return the arguments of a function as they are sent: large ones as a reference, which its record names too.

    `header` is that of `function_header`. Raises ArtifactError when the store fails.
    """
    reference = refer_arguments(name, args, kwargs, lambda: data_store(app.settings, app.broker_address()))
    if reference is None:
        return args, dict(kwargs)
    spec = json.loads(header["fields"]["spec"])
    section = {name: value for name, value in spec["function"].items() if name not in ("args", "kwargs")}
    header["fields"]["spec"] = json.dumps({**spec, "function": {**section, "arguments": reference}})
    return (), {ARGUMENTS: reference}


def _runs_in_child(task: Any, asks: bool) -> bool:
    """Whether a call of a task runs in a child; not one of a class that knows nothing of that."""
    decide = getattr(task, "runs_in_child", None)
    return decide is not None and bool(decide(asks))


def _warm_name(task: Any) -> str:
    """Return what the calls of a task share that stays warm; "" for one that does not, or is not known here."""
    return str(getattr(task, "warm_name", ""))


def _task_named(app: GPUFlow, name: str, options: Mapping[str, Any]) -> Any:
    """Return the task that a call is of; None where this process does not have it."""
    task = options.get("task_type")
    return task if task is not None else (app._tasks.get(name) if app.finalized else None)


def _refuse_uploads(spec: Mapping[str, Any]) -> None:
    """Raise InvalidTemplate for a spec whose files were not sent: only `submit` looks for files."""
    data, command, search = spec.get("data"), spec.get("command"), spec.get("search")
    documents = search.get("documents") if isinstance(search, Mapping) else None
    places = (data, data.get("eval_split"), documents) if isinstance(data, Mapping) else (documents,)
    if any(isinstance(place, Mapping) and place.get("upload") for place in places):
        raise InvalidTemplate(
            "spec.data.upload names a local file, which gpuflow.submit() sends; submit the task by it, or give data.url"
        )
    for name in ("upload", "project"):
        if isinstance(command, Mapping) and command.get(name):
            raise InvalidTemplate(
                f"spec.command.{name} names what is local, which gpuflow.submit() sends; submit the task by it, or "
                "give command.url"
            )


def demand_header(app: GPUFlow, name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the queue registration of a plain Celery task that asks for resources, or None for one that does not.

    A team's own task says what it needs by `@app.task(resources="A100:1")` or `apply_async(resources=...)`. A call that
    names its queue goes there. Raises InvalidTemplate for one that is to have GPUs of its own, where that queue gives
    others or none.
    """
    task = _task_named(app, name, options)
    resources = options.pop("resources", None) or getattr(task, "resources", None)
    if not resources and _warm_name(task) and not options.get("queue"):
        resources = "cpu"  # a warm one is found by the queue of what it asks for
    if not resources:
        return None
    if not isinstance(resources, Mapping):
        resources = {"accelerators": resources}
    queue = options.get("queue")
    queue_text = str(getattr(queue, "name", queue) or "")
    if queue_text and not _runs_in_child(task, asks_gpus(resources)):
        return None
    alternatives = choose_requirements(app, resources, light=False)
    fitting = [one for one in alternatives if queue_text in ("", queue_name(one))]
    if not fitting and not alternatives[0].gpu_count:
        return None
    if not fitting:
        raise InvalidTemplate(
            f"task {name} asks for GPUs, which queue {queue_text!r} does not give; leave `queue` out: its queue is "
            f"{queue_name(alternatives[0])!r}, by what it asks for"
        )
    made = {
        "kind": "queue",
        "queue": queue_name(fitting[0]),
        "requirement": json.dumps(fitting[0].to_dict()),
    }
    return made if name.startswith(CELERYS) else {**made, "hints": {"x": function_name(name)}}


def choose_requirements(app: GPUFlow, resources: Mapping[str, Any] | None, *, light: bool) -> list[Requirement]:
    """Return what to ask for, in the order to try: those that some live worker can serve first, as they were given.

    Without `resources`: any GPU if the fleet has one, else cpu.
    """
    fleet = SeenFleet(app.redis, app.keys)
    if not resources:
        wants_gpu = not light and fleet.has_gpu()
        return list(requirement_from_resources({}, gpu_available=wants_gpu))
    alternatives = list(requirement_from_resources(resources, gpu_available=not light and fleet.has_gpu()))
    if len(alternatives) == 1:
        return alternatives
    capabilities = fleet.capabilities()
    return sorted(alternatives, key=lambda asked: not any(match(asked, capability).fits for capability in capabilities))
