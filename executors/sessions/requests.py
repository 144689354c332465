"""From the object of a `run` line to a request that this session may serve. Runs in a thread: it may wait for locks.

The environment of the process is that of the session, and stays as it is: variables of the request's `env` count only
for `${env:NAME}` in its own spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors.base import MERGED, ExecutorError, bad_input
from executors.cache import hold_inputs
from executors.modeling.location import adapter_folder
from executors.sessions.lines import Opening
from gpuflow.protocol import Request
from gpuflow.spec.references import UnresolvedReference, resolve_env


def read_request(raw: Mapping[str, Any], opening: Opening) -> Request:
    """Return the request, its references to the environment resolved, its folder made, its cached inputs held.

    Raises ExecutorError: BadRequest for what is no request or not for this session, BadInput for a reference.
    """
    try:
        request = Request.from_json(json.dumps(raw))
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(f"it cannot be read: {error}") from error
    if not isinstance(request.spec, Mapping) or not isinstance(request.output_dir, str) or not request.output_dir:
        raise _refused("its spec must be an object and its output_dir text")
    if request.task_type != opening.task_type:
        raise _refused(f"its task type is {request.task_type!r}, but this session serves {opening.task_type}")
    request = _resolved(request)
    check_model(request, opening)
    hold_inputs(request)
    Path(request.output_dir).mkdir(parents=True, exist_ok=True)
    return request


def _refused(why: str) -> ExecutorError:
    return ExecutorError("BadRequest", f"the request cannot be served: {why}")


def _resolved(request: Request) -> Request:
    environ = dict(os.environ)
    try:
        for name, value in (request.spec.get("env") or {}).items():
            environ[name] = resolve_env(str(value), environ)
        spec = resolve_env({name: part for name, part in request.spec.items() if name != MERGED}, environ)
    except UnresolvedReference as error:
        raise bad_input(str(error)) from error
    if MERGED in request.spec:  # the references of one child are its own affair
        spec[MERGED] = request.spec[MERGED]
    return Request(**{**request.__dict__, "spec": spec})


def check_model(request: Request, opening: Opening) -> None:
    """Raise BadRequest if the request names another model than the session has loaded; naming none means that one."""
    wanted, here = named_model(request.spec), named_model(opening.spec)
    if wanted and wanted != here:
        raise _refused(f"it is for the model {wanted}, but this session has loaded {here}")
    base = request.checkpoint_path
    if base and base != opening.checkpoint_path and adapter_folder(base) is None:
        raise _refused(f"it begins from the weights of {base}, but this session has loaded others")


def named_model(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a spec says of its model, without what it leaves open."""
    source = (spec.get("model") or {}).get("source") or {}
    if not source and (spec.get("embedding") or {}).get("model"):
        source = {"identifier": spec["embedding"]["model"]}
    return {name: value for name, value in source.items() if value is not None}
