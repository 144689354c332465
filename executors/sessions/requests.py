"""From the object of a `run` line to a request that this session may serve. Runs in a thread: it may wait for locks.

The environment of the process is that of the opening, and stays as it is: variables of a request's `env` count only for
`${env:NAME}` in its own spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from executors import task_access
from executors.base import MERGED, ExecutorError, bad_input
from executors.cache import Holds, hold_inputs
from executors.modeling.location import adapter_folder
from executors.sessions.lines import Open
from gpuflow.protocol import Request
from gpuflow.spec.references import UnresolvedReference, resolve_env


def opened(opening: Open) -> Open:
    """Return the opening with its references to the environment resolved, and hold what it names of the cache.

    Variables of its `env` that have references are set in this process, as in the child of a task; the others are set
    already. Raises ExecutorError: BadInput for a reference without a value, CacheEntryGone.
    """
    env: Mapping[str, Any] = opening.spec.get("env") or {}
    given = {name: value for name, value in env.items() if "${env:" in str(value)}
    spec = _resolved(opening.spec, given, os.environ)
    loaded = {"model": spec.get("model")}
    hold_inputs(
        Request(
            task_id="session",
            task_type=opening.task_type,
            spec=loaded,
            output_dir="",
            checkpoint_path=opening.checkpoint_path,
            cache_dir=opening.cache_dir,
        )
    )
    return replace(opening, spec=spec)


def read_request(raw: Mapping[str, Any], opening: Open, holds: Holds) -> Request:
    """Return the request, its references to the environment resolved, its folder made, its cached inputs in `holds`.

    Raises ExecutorError: BadRequest for what is no request or not for this session (retryable where another session
    would do), BadInput for a reference.
    """
    try:
        # The spec may hold much data: it is not written and read once more.
        request = Request.from_json(json.dumps({**raw, "spec": {}} if "spec" in raw else dict(raw)))
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(f"it cannot be read: {error}") from error
    request = replace(request, spec=raw["spec"])
    task_access.use(request)
    if not isinstance(request.spec, Mapping) or not isinstance(request.output_dir, str) or not request.output_dir:
        raise _refused("its spec must be an object and its output_dir text")
    if request.task_type != opening.task_type:
        raise _of_another(f"its task type is {request.task_type!r}, but this session serves {opening.task_type}")
    request = replace(request, spec=_resolved(request.spec, request.spec.get("env") or {}, dict(os.environ)))
    if MERGED not in request.spec:  # each child says for itself what it is for
        check_model(request, opening)
    hold_inputs(request, holds)
    Path(request.output_dir).mkdir(parents=True, exist_ok=True)
    return request


def _refused(why: str) -> ExecutorError:
    return ExecutorError("BadRequest", f"the request cannot be served: {why}")


def _of_another(why: str) -> ExecutorError:
    """Return the refusal of a request that another session could serve."""
    return ExecutorError("BadRequest", f"the request is not for this session: {why}", retryable=True)


def _resolved(spec: Mapping[str, Any], env: Mapping[str, Any], environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Return a spec with its references replaced from `environ`, to which the variables of `env` are added."""
    try:
        for name, value in env.items():
            environ[name] = resolve_env(str(value), environ)
        found: dict[str, Any] = resolve_env({name: part for name, part in spec.items() if name != MERGED}, environ)
    except UnresolvedReference as error:
        raise bad_input(str(error)) from error
    if MERGED in spec:  # the references of one child are its own affair
        found[MERGED] = spec[MERGED]
    return found


def check_model(request: Request, opening: Open) -> None:
    """Raise BadRequest if the request is for other weights than the session has loaded; no model means that one.

    A session that has loaded the weights of a checkpoint serves requests that begin from it, and no others.
    """
    wanted, here = named_model(request.spec), named_model(opening.spec)
    if wanted and wanted != here:
        raise _of_another(f"it is for the model {wanted}, but this session has loaded {here}")
    weights = _weights(opening.checkpoint_path)
    if _weights(request.checkpoint_path) != weights:
        raise _of_another(
            f"it begins from {request.checkpoint_path or 'the model itself'}, but this session has loaded "
            f"{weights or 'the model itself'}"
        )


def _weights(checkpoint: str | None) -> str | None:
    """Return a checkpoint that stands for the whole model; None for an adapter, which a request brings along."""
    return checkpoint if checkpoint and adapter_folder(checkpoint) is None else None


def named_model(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a spec says of its model, without what it leaves open."""
    source = (spec.get("model") or {}).get("source") or {}
    if not source and (spec.get("embedding") or {}).get("model"):
        source = {"identifier": spec["embedding"]["model"]}
    return {name: value for name, value in source.items() if value is not None}
