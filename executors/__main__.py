"""The child process: reads one request on stdin, runs its executor, writes events on stdout.

`python -m executors session` serves many requests on one loaded model instead, see `executors.sessions`.

Exit codes: 0 completed, 1 failed, 2 a request that cannot be read or is of no known task type, 143 cancelled or
preempted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn

from executors import cancellation, task_access
from executors.base import MERGED, Executor, ExecutorError, plain
from executors.cache import hold_inputs
from executors.cores import limit_threads
from executors.distributed.plan import plan_ranks, use_gpus
from executors.registry import find
from gpuflow.importing import end_quickly
from gpuflow.protocol import Emitter, Request, is_user_type
from gpuflow.spec.references import UnresolvedReference, resolve_env

COMPLETED: Final = 0
FAILED: Final = 1
BAD_REQUEST: Final = 2
CANCELLED: Final = 143


def main() -> int:
    """Run the one request of this process and return the exit code."""
    emitter = Emitter.claim_stdout()
    try:
        cancellation.install()
        return _serve(emitter)
    except cancellation.Cancelled as end:
        cancellation.ignore()
        emitter.finish("cancelled", end.record())
        return CANCELLED


def _serve(emitter: Emitter) -> int:
    emitter.emit("connection", status="connected")
    try:
        request = _read_request()
        task_access.use(request)
        request = _with_environment(request)
        emitter.output_dir = request.output_dir
        executor = find(request.task_type)
        if not is_user_type(request.task_type):
            end_quickly()
    except ExecutorError as error:
        return _fail(emitter, error, BAD_REQUEST)
    except Exception as error:  # noqa: BLE001  (a broken executor module is this task's failure)
        return _fail(emitter, error, FAILED)
    try:
        hold_inputs(request)
        result = plain(_run(executor, request, emitter))
        cancellation.ignore()
        emitter.result(result)
    except Exception as error:  # noqa: BLE001  (whatever went wrong is told, with its traceback in the log)
        return _fail(emitter, error, FAILED)
    emitter.finish("completed")
    return COMPLETED


def _run(executor: Executor, request: Request, emitter: Emitter) -> dict[str, Any]:
    plan = plan_ranks(request)
    if plan.processes == 1:
        limit_threads()
    if MERGED in request.spec:
        from executors.merging import run_merged

        return run_merged(executor, request, emitter)
    data = request.spec.get("data")
    if isinstance(data, Mapping) and "shard" in data:
        from executors.data.shards import take_shard

        request, shard = take_shard(request, emitter)
        if shard is not None:
            has_rows = shard.end > shard.start
            result = executor.run(request, emitter) if has_rows else shard.empty_result(request, emitter)
            return shard.completed(result)
    use_gpus(plan, request)
    if plan.processes > 1:
        from executors.distributed.launch import run_ranks

        return run_ranks(request, plan, emitter)
    return executor.run(request, emitter)


def _read_request() -> Request:
    try:
        request = Request.from_json(sys.stdin.buffer.read().decode("utf-8"))
        if not isinstance(request.spec, Mapping):
            raise ValueError("its spec must be a JSON object")
        if not isinstance(request.task_type, str) or not isinstance(request.output_dir, str):
            raise ValueError("its task_type and output_dir must be text")
    except (ValueError, TypeError, RecursionError) as error:
        raise ExecutorError(
            "BadRequest", f"the request on stdin cannot be read: {error}; send one JSON object"
        ) from error
    return request


def _with_environment(request: Request) -> Request:
    """Return the request with what the environment gives it.

    `${env:NAME}` is replaced here in the child alone, so no secret is in a record; first in the variables of `env`, one
    after the other, which become part of the environment. RESUME_FROM stands in for a `resume_from` that the request
    lacks.
    """
    try:
        for name, value in (request.spec.get("env") or {}).items():
            if "${env:" in str(value):
                os.environ[name] = resolve_env(str(value), os.environ)
        spec = resolve_env({name: part for name, part in request.spec.items() if name != MERGED}, os.environ)
    except UnresolvedReference as error:
        raise ExecutorError("BadInput", str(error)) from error
    if MERGED in request.spec:  # the references of one child are its own affair
        spec[MERGED] = request.spec[MERGED]
    return replace(request, spec=spec, resume_from=request.resume_from or os.environ.get("RESUME_FROM"))


def _fail(emitter: Emitter, error: Exception, code: int) -> int:
    import traceback

    from executors.failures import classify

    cancellation.check()
    traceback.print_exception(error)
    cancellation.ignore()
    emitter.finish("failed", plain(classify(error)))
    return code


def _session() -> NoReturn:
    from executors.sessions.serving import main as serve

    serve()


if __name__ == "__main__":
    if sys.argv[1:] == ["session"]:
        _session()
    sys.exit(main())
