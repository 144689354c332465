"""Merged requests: one request that carries the calls of several callers as `spec.merge_children`.

    merge_children: [{id, spec}]          ->  result {"children": {id: {...result} | {"error": {...}}}}

A child's spec is laid over that of the request, section by section, so that what is common may stand there once; so is
its `checkpoint_path`. One whose inputs cannot be had has an `error` in place of a spec. Files of a child go to
`children/<id>/` of the output folder, and its events carry `child: <id>`. Called by `__main__`, and by executors with a
way of their own to run several children.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executors import cancellation
from executors.base import MERGED, Executor, ExecutorError, plain, write_responses
from executors.failures import classify
from gpuflow.protocol import Emitter, Request, is_safe_id
from gpuflow.spec.references import UnresolvedReference, resolve_env

Result = dict[str, Any]
Run = Callable[[Request, Emitter], Result]


@dataclass(frozen=True, kw_only=True)
class MergedChild:
    """One caller of a merged request: its id, and a request of its own; `error` where that cannot be made."""

    id: str
    request: Request
    error: ExecutorError | None = None


class ChildEmitter(Emitter):
    """Tells the events of one child: each with its id, its files below `children/<id>/`."""

    def __init__(self, parent: Emitter, child_id: str) -> None:
        super().__init__(parent._stream)
        self._parent = parent
        self._id = child_id

    def emit(self, name: str, /, **data: Any) -> None:
        """Write one event with the child's id."""
        if name == "artifact":
            data["path"] = f"children/{self._id}/{data['path']}"
        self._parent.emit(name, **data, child=self._id)


def run_merged(executor: Executor, request: Request, emitter: Emitter) -> Result:
    """Run a merged request and return its result value.

    Raises ExecutorError: BadInput where the list is none; and the error of the children when each of them failed in a
    way that another attempt may mend, so that there is one.
    """
    children = children_of(request)
    good = [child for child in children if child.error is None]
    return joined(request, children, executor.run_children(request, good, emitter) if good else {}, emitter)


def joined(request: Request, children: Sequence[MergedChild], done: Mapping[str, Result], emitter: Emitter) -> Result:
    """Write and return the result value of a merged request from what came of its children. Raises as `run_merged`."""
    bad = {child.id: failed(child.error) for child in children if child.error is not None}
    done = {**done, **bad}
    results = {child.id: plain(done[child.id] if child.id in done else _no_result(child)) for child in children}
    errors = [result["error"] for result in results.values() if _is_failure(result)]
    if len(errors) == len(results) and all(error.get("retryable") for error in errors):
        raise ExecutorError(errors[0]["type"], errors[0]["message"], retryable=True)
    value = {"children": results}
    write_responses(request, emitter, value)
    return value


def _is_failure(result: Any) -> bool:
    """Say whether a result is the error of a child: a value of its own that has a field `error` is none."""
    error = result.get("error") if isinstance(result, Mapping) and len(result) == 1 else None
    return isinstance(error, Mapping) and {"type", "message"} <= set(error)


def run_alone(child: MergedChild, run: Run, emitter: Emitter) -> Result:
    """Run one child by `run(request, emitter)`; whatever it raises becomes its own error, with the traceback logged."""
    try:
        Path(child.request.output_dir).mkdir(parents=True, exist_ok=True)
        return run(child.request, ChildEmitter(emitter, child.id))
    except Exception as error:  # noqa: BLE001  (the failure of one child is no failure of the others)
        return failed(error)


def failed(error: Exception) -> Result:
    """Return the result of a child that failed, and log why. Raises what a signal raised, if a library swallowed it."""
    cancellation.check()
    if not isinstance(error, ExecutorError):
        traceback.print_exception(error)
    return {"error": classify(error)}


def _no_result(child: MergedChild) -> Result:
    return failed(ExecutorError("NoResult", f"the executor gave no result for child {child.id}"))


def children_of(request: Request) -> list[MergedChild]:
    """Return the children of a merged request, those that cannot be made with their error. Raises BadInput."""
    given = request.spec.get(MERGED)
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ExecutorError("BadInput", f"{MERGED} must be a list of {{id, spec}} with at least one entry")
    common = {name: value for name, value in request.spec.items() if name != MERGED}
    children = [_child(entry, request, common) for entry in given]
    ids = [child.id for child in children]
    if len(set(ids)) < len(ids):
        raise ExecutorError("BadInput", f"{MERGED} has an id twice: {', '.join(sorted(ids))}")
    return children


def _child(entry: Any, request: Request, common: Mapping[str, Any]) -> MergedChild:
    child_id = entry.get("id") if isinstance(entry, Mapping) else None
    if not is_safe_id(child_id):
        raise ExecutorError("BadInput", f"an entry of {MERGED} has no usable id: letters, digits, '.', '_' and '-'")
    own, failure = entry.get("spec"), entry.get("error")
    places = {
        "checkpoint_path": entry.get("checkpoint_path", request.checkpoint_path),
        "output_dir": str(Path(request.output_dir) / "children" / child_id),
        "checkpoint_dir": None
        if request.checkpoint_dir is None
        else str(Path(request.checkpoint_dir) / "children" / child_id),
    }
    bare = replace(request, task_id=child_id, spec=common, resume_from=None, **places)
    try:
        if isinstance(failure, Mapping):
            raise ExecutorError(failure["type"], failure["message"], retryable=bool(failure.get("retryable")))
        if not isinstance(own, Mapping):
            raise ExecutorError("BadInput", f"child {child_id} has no spec; give an object")
        data = {**common, **own}.get("data")
        if isinstance(data, Mapping) and "shard" in data:
            raise ExecutorError(
                "BadInput", f"child {child_id} is one shard of its data, which runs as a task of its own"
            )
        return MergedChild(id=child_id, request=replace(bare, spec={**common, **resolve_env(own, os.environ)}))
    except UnresolvedReference as error:
        return MergedChild(id=child_id, request=bare, error=ExecutorError("BadInput", str(error)))
    except ExecutorError as error:
        return MergedChild(id=child_id, request=bare, error=error)
