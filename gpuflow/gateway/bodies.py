"""What clients send to the HTTP API: bodies up to a limit, templates, and idempotency keys.

Called by the routes. A template is text that somebody else has written: it is read as text, never as a path or a name,
and it names no file of the gateway's machine.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from gpuflow.artifacts.destination import data_store
from gpuflow.artifacts.large_values import refer_large
from gpuflow.artifacts.uploads import upload_places
from gpuflow.celery_app import GPUFlow
from gpuflow.client import with_data
from gpuflow.gateway.problems import Problem
from gpuflow.ledger.records import TaskRecord
from gpuflow.protocol import whole_text
from gpuflow.spec import Mistake, Template
from gpuflow.spec.function_section import is_function
from gpuflow.spec.reading import MAX_BYTES
from gpuflow.spec.report import invalid, path_text
from gpuflow.submission import stored_function, with_declared_resources
from gpuflow.templates import parse_text

M = TypeVar("M", bound=BaseModel)

#: Most characters of an idempotency key.
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
#: Content types of a template.
_TEMPLATES: Final = ("application/json", "application/yaml", "application/x-yaml", "text/yaml", "text/plain")


async def body_of(request: Request, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the body as text. Raises Problem 400 where it is no UTF-8, 413 where it is larger than `max_bytes`."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise Problem(
                413,
                "too-large",
                f"the body is larger than the {max_bytes} bytes of a request; name large data by data.url",
                {"Connection": "close"},
            )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Problem(400, "bad-request", "the body is not UTF-8; send it as UTF-8") from None


async def template_of(request: Request) -> str:
    """Return the text of a template. Raises Problem 400, 413, 415."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in (*_TEMPLATES, "application/x-www-form-urlencoded"):  # which is what `curl --data-binary` says
        known = "application/json or application/yaml"
        raise Problem(415, "bad-content-type", whole_text(f"{kind[:60]!r} is no template; send it as {known}"))
    text = await body_of(request)
    if not text.strip():
        raise Problem(400, "bad-request", "the body is empty; send a template as JSON or YAML")
    return text


async def model_of(request: Request, model: type[M], *, max_bytes: int = 1 << 20) -> M:
    """Return the JSON body as a model. Raises Problem 400 for what is no JSON, 413, 422 with every mistake."""
    text = await body_of(request, max_bytes=max_bytes)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise Problem(400, "bad-request", "the body is no JSON; send a JSON object") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise Problem(
            422, "invalid-body", "the body has mistakes; `errors` lists them", errors=mistakes(error)
        ) from None


def mistakes(error: ValidationError) -> list[dict[str, str]]:
    """Return every mistake that pydantic has found."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return [
        {"path": whole_text(path_text(tuple(one["loc"]))), "message": whole_text(one["msg"])} for one in found[:100]
    ]


def read_template(text: str) -> Template:
    """Return the template of a body, without files of the gateway. Raises InvalidTemplate."""
    template = parse_text(text, "template")
    found = [
        Mistake(
            path=path_text(path),
            message=f"names a local file, which a gateway cannot read; send it first (POST /api/v1/results/NAME/files) "
            f"and give its address as {'.'.join(map(str, path[-2:-1]))}.url, or submit by `gpuflow submit`",
        )
        for path, _ in upload_places(template)
    ]
    if found:
        raise invalid("template", found)
    wrong = [stage.name for stage in template.stages if stage.spec.get("target") == "local"]
    if wrong:
        message = "is local, but a gateway runs nothing itself; leave it out, or use `gpuflow run`"
        raise invalid("template", [Mistake(path="spec.target", message=message)])
    return template


def refuse_functions(template: Template, allowed: Sequence[str]) -> None:
    """Raise Problem 403 for a template that calls a function which GPUFLOW_GATEWAY_FUNCTIONS does not name.

    A function has the worker's environment, and takes what arguments it is given: which of them people may call that
    have a token, and no address of the broker, is for the operator to say.
    """
    for stage in template.stages:
        if is_function(stage.spec):
            _refuse_function(f"stage {stage.name!r}", _function_of(stage.spec), allowed)


def refuse_function_of(record: TaskRecord, allowed: Sequence[str]) -> None:
    """Raise Problem 403 for a task that is the call of such a function, by a template or by plain Celery.

    A merged call by plain Celery has no spec; its type is the name of its function.
    """
    if is_function(record.spec):
        _refuse_function(f"task {record.id}", _function_of(record.spec), allowed)
    elif not record.spec:
        _refuse_function(f"task {record.id}", record.task_type, allowed)


def _function_of(spec: Mapping[str, Any]) -> str:
    return str((spec.get("function") or {}).get("name"))


def _refuse_function(who: str, name: str, allowed: Sequence[str]) -> None:
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
        detail = (
            f"{who} calls the function {name}, which this gateway lets nobody call; its operator allows it by "
            "GPUFLOW_GATEWAY_FUNCTIONS"
        )
        raise Problem(403, "function-not-allowed", whole_text(detail))


def idempotency_key(request: Request) -> str | None:
    """Return the key of the header `Idempotency-Key`. Raises Problem 400."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise Problem(
            400, "bad-key", "Idempotency-Key takes 1 to 255 visible characters of ASCII; a UUID is a good one"
        )
    return key


def same_work(app: GPUFlow, template: Template, stored: list[Any], *, as_task: bool) -> bool:
    """Whether the specs that a record holds are those of the template, as a submit would store them.

    `as_task`: the record is that of a task, whose escapes are undone and whose large arguments are in the store. That
    of a pipeline holds its template as it is.
    """
    ready = with_data(with_declared_resources(template, app), app, uploads=False)

    def in_store(spec: Any) -> Any:
        if is_function(spec):
            return stored_function(app, spec)
        return refer_large(spec, lambda: data_store(app.settings, app.broker_address()))

    if as_task:
        specs = [in_store(spec) for stage in ready.stages for spec in stage.tasks(str)]  # a task refers to no stage
    else:
        specs = [stage.spec for stage in ready.stages]
    return _plain(specs) == _plain(stored)


def other_body(key: str) -> Problem:
    """Return the answer to a key that has been used for something else."""
    detail = f"the Idempotency-Key {key!r} was used for another template; take a new key for new work"
    return Problem(409, "key-in-use", detail)


def _plain(value: Any) -> str:
    return whole_text(json.dumps(value, sort_keys=True, default=str))
