"""From a delivery to a committed result: START, child, artifacts, COMMIT. Called by the Celery tasks (tasks/).

A supervised Celery task is one call of `supervise(task, spec)`. What it returns or raises is what Celery stores,
counts and links, and it does so only after the record says so.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery.exceptions import Ignore, Reject

from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.manifest import seal_results
from gpuflow.errors import GPUFlowError, TaskCancelled, TaskDead, TaskFailed
from gpuflow.ledger.records import new_record_fields
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.protocol import Request
from gpuflow.spec.units import duration_seconds
from gpuflow.worker.attempt import Attempt, Outcome
from gpuflow.worker.environment import child_environment, given_variables
from gpuflow.worker.results import ResultsFolder
from gpuflow.worker.runtime import Runtime, current

log = get_logger("gpuflow.supervisor")

#: How a supervised task ends when it does not succeed; Celery logs these in one line, without a traceback.
ENDS = (TaskFailed, TaskCancelled)


def supervise(task: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one delivery of a supervised task and return its committed result.

    Raises what Celery is to record: TaskFailed, TaskCancelled, TaskDead after they are committed; Ignore for a
    duplicate or a superseded attempt; Reject for one that goes back to its queue.
    """
    runtime = current()
    request = task.request
    tag = request.properties["delivery_tag"]
    folder = ResultsFolder(runtime.app.settings.results_dir, request.id)
    verdict = runtime.app.ledger.start(
        request.id,
        worker=runtime.worker_id,
        owner_token=runtime.leases.owner,
        tag=tag,
        lowest_attempt=folder.next_attempt(),
        new_fields=new_record_fields(
            name=str(spec.get("taskType", "")),
            task_type=str(spec.get("taskType", "")),
            spec=spec,
            requirement=None,
        ),
    )
    if verdict.verdict in ("live", "lost"):
        log.warning("delivery_dropped", task=request.id, why=verdict.verdict)
        raise Ignore
    if verdict.verdict == "final":
        return _replay(runtime, request.id)
    runtime.app.attempts.begin(request.id, verdict.attempt)
    try:
        log.info("task_started", task=request.id, attempt=verdict.attempt, worker=runtime.worker_id)
        task.backend.store_result(request.id, {"attempt": verdict.attempt}, "STARTED", request=request)
        outcome = _attempt(runtime, task, spec, tag, folder, verdict.attempt)
        return _commit(runtime, request.id, verdict.attempt, folder, outcome, spec)
    finally:
        runtime.admission.release(tag)


def _attempt(
    runtime: Runtime, task: Any, spec: Mapping[str, Any], tag: str, folder: ResultsFolder, number: int
) -> Outcome:
    request = task.request
    allocation = runtime.admission.claim(tag)
    gpus = allocation.gpus if allocation else ()
    settings = runtime.app.settings
    try:
        output_dir = folder.create_attempt(number)
        inputs = localize(spec, cache_dir=settings.cache_dir, results_dir=settings.results_dir)
    except (OSError, GPUFlowError) as error:
        return Outcome(completed=False, error=_cause(error))
    checkpoint_dir = output_dir / "checkpoints"
    child_request = Request(
        task_id=request.id,
        task_type=str(spec["taskType"]),
        spec=inputs.spec,
        output_dir=str(output_dir),
        attempt=number,
        gpus=gpus,
        checkpoint_dir=str(checkpoint_dir),
        checkpoint_path=inputs.checkpoint_path,
        cache_dir=str(settings.cache_dir),
    )
    environment = child_environment(
        os.environ,
        pass_env=settings.pass_env,
        requested=spec.get("env"),
        given=given_variables(
            task_id=request.id,
            attempt=number,
            gpus=gpus,
            output_dir=output_dir,
            checkpoint_dir=checkpoint_dir,
            resume_from=None,
            model=spec.get("model"),
            results_dir=settings.results_dir,
            python_path=_python_path(),
        ),
    )
    attempt = Attempt(
        child_request,
        runtime.app.ledger,
        argv=[sys.executable, "-P", "-m", "executors"],
        environment=environment,
        log_path=folder.log_path(number),
        grace_seconds=settings.grace_seconds,
        deadline_seconds=duration_seconds(spec["timeout"]) if spec.get("timeout") else None,
        on_progress=lambda progress: task.backend.store_result(
            request.id, {**progress, "attempt": number}, "PROGRESS", request=request
        ),
    )
    runtime.begin(request.id, attempt)
    runtime.leases.start(tag, lambda: attempt.stop("lost"))
    try:
        return attempt.run()
    finally:
        runtime.end(request.id)


def _commit(
    runtime: Runtime,
    task_id: str,
    number: int,
    folder: ResultsFolder,
    outcome: Outcome,
    spec: Mapping[str, Any],
) -> dict[str, Any]:
    ledger = runtime.app.ledger
    if outcome.stop in ("lost", "superseded"):
        log.warning("attempt_superseded", task=task_id, attempt=number, why=outcome.stop)
        raise Ignore
    if outcome.stop == "shutdown":
        log.info("task_returned", task=task_id, attempt=number)
        raise Reject("the worker stops", requeue=True)
    if outcome.completed:
        try:
            sealed = seal_results(folder.attempt_dir(number), outcome.result, outcome.artifacts, spec)
        except (OSError, GPUFlowError) as error:
            outcome = Outcome(completed=False, error=_cause(error))
        else:
            if not ledger.commit(
                task_id, TaskState.SUCCEEDED, attempt=number, result=sealed.result, manifest=sealed.digest
            ):
                log.warning("late_result_refused", task=task_id, attempt=number)
                raise Ignore
            folder.publish(number)
            log.info("task_succeeded", task=task_id, attempt=number, worker=runtime.worker_id)
            return sealed.result
    failure = outcome.error or {"type": "Failed", "message": "the attempt failed", "retryable": False}
    state = TaskState.CANCELLED if outcome.stop == "cancelled" else TaskState.FAILED
    if not ledger.commit(task_id, state, attempt=number, error=failure):
        log.warning("late_failure_refused", task=task_id, attempt=number)
        raise Ignore
    log.info("task_ended", task=task_id, attempt=number, state=str(state), cause=failure["message"])
    raise _exception(state, failure)


def _replay(runtime: Runtime, task_id: str) -> dict[str, Any]:
    """Give Celery the end of a task whose record is final already: storing and counting it again is idempotent."""
    record = runtime.app.ledger.get(task_id)
    runtime.app.attempts.begin(task_id, record.attempt)
    if record.state is TaskState.SUCCEEDED:
        return dict(record.result or {})
    raise _exception(record.state, dict(record.error or {}))


def _exception(state: TaskState, error: dict[str, Any]) -> Exception:
    message = str(error.get("message") or f"the task is {state}")
    if state is TaskState.CANCELLED:
        return TaskCancelled(message)
    if state is TaskState.DEAD:
        return TaskDead(message, error)
    return TaskFailed(message, error)


def _cause(error: Exception) -> dict[str, Any]:
    full = isinstance(error, OSError) and error.errno == 28
    return {
        "type": "DiskFull" if full else type(error).__name__,
        "message": str(error),
        "retryable": isinstance(error, OSError),
    }


def _python_path() -> str | None:
    """Return the folder of our packages when they are not installed, so that the child finds them too."""
    home = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if home in installed else str(home)
